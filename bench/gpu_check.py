"""Everything that only a GPU can answer, asked in one run of under four minutes.

    python -m draftgather.bench.gpu_check --out FOLDER          # RESULTS.md and results.json in FOLDER
    python -m draftgather.bench.gpu_check --dry --out FOLDER    # the same code to its end without a GPU

Exit code 0 if every check of correctness passed, else 1: a check that was not run has not passed. A missed
speed target is told, and is no error. The dry run takes Triton's interpreter for what is compared byte by byte, and
the do-nothing driver for what is counted, each in a process of its own; it tells no times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Timer
from time import monotonic, perf_counter_ns
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

import draftgather as dg
from draftgather import draft_assembler
from draftgather.bench.demo import same_bytes
from draftgather.bench.do_nothing import do_nothing
from draftgather.bench.gpu_device import Device, DoNothingDevice, DryDevice
from draftgather.bench.gpu_paths import OTHERS, OURS, SLOTS, STOCK, BatchPaths
from draftgather.bench.gpu_report import Cell, Report, Section
from draftgather.kernels import gather_rows as kernels
from draftgather.kernels.row_tables import LaunchDescriptor
from draftgather.launch import launch
from draftgather.machine import Machine
from draftgather.notices import refusals_expected

Rows = dict[str, list[torch.Tensor | None]]
Blocks = dict[str, torch.Tensor]  # [num_rows, width] a field, on the host

POISON = 0xA5
BUDGET_S = 230.0


class Sizes(NamedTuple):
    """How much is done."""

    batches: tuple[int, ...]  # rows a batch, of the calls that are compared
    strict: tuple[int, ...]  # the same, where no wait is allowed
    hidden: int
    calls_in_flight: int
    cold_sets: int  # of rows and outputs, more than the caches hold together
    many: int  # rows of the device-resident kernel measurement
    timed: tuple[int, ...]  # rows a batch of the wall times
    rounds: int


REAL = Sizes((1, 2, 8, 9, 64, 512), (2, 9, 64, 512), 7168, 8, 16, 512, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), 20)
DRY = Sizes((1, 9), (1,), 24, 3, 2, 9, (1, 9), 1)


class Source(NamedTuple):
    """Where rows are before a call, and the way they should go."""

    name: str
    where: str
    route: str
    zero_copy: bool = True


SOURCES = (
    Source("device rows", "device", "pointers"),
    Source("pinned rows, zero-copy", "pinned", "pointers"),
    Source("pinned mailbox", "mailbox", "slots"),
    Source("pageable rows", "pageable", "staged"),
    Source("pageable mailbox", "pageable mailbox", "staged"),
    Source("pinned mailbox, no zero-copy", "mailbox", "staged", False),
    Source("device rows, no zero-copy", "device", "pointers", False),
)


class Mode(NamedTuple):
    """What one call writes."""

    name: str
    relay: bool
    outputs: bool
    padding: int


MODES = (
    Mode("batch", False, True, 0),
    Mode("padded", False, True, 3),
    Mode("batch and relay", True, True, 0),
    Mode("relay only", True, False, 0),
    Mode("padded, relay", True, True, 3),
)


def field_lists(hidden: int) -> dict[str, tuple[dg.Field, ...]]:
    seed = dg.Field("seed", 2048 if hidden > 1024 else 40, torch.int32, optional=True)
    return {
        "top-k 4": dg.eagle_fields(4, hidden),
        "top-k 1": dg.eagle_fields(1, hidden // 2),
        "top-k 8, float32": dg.eagle_fields(8, hidden // 4, torch.float32),
        "3 steps of top-k 4": dg.eagle_fields(4, hidden // 4, num_steps=3),
        "optional seed": (*dg.eagle_fields(1, 7), seed),
        "hidden and mask": (dg.Field("hidden_states", hidden // 4, torch.float16), dg.Field("mask", 1, torch.bool)),
        "odd widths": (dg.Field("hidden_states", 33, torch.bfloat16), dg.Field("flags", 7, torch.uint8)),
    }


def random_blocks(fields: Sequence[dg.Field], num_rows: int, seed: int) -> Blocks:
    """Any bits at all, NaN among them; a bool is 0 or 1."""
    generator, blocks = torch.Generator().manual_seed(seed), {}
    for f in fields:
        end = 2 if f.dtype is torch.bool else 256
        raw = torch.randint(0, end, (num_rows, f.row_bytes), dtype=torch.uint8, generator=generator)
        blocks[f.name] = raw.view(f.dtype)
    return blocks


def is_there(field: dg.Field, i: int) -> bool:
    return not field.optional or i % 3 != 1


def place(fields: Sequence[dg.Field], blocks: Blocks, put: Callable[[torch.Tensor], torch.Tensor], odd: bool) -> Rows:
    """Every row as a tensor of its own, at a multiple of 16 bytes or, `odd`, one element beyond it."""
    rows: Rows = {}
    for f in fields:
        block, per_16 = blocks[f.name], 16 // f.dtype.itemsize
        padded = torch.zeros(len(block), -(-(f.width + 1) // per_16) * per_16, dtype=f.dtype)
        start = 1 if odd else 0
        padded[:, start : start + f.width] = block
        placed = put(padded)[:, start : start + f.width]
        rows[f.name] = [placed[i] if is_there(f, i) else None for i in range(len(block))]
    return rows


def picked(rows: Rows, order: Sequence[int]) -> dict[str, Any]:
    return {name: [given[i] for i in order] for name, given in rows.items()}


def fill(mailbox: dg.DraftMailbox, slots: Sequence[int], blocks: Blocks, first: int = 0) -> None:
    """Put rows first.. of the blocks into `slots`, each for the owner 100 + its slot."""
    for i, slot in enumerate(slots, first):
        rows = {f.name: blocks[f.name][i] if is_there(f, i) else None for f in mailbox.fields}
        mailbox.put(slot, 100 + slot, **rows)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(POISON)


def tables_of(future_map: dg.FutureMap) -> dict[str, torch.Tensor]:
    valid = {f"valid {name}": flags for name, flags in future_map.valid.items()}
    vectors = {"seq_lens": future_map.new_seq_lens_buf, "bonus_tokens": future_map.output_tokens_buf}
    return {**future_map.buffers, **valid, **vectors}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert got.keys() == expected.keys(), f"{what}: fields {sorted(got)}, expected {sorted(expected)}"
    for name, tensor in expected.items():
        assert same_bytes(got[name].cpu(), tensor), f"{what}: {name} differs"


# -- correctness


class _Rig:
    """Rows of one field list in one place, and an assembler that reads them there."""

    def __init__(self, device: Device, fields: tuple[dg.Field, ...], source: Source, blocks: Blocks, odd: bool) -> None:
        self.device, self.source = device, source
        num_rows = len(next(iter(blocks.values())))
        machine = device.machine_with(reads_rows=source.route != "staged", zero_copy=source.zero_copy)
        needs_zero_copy = "device" not in source.where
        self.route: str = source.route if machine.zero_copy or not needs_zero_copy else "staged"
        self.mailbox = None
        if "mailbox" in source.where:
            pin = machine.pins and source.where == "mailbox"
            self.mailbox = dg.DraftMailbox(fields, num_rows, pin_memory=pin)
            fill(self.mailbox, range(num_rows), blocks)
        else:
            put = {"device": lambda t: t.to(device.device), "pinned": device.pin, "pageable": torch.clone}
            self.rows = place(fields, blocks, put[source.where], odd)
        largest = num_rows + max(mode.padding for mode in MODES)
        self.assembler = dg.DraftAssembler(
            fields, device.device, largest, self.mailbox, "fixed" if odd else "fresh", machine=machine
        )

    def call(self, order: list[int], mode: Mode, relay: dg.Relay | None, narrow: bool) -> dg.DraftBatch:
        more: dict[str, Any] = {"relay": relay, "batch_outputs": mode.outputs, "pad_to": len(order) + mode.padding}
        if self.mailbox is None:
            return self.assembler.assemble_rows(**more, **picked(self.rows, order))
        slots = torch.tensor(order, dtype=torch.int32) if narrow else order
        return self.assembler.assemble_slots(slots, [100 + slot for slot in order], **more)


class _Comparison:
    """One field list on the device beside its twin on the CPU. `guard` surrounds every call of the hot path."""

    def __init__(self, device: Device, fields: tuple[dg.Field, ...], num_rows: int, seed: int, strict: bool) -> None:
        self.device, self.fields, self.strict = device, fields, strict
        self.blocks = random_blocks(fields, num_rows, seed)
        self.maps = [
            dg.FutureMap(fields, num_rows + 8, where, machine=machine)
            for where, machine in ((device.device, device.machine), (torch.device("cpu"), None))
        ]
        self.twin = dg.DraftAssembler(fields, "cpu", num_rows + 8)
        self.rows = place(fields, self.blocks, torch.clone, odd=False)
        self.generator = torch.Generator().manual_seed(seed)

    def rigs(self) -> list[tuple[str, _Rig]]:
        rigs = []
        for source in SOURCES:
            odds = (False,) if "mailbox" in source.where else (False, True)
            for odd in odds:
                name = source.name + (", odd addresses" if odd else "")
                rigs.append((name, _Rig(self.device, self.fields, source, self.blocks, odd)))
        return rigs

    def expect(self, num_rows: int, mode: Mode, narrow: bool) -> None:
        """The twin's bytes for one call, and what that is given."""
        self.order = torch.randperm(len(next(iter(self.blocks.values()))), generator=self.generator)[:num_rows].tolist()
        if num_rows > 8:
            self.order[-1] = self.order[0]
        self.vectors = self._vectors(num_rows, torch.int32 if narrow else torch.int64)
        for future_map in self.maps:
            poison(tables_of(future_map))
        relay = dg.Relay(self.maps[1], *self.vectors) if mode.relay else None
        padded = num_rows + mode.padding
        rows = picked(self.rows, self.order)
        batch = self.twin.assemble_rows(relay=relay, batch_outputs=mode.outputs, pad_to=padded, **rows)
        self.expected = dict(batch.tensors)
        for name, tensor in self.expected.items():
            plain = torch.zeros((padded, tensor.shape[1]), dtype=tensor.dtype)
            plain[:num_rows] = self.blocks[name][self.order]
            assert same_bytes(tensor, plain), f"the twin's {name} differs from the rows"

    def call(self, rig: _Rig, mode: Mode, narrow: bool) -> None:
        relay = None
        if mode.relay:
            there = [vector.to(self.device.device) for vector in self.vectors]
            relay = dg.Relay(self.maps[0], there[0], there[1], there[2], self.vectors[0])
        if self.strict:
            rig.call(self.order, mode, relay, narrow)  # memory is asked for, and code loaded, once
        poison(tables_of(self.maps[0]))
        with self.guard():
            batch = rig.call(self.order, mode, relay, narrow)
        assert batch.route == rig.route, f"went by {batch.route}, expected {rig.route}"
        self.device.synchronize()
        assert_same(dict(batch.tensors), self.expected, "batch")
        assert_same(tables_of(self.maps[0]), tables_of(self.maps[1]), "relay")
        poison(dict(batch.tensors))  # what the next call leaves unwritten shows

    def relay_round(self, narrow: bool) -> None:
        """Publish other lengths, resolve the relayed rows in another order, some twice, and stash them elsewhere."""
        indices, lengths, _ = self.vectors
        turn = torch.randint(0, len(indices), (len(indices),), generator=self.generator)
        target = self._vectors(len(indices), torch.int32 if narrow else torch.int64)[0]
        results = []
        for future_map in self.maps:
            moved = [v.to(future_map.device) for v in (indices, lengths + 1, indices[turn], target)]
            running = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=moved[2]), seq_lens=None)
            with self.guard() if future_map is self.maps[0] else nullcontext():
                future_map.publish(moved[0], moved[1])
                future_map.resolve(running)
                future_map.stash(moved[3], running.spec_info)
            resolved = {f.name: running.spec_info.rows(f.name) for f in self.fields}
            flags = {f"valid {name}": valid for name, valid in running.spec_info.valid.items()}
            lens = {"seq_lens": running.seq_lens, "bonus_tokens": running.spec_info.bonus_tokens}
            results.append({**resolved, **flags, **lens})
        self.device.synchronize()
        assert_same(results[0], results[1], "resolve")
        assert_same(tables_of(self.maps[0]), tables_of(self.maps[1]), "stash")

    def guard(self) -> Any:
        return self.device.no_waits() if self.strict else nullcontext()

    def _vectors(self, num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Future indices, sequence lengths, bonus tokens."""
        indices = torch.randperm(self.maps[0].num_slots - 1, generator=self.generator)[:num_rows] + 1
        numbers = torch.randint(1, 1 << 30, (2, num_rows), generator=self.generator)
        return indices.to(dtype), numbers[0].to(dtype), numbers[1].to(dtype)


def _compare_all(section: Section, device: Device, sizes: Sizes, strict: bool) -> None:
    for seed, (list_name, fields) in enumerate(field_lists(sizes.hidden).items()):
        work = _Comparison(device, fields, max(sizes.batches), seed, strict)
        rigs = work.rigs()
        for i, num_rows in enumerate(sizes.batches):
            for j, mode in enumerate(MODES):
                narrow = (i + j) % 2 == 1
                what = f"{list_name}, N={num_rows}, {mode.name}"
                section.attempt("the twin itself", what, work.expect, num_rows, mode, narrow)
                for name, rig in rigs:
                    section.attempt(name, what, work.call, rig, mode, narrow)
                if mode.relay:
                    section.attempt("publish, resolve, stash", what, work.relay_round, narrow)


def check_bytes(section: Section, device: Device, sizes: Sizes) -> None:
    """The kernel writes the bytes that its twin on the CPU writes, and the twin those of the rows."""
    _compare_all(section, device, sizes, strict=False)


def check_no_waits(section: Section, device: Device, sizes: Sizes) -> None:
    """The same calls, warm, while any wait of the host that torch knows of is an error."""
    _compare_all(section, device, sizes._replace(batches=sizes.strict), strict=True)


def check_busy(section: Section, device: Device, sizes: Sizes) -> None:
    """Calls queued behind work that runs: the host goes on, and what they read is not reused before they are done."""
    for name in ("the current stream", "a side stream"):
        with device.side_stream() if name == "a side stream" else nullcontext():
            work = _Busy(device, dg.eagle_fields(4, sizes.hidden), num_rows=9, calls=sizes.calls_in_flight)
            # Rings of staging buffers grow in the first round, which takes pinned memory and may wait.
            section.attempt(f"{name}: first calls", "", work.round, False)
            section.attempt(f"{name}: warm", "", work.round, True)
        section.tell(f"{name}: {work.num_calls} calls a round; the host went on, a round: {work.went_on}.")


class _Busy:
    """Several calls of each route behind a busy stream, with memory reused as soon as it may be."""

    def __init__(self, device: Device, fields: tuple[dg.Field, ...], num_rows: int, calls: int) -> None:
        self.device, self.fields, total = device, fields, num_rows * calls
        self.groups = [range(start, start + num_rows) for start in range(0, total, num_rows)]
        self.num_calls = 3 * calls
        self.mailbox = dg.DraftMailbox(fields, total, pin_memory=device.machine.pins)
        self.future_map = dg.FutureMap(fields, total + 1, device.device, machine=device.machine)
        self.indices = torch.arange(1, total + 1, device=device.device)
        by_slot, by_row, staged = (
            dg.DraftAssembler(fields, device.device, num_rows, mailbox, machine=device.machine_with(reads_rows=reads))
            for mailbox, reads in ((self.mailbox, True), (None, True), (None, False))
        )
        for assembler in (by_slot, by_row, staged):
            assembler.warmup()
        self.by_slot, self.by_row, self.staged = by_slot, by_row, staged
        self.went_on: list[bool] = []

    def round(self, must_go_on: bool) -> None:
        device, mailbox, total = self.device, self.mailbox, self.mailbox.num_slots
        blocks = random_blocks(self.fields, total, seed=len(self.went_on))
        # Made before: pinning memory may wait.
        pageable = place(self.fields, blocks, torch.clone, False)
        pinned = place(self.fields, blocks, device.pin, False)
        device.synchronize()
        busy = device.busy(300)
        batches = [self._by_slot(blocks, group) for group in self.groups]
        batches += [self._staged(pageable, group) for group in self.groups]
        batches += [self.by_row.assemble_rows(**picked(pinned, group)) for group in self.groups]
        num_free, went_on = mailbox.num_free, not busy.query()
        self.went_on.append(went_on)
        del pinned  # rows that are read in place are kept until then
        device.synchronize()
        assert went_on or not must_go_on, "the calls returned only when the work before them was done"
        assert num_free == 0 or not went_on, f"{num_free} slots were free while launches still read them"
        assert mailbox.num_free == total, "slots are not free although all launches are done"
        slots = [mailbox.acquire() for _ in range(total)]
        fill(mailbox, slots, random_blocks(self.fields, total, seed=77))
        mailbox.release(slots)
        for batch, group in zip(batches, self.groups * 3, strict=True):
            rows = {name: block[group[0] : group[-1] + 1] for name, block in blocks.items()}
            assert_same(dict(batch.tensors), rows, f"rows by {batch.route}")
        assert_same({name: table[1:] for name, table in self.future_map.buffers.items()}, blocks, "relay")

    def _by_slot(self, blocks: Blocks, group: range) -> dg.DraftBatch:
        slots = [self.mailbox.acquire() for _ in group]
        fill(self.mailbox, slots, blocks, group[0])
        indices = self.indices[group[0] : group[-1] + 1]
        relay = dg.Relay(self.future_map, indices, indices, indices)
        batch = self.by_slot.assemble_slots(slots, [100 + slot for slot in slots], relay=relay)
        self.mailbox.release(slots)
        return batch

    def _staged(self, rows: Rows, group: range) -> dg.DraftBatch:
        given = picked(rows, group)
        batch = self.staged.assemble_rows(**given)
        for of_field in given.values():
            for row in of_field:
                row.view(torch.uint8).fill_(POISON)  # a staged row may be written over at once
        return batch


def check_graph(section: Section, device: Device, sizes: Sizes) -> None:
    """A captured graph reads fixed outputs; a call under capture is refused, and the capture goes on."""
    work = _Graph(device, dg.eagle_fields(4, sizes.hidden))
    for name, outcome in work.refusals.items():
        section.attempt("a call under capture is refused", name, _assert_refused, outcome)
    for seed in range(1, 5):
        section.attempt("a replay reads the next rows", f"replay {seed}", work.replay_with, seed)


class _Graph:
    """A graph that copies the fixed outputs, captured while calls were attempted."""

    def __init__(self, device: Device, fields: tuple[dg.Field, ...], num_rows: int = 5, num_padded: int = 8) -> None:
        self.device, self.fields, self.num_padded = device, fields, num_padded
        self.mailbox = dg.DraftMailbox(fields, num_rows, pin_memory=device.machine.pins)
        self.assembler = dg.DraftAssembler(
            fields, device.device, num_padded, self.mailbox, "fixed", machine=device.machine
        )
        self.future_map = dg.FutureMap(fields, num_padded, device.device, machine=device.machine)
        self.slots = list(range(num_rows))
        self.indices = indices = torch.arange(1, num_rows + 1, device=device.device)
        self.inputs = dict(self._assemble(0)[0].tensors)
        self.seen = {name: torch.zeros_like(tensor) for name, tensor in self.inputs.items()}
        running = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=indices), seq_lens=indices)
        self.future_map.resolve(running)
        rows = {name: [tensor[0]] for name, tensor in self.inputs.items()}
        self.calls: dict[str, Callable[[], object]] = {
            "assemble_slots": lambda: self.assembler.assemble_slots(self.slots),
            "assemble_rows": lambda: self.assembler.assemble_rows(None, **rows),  # type: ignore[arg-type]
            "publish": lambda: self.future_map.publish(indices, indices),
            "stash": lambda: self.future_map.stash(indices, running.spec_info),
            "resolve": lambda: self.future_map.resolve(running),
        }
        self.refusals: dict[str, Exception | None] = {}
        self._copy()  # once without, as every capture wants it
        self._replay = device.capture(self._copy, self._attempt_calls)

    def replay_with(self, seed: int) -> None:
        batch, blocks = self._assemble(seed)
        same = [batch.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in self.inputs.items()]
        assert all(same), "a fixed output moved"
        self._replay()
        self.device.synchronize()
        expected = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in self.inputs.items()}
        for name, block in blocks.items():
            expected[name][: len(block)] = block
        assert_same(self.seen, expected, "what the graph read")

    def _assemble(self, seed: int) -> tuple[dg.DraftBatch, Blocks]:
        self.device.synchronize()  # nothing reads the slots, which are put over
        blocks = random_blocks(self.fields, len(self.slots), seed)
        fill(self.mailbox, self.slots, blocks)
        relay = dg.Relay(self.future_map, self.indices, self.indices, self.indices)
        return self.assembler.assemble_slots(self.slots, relay=relay, pad_to=self.num_padded), blocks

    def _copy(self) -> None:
        for name, tensor in self.inputs.items():
            self.seen[name].copy_(tensor)

    def _attempt_calls(self) -> None:
        for name, call in self.calls.items():
            self.refusals[name] = None
            try:
                call()
            except Exception as error:
                self.refusals[name] = error


def _assert_refused(outcome: Exception | None) -> None:
    if not isinstance(outcome, dg.CaptureError):
        raise outcome or AssertionError("the call was made")


# -- counts and times


def check_launches(section: Section, device: Device, sizes: Sizes) -> None:
    """What the device is asked to do in each call."""
    if not device.is_dry:
        section.tell(f"The zero-copy probe says {device.machine.zero_copy}; pinned memory: {device.machine.pins}.")
    fields = dg.eagle_fields(4, sizes.hidden)
    blocks, indices = random_blocks(fields, 64, 0), torch.arange(1, 65, device=device.device)
    future_map = dg.FutureMap(fields, 65, device.device, machine=device.machine)
    works: list[tuple[str, int, Callable[[], object]]] = []
    for source in SOURCES:
        rig = _Rig(device, fields, source, blocks, odd=False)
        # Without zero-copy all that the host says goes up at once.
        most_copies = 0 if device.machine.zero_copy and source.zero_copy else 1
        for n, mode in ((8, MODES[0]), (64, MODES[4]), (64, MODES[3])):
            relay = dg.Relay(future_map, indices[:n], indices[:n], indices[:n]) if mode.relay else None
            call = partial(rig.call, list(range(n)), mode, relay, False)
            works.append((f"{source.name}, N={n}, {mode.name}", most_copies, call))
    running = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=indices), seq_lens=indices)
    works.append(("resolve, N=64", 0, partial(future_map.resolve, running)))
    works.append(("stash, N=64", 0, lambda: future_map.stash(indices, running.spec_info)))
    rows: list[list[Cell]] = []
    for name, most_copies, work in works:
        check = "one launch a call" + (", no copy" if most_copies == 0 else ", one copy at most")
        section.attempt(check, name, _count, device, name, work, most_copies, rows)
    columns = ["call", "calls", "launches of ours", "other kernels", "memcpys", "counted by"]
    section.table("Counts", columns, rows)


def _count(
    device: Device, name: str, work: Callable[[], object], most_copies: int, rows: list[list[Cell]], calls: int = 5
) -> None:
    work()
    seen = device.profile(lambda: [work() for _ in range(calls)])
    counts = len(seen.ours_us), len(seen.other_kernels), len(seen.copies_us)
    rows.append([name, calls, *counts, seen.how])
    assert counts[0] == calls, f"{counts[0]} launches for {calls} calls"
    assert not seen.other_kernels, f"other kernels: {sorted(set(seen.other_kernels))}"
    assert counts[2] <= calls * most_copies, f"{counts[2]} memcpys for {calls} calls"


def recorded(work: Callable[[], object]) -> tuple[LaunchDescriptor, Any]:
    """Do `work`, one call, and give its launch and plan, to be repeated while its assembler does nothing else."""
    launches: list[tuple[LaunchDescriptor, Any]] = []

    def record(descriptor: LaunchDescriptor, machine: Machine, plan: Any = None) -> Any:
        launches.append((descriptor, plan))
        return launch(descriptor, machine, plan)

    with mock.patch.object(draft_assembler, "launch", record):
        work()
    [only] = launches
    return only


def measure_kernel(section: Section, device: Device, sizes: Sizes) -> None:
    """The kernel's own time, beside a plain copy of the same bytes: launches only, queued behind other work."""
    few = min(64, sizes.many)
    rows: list[list[Cell]] = []
    for source, num_rows, wanted in ((SOURCES[0], sizes.many, 85.0), (SOURCES[2], few, 80.0), (SOURCES[1], few, 80.0)):
        section.attempt(
            "measured", source.name, _measure_kernel, section, device, sizes, source, num_rows, wanted, rows
        )
    columns = ["rows", "N", "caches", "by", "kernel µs", "copy µs", "kernel GB/s", "copy GB/s", "% of the copy"]
    section.table("Kernel beside a copy of the same bytes, each counted once", columns, rows)
    section.tell("Cold: other rows and outputs at each launch, more than the caches hold together.")


def _measure_kernel(
    section: Section,
    device: Device,
    sizes: Sizes,
    source: Source,
    num_rows: int,
    wanted: float,
    rows: list[list[Cell]],
) -> None:
    fields = dg.eagle_fields(4, sizes.hidden)
    num_bytes = num_rows * sum(f.row_bytes for f in fields)
    launches: list[Callable[[], object]] = []
    copies: list[Callable[[], object]] = []
    rigs = []  # their rows and mailboxes are read
    for s in range(sizes.cold_sets):
        rig = _Rig(device, fields, source, random_blocks(fields, num_rows, s), odd=False)
        rigs.append(rig)
        launches.append(
            partial(kernels.gather_rows, *recorded(partial(rig.call, list(range(num_rows)), MODES[0], None, False)))
        )
        plain = torch.zeros(num_bytes, dtype=torch.uint8)
        here = plain.to(device.device) if source.where == "device" else device.pin(plain)
        copies.append(partial(torch.empty_like(plain, device=device.device).copy_, here, non_blocking=True))

    def tell(caches: str, how: str, kernel_us: float, copy_us: float) -> None:
        speeds = [num_bytes / us / 1e3 for us in (kernel_us, copy_us)]
        rows.append([source.name, num_rows, caches, how, kernel_us, copy_us, *speeds, 100 * copy_us / kernel_us])

    for caches, count in (("hot", 1), ("cold", sizes.cold_sets)):
        rounds = max(1, 96 // count)
        times = [device.time_us(works[:count], rounds) for works in (launches, copies)]
        tell(caches, "events", *times)
    section.target(f"{source.name}, N={num_rows}, cold: % of the copy's speed", wanted, 100 * times[1] / times[0])
    seen = device.profile(lambda: [work() for work in (*launches, *copies)])
    # A copy on the device may be a kernel of torch's or the driver's.
    if len(seen.ours_us) == len(launches) and len(seen.copies_us) == len(copies):
        tell("cold", seen.how, statistics.median(seen.ours_us), statistics.median(seen.copies_us))


def measure_batches(section: Section, device: Device, sizes: Sizes) -> None:
    """A whole batch by every way, publish and stash included, in turns; the same rows at each call; medians."""
    figures: dict[int, dict[str, tuple[float, float]]] = {}
    for done, num_rows in enumerate(sizes.timed):
        paths = BatchPaths(device, num_rows, sizes.hidden)
        if paths.unavailable:
            section.tell(f"N={num_rows}: not to be had here: {paths.unavailable}")
        check = "every way writes the same bytes"
        usable = {
            n: call for n, call in paths.calls.items() if section.attempt(check, f"{n}, N={num_rows}", paths.check, n)
        }
        until = monotonic() + section.seconds_left / (len(sizes.timed) - done)
        figures[num_rows] = _take_turns(device, usable, sizes.rounds, until)
    for which, title in enumerate(("Host: µs until the call returns", "Wall: µs until the device is done")):
        rows: list[list[Cell]] = []
        for num_rows, times in figures.items():
            rows.append([num_rows, *[times[name][which] if name in times else None for name in (*OTHERS, *OURS)]])
        section.table(title, ["N", *OTHERS, *OURS], rows)
    wins: list[list[Cell]] = []
    for ours in OURS:
        for against, others in (("stock", (STOCK,)), ("each of the other ways", OTHERS)):
            firsts = [_wins_from(figures, ours, others, which) for which in (0, 1)]
            wins.append([ours, against, *(["not measured"] * 2 if device.is_dry else firsts)])
    section.table("Faster from this N on", ["draftgather", "than", "host", "wall"], wins)
    at = figures.get(64, figures[max(figures)])
    for which, word in ((1, "wall"), (0, "host")):
        if STOCK in at and SLOTS in at:
            section.target(f"slots, N=64, {word}: times faster than stock", 5.0, at[STOCK][which] / at[SLOTS][which])


def _take_turns(
    device: Device, calls: Mapping[str, Callable[[], object]], rounds: int, until: float
) -> dict[str, tuple[float, float]]:
    """Medians a path, µs: until the call returns, and until the device is done."""
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in calls}
    order = list(calls.items())
    for i in range(rounds + 1):  # the first is a warm-up
        if i > 3 and monotonic() > until:
            break
        for name, call in order:
            device.synchronize()
            start = perf_counter_ns()
            result = call()
            returned = perf_counter_ns()
            device.synchronize()
            done = perf_counter_ns()
            del result
            times[name] += [(returned - start, done - start)] if i else []
        order.reverse()
    return {n: tuple(statistics.median(t[k] for t in ts) / 1e3 for k in (0, 1)) for n, ts in times.items()}  # type: ignore[misc]


def _wins_from(
    figures: dict[int, dict[str, tuple[float, float]]], ours: str, others: Sequence[str], which: int
) -> int | str:
    """The least N from which on `ours` is faster than each of `others`."""
    first: int | str = "never"
    for num_rows in sorted(figures, reverse=True):
        at = figures[num_rows]
        best = min((at[name][which] for name in others if name in at), default=None)
        if ours not in at or best is None or at[ours][which] >= best:
            break
        first = num_rows
    return first


def measure_host(section: Section, device: Device, sizes: Sizes) -> None:
    """The host's side of a launch: from a plan, straight to the compiled kernel, and in Triton's plain way."""
    rows: list[list[Cell]] = []
    for num_rows in (1, 8, 64):
        for source in (SOURCES[2], SOURCES[0]):
            section.attempt("measured", source.name, _measure_host, device, sizes.hidden, source, num_rows, rows)
    columns = ["rows", "N", "planned launch", "Triton's kernel[grid](...)", "whole call"]
    section.table("Host time, µs, medians", columns, rows)


def _measure_host(device: Device, hidden: int, source: Source, num_rows: int, rows: list[list[Cell]]) -> None:
    fields = dg.eagle_fields(4, hidden)
    rig = _Rig(device, fields, source, random_blocks(fields, num_rows, 0), odd=False)
    call = partial(rig.call, list(range(num_rows)), MODES[0], None, False)
    descriptor, plan = recorded(call)
    assert plan is not None, "there is no direct launch here"
    arguments = kernels._arguments(descriptor)
    plain = kernels._gather_rows_kernel[kernels._grid(descriptor, arguments.constants)]
    works = (partial(kernels.gather_rows, descriptor, plan), partial(plain, *arguments.flat()), call)
    rows.append([source.name, num_rows, *[_host_us(device, work) for work in works]])


def _host_us(device: Device, work: Callable[[], object]) -> float:
    samples = []
    for i in range(220):
        if i % 20 == 0:
            device.synchronize()
        start = perf_counter_ns()
        work()
        samples.append(perf_counter_ns() - start)
    return statistics.median(samples[20:]) / 1e3


# -- the run


class Part(NamedTuple):
    key: str
    run: Callable[[Section, Device, Sizes], None]
    title: str
    limit_s: float  # of the budget of BUDGET_S
    is_correctness: bool = True
    is_counted: bool = False  # a dry run takes the do-nothing driver


# The profiler comes last: it may slow down what follows it.
PARTS = (
    Part("bytes", check_bytes, "Kernel and twin, byte for byte", 95),
    Part("no_waits", check_no_waits, "No host wait on the hot path", 20),
    Part("busy", check_busy, "Calls in flight behind a busy stream", 15),
    Part("graph", check_graph, "CUDA graphs and fixed outputs", 7),
    Part("batches", measure_batches, "A whole batch, beside the other ways", 45, is_correctness=False),
    Part("host", measure_host, "The host's side of a launch", 10, is_correctness=False, is_counted=True),
    Part("kernel", measure_kernel, "The kernel beside a copy", 20, is_correctness=False),
    Part("launches", check_launches, "Launches and copies a call", 18, is_counted=True),
)


def run_parts(report: Report, device: Device, keys: Sequence[str], budget_s: float, folder: Path) -> None:
    """Run the parts named, each within its share of the time and alone in its failure; write after each."""
    until, sizes = monotonic() + budget_s, DRY if device.is_dry else REAL
    for part in [part for part in PARTS if part.key in keys]:
        section = Section(part.key, part.title, part.run.__doc__ or "", part.is_correctness, device.is_dry)
        report.sections.append(section)
        seconds = min(part.limit_s * budget_s / BUDGET_S, until - monotonic())
        if seconds <= 0:
            section.cut_short = "no time was left"
        elif not device.is_alive():
            section.cut_short = "the device was lost before"
        else:
            with section.running(seconds, device.is_alive), refusals_expected():
                part.run(section, device, sizes)
        report.write(folder)
        print(f"{section.title}: {section.verdict}, {section.seconds:.1f} s", flush=True)


def gpu_check(folder: Path, dry: bool = False, budget_s: float | None = None, parts: Sequence[str] = ()) -> int:
    """Write RESULTS.md and results.json into `folder`.

    The exit code: 0 if every check of correctness passed, 1 if not, 2 where there is no GPU. budget_s: None
    is BUDGET_S, and more where a dry run may meet a slow machine. parts: only these. A dry run of all takes two
    processes of its own.
    """
    if budget_s is None:
        budget_s = 4 * BUDGET_S if dry else BUDGET_S
    if not dry and not torch.cuda.is_available():
        print("no GPU that torch can use; --dry runs without one", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    report, keys = Report(dry), parts or [part.key for part in PARTS]
    if dry and not parts:
        _dry_run(report, budget_s)
        report.write(folder)
        return report.exit_code
    # A launch that never ends would hang the check: what is known by then was written.
    watchdog = Timer(budget_s + 20, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        if not dry:
            device = Device()
            report.environment |= device.about()
            run_parts(report, device, keys, budget_s, folder)
        elif isinstance(kernels._gather_rows_kernel, JITFunction):
            with do_nothing() as counts:
                run_parts(report, DoNothingDevice(counts), keys, budget_s, folder)
        else:
            run_parts(report, DryDevice(), keys, budget_s, folder)
    finally:
        watchdog.cancel()
    return report.exit_code


def _dry_run(report: Report, budget_s: float) -> None:
    order = [part.key for part in PARTS]
    for is_counted in (False, True):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if not is_counted:
            environment["TRITON_INTERPRET"] = "1"
        keys = [part.key for part in PARTS if part.is_counted == is_counted]
        with tempfile.TemporaryDirectory() as there:
            command = [sys.executable, "-m", "draftgather.bench.gpu_check", "--dry", "--out", there]
            subprocess.run([*command, "--budget", str(budget_s), "--parts", *keys], env=environment, check=False)
            report.read(Path(there))
    report.sections.sort(key=lambda section: order.index(section.key))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask a GPU all that only a GPU can answer.")
    parser.add_argument("--dry", action="store_true", help="without a GPU: the same code, no times")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of RESULTS.md and results.json")
    parser.add_argument(
        "--budget", type=float, help=f"seconds; by default {BUDGET_S:.0f}, four times that in a dry run"
    )
    parser.add_argument("--parts", nargs="+", choices=[part.key for part in PARTS], default=())
    options = parser.parse_args(arguments)
    return gpu_check(options.out, options.dry, options.budget, options.parts)


if __name__ == "__main__":
    sys.exit(main())
