"""Pinned memory that is not there, runs out, is not what it says, or is not live: slower, never wrong, one notice.

There is no GPU here: `FakeRuntime` stands for CUDA's side of it. Its device reads and writes only what was given to
it or is page-locked, and faults at any other byte. Its mappings of page-locked memory may be dead copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mutations import Mutation

import draftgather as dg
from draftgather import machine as machine_module
from draftgather import memory, notices
from draftgather.describe import StagingRing
from draftgather.kernels.gather_rows_torch import gather_rows_torch
from draftgather.kernels.row_tables import FieldSource, LaunchDescriptor, RowTable
from draftgather.machine import Machine, machine_for
from draftgather.memory import can_pin, try_pinned, zero_copy_works
from draftgather.outputs import FreshOutputs
from helpers import Rows, assert_batch, random_rows, row_of

GPU = torch.device("cuda", 0)
FIELDS = (*dg.eagle_fields(topk=4, hidden_size=64), dg.Field("seed", 3, torch.int32, optional=True))
# Rows of 16, 32, 128 and 12 bytes: records of 256, and for a batch of 4 a staging buffer of 1152.
RECORD_BYTES, RING_BYTES = 256, 1168
PROBES = 2 * 512 + 1  # what `zero_copy_works` and `can_pin` pin

NONE_LEFT = (
    "this machine pins no memory, or no more of it; transfers will be slower "
    "(CUDA error: OS call failed or operation not supported on this OS)"
)
NOT_PINNED = "memory asked for as pinned is not; transfers will be slower"
NOT_LIVE = "the device's view of pinned memory is not live; rows are copied instead"
NO_PINNED_OUTPUTS = "no pinned memory for the outputs here; they lie on the assembler's device instead"

_empty, _zeros, _empty_like, _zeros_like = torch.empty, torch.zeros, torch.empty_like, torch.zeros_like


@dataclass
class Region:
    """Memory that the device has, or that is page-locked for it."""

    bytes: torch.Tensor  # [n] uint8; held, so that nothing else comes to lie there
    is_host: bool
    copy: torch.Tensor | None = None  # [n] what the device sees in its place

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where the dense `tensor` starts, if it lies in here."""
        offset = tensor.data_ptr() - self.bytes.data_ptr()
        return offset if offset >= 0 and offset + tensor.nbytes <= len(self.bytes) else None


class FakeRuntime:
    """One GPU, whose memory is memory of this process like any other, and what the system lets it have of the host's.

    most_pinned: how many bytes can be page-locked in all; None: as many as one likes.
    lies_from: page-locked memory of so many bytes or more is none, and nobody says so.
    mapping: "live"; or the device sees for ever what was there "when allocated", or "when first read"; or what
        it writes itself stays "unseen" by the host.
    reads_pageable: as with HMM or ATS the device faults nowhere.
    """

    def __init__(
        self,
        most_pinned: int | None = None,
        lies_from: int | None = None,
        mapping: str = "live",
        reads_pageable: bool = False,
    ) -> None:
        self.most_pinned = most_pinned
        self.lies_from = lies_from
        self.mapping = mapping
        self.reads_pageable = reads_pageable
        self.are_launches_done = True
        self.num_pinned_bytes = 0
        self.regions: list[Region] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = self

        class Event:
            def record(self, stream: object) -> None:
                pass

            def query(self) -> bool:
                return runtime.are_launches_done

        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_name": lambda device: "",
            "device": lambda device: nullcontext(),
            "current_stream": lambda device: SimpleNamespace(),
            "is_current_stream_capturing": lambda: False,
            "Event": Event,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.version, "hip", None)
        for name in ("empty", "zeros", "empty_like", "zeros_like"):
            monkeypatch.setattr(torch, name, self._allocator(getattr(torch, name)))
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: self.is_pinned(tensor))
        monkeypatch.setattr(memory, "gather_rows", self.launch)
        monkeypatch.setattr(machine_module, "gather_rows", self.launch)

    # -- memory

    def _allocator(self, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any, device: Any = None, pin_memory: bool = False, **named: Any) -> torch.Tensor:
            if device is not None and torch.device(device).type == "cuda":
                tensor = real(*args, **named)
                self.regions.append(Region(as_bytes(tensor), is_host=False))
                return tensor
            tensor = real(*args, **named) if device is None else real(*args, device=device, **named)
            if pin_memory:
                self._pin(tensor)
            return tensor

        return allocate

    def _pin(self, tensor: torch.Tensor) -> None:
        if self.lies_from is not None and tensor.nbytes >= self.lies_from:
            return
        if self.most_pinned is not None and self.num_pinned_bytes + tensor.nbytes > self.most_pinned:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        self.num_pinned_bytes += tensor.nbytes
        self.register(tensor)

    def register(self, tensor: torch.Tensor, start: int = 0, end: int | None = None) -> None:
        """Bytes `start` to `end` of `tensor` are page-locked: what the allocator, or a caller himself, has done."""
        part = as_bytes(tensor)[start:end]
        copy = part.clone() if self.mapping == "when allocated" else None
        self.regions.append(Region(part, is_host=True, copy=copy))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """CUDA is asked about the first byte, and of no other."""
        offsets = [tensor.data_ptr() - region.bytes.data_ptr() for region in self.regions if region.is_host]
        sizes = [len(region.bytes) for region in self.regions if region.is_host]
        return any(0 <= offset < size for offset, size in zip(offsets, sizes, strict=True))

    # -- what a launch sees of it

    def launch(self, d: LaunchDescriptor, plan: object = None) -> None:
        """The kernel: the twin, fed with what the device sees."""
        slots = list(d.few_slots) if d.slots is None else self._seen(d.slots).tolist()
        present = tuple(None if flags is None else self._seen(flags) for flags in d.present)
        sources = []
        for source, flags in zip(d.sources, present, strict=True):
            if source.pool is not None:
                rows: list[torch.Tensor | None] = [source.pool.tensor[slot] for slot in slots]
                dtype = source.pool.tensor.dtype
            else:
                rows, dtype = list(source.rows), source.dtype
                addresses = self._seen(source.addresses_ptr).tolist()
                assert addresses == [0 if row is None else row.data_ptr() for row in rows]
            is_there = [True] * len(rows) if flags is None else (flags != 0).tolist()
            seen = [self._seen(row) if there else None for row, there in zip(rows, is_there, strict=True)]
            sources.append(FieldSource(None, seen, dtype))
        outputs = tuple(None if table is None else RowTable.over(self._target(table.tensor)) for table in d.outputs)
        gather_rows_torch(
            d._replace(slots=None, few_slots=(), sources=tuple(sources), present=present, outputs=outputs)
        )

    def _region(self, tensor: torch.Tensor) -> Region | None:
        for region in self.regions:
            if region.offset_of(tensor) is not None:
                return region
        if self.reads_pageable:
            return None
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _seen(self, tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        region = self._region(tensor)
        if region is None:
            return tensor
        if region.is_host and self.mapping == "when first read" and region.copy is None:
            region.copy = region.bytes.clone()
        start = region.offset_of(tensor)
        if region.copy is None or start is None:
            return tensor
        return region.copy[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _target(self, tensor: torch.Tensor) -> torch.Tensor:
        region = self._region(tensor)
        return tensor.clone() if region is not None and region.is_host and self.mapping == "unseen" else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class Bench:
    """What a scenario has: a runtime of its choice, and the notices in the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self._monkeypatch = monkeypatch
        self._caplog = caplog
        caplog.set_level(logging.DEBUG)

    def start(self, **runtime: Any) -> FakeRuntime:
        started = FakeRuntime(**runtime)
        started.install(self._monkeypatch)
        return started

    @property
    def notices(self) -> list[str]:
        assert all(record.levelno == logging.WARNING for record in self._caplog.records)
        return [record.getMessage() for record in self._caplog.records]


def forget() -> None:
    for cached in (can_pin, memory.zero_copy_works, machine_module.zero_copy_works, machine_for):
        getattr(cached, "cache_clear", lambda: None)()
    notices._noticed.clear()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Bench]:
    forget()
    yield Bench(monkeypatch, caplog)
    monkeypatch.undo()
    forget()


# -- what every scenario does: a few of everything, and every byte compared


def some_rows(num_rows: int = 4) -> Rows:
    rows = random_rows(FIELDS, num_rows)
    rows["seed"][1] = None
    return rows


def picked(rows: Rows, order: Sequence[int]) -> Rows:
    return {name: [given[i] for i in order] for name, given in rows.items()}


def filled_mailbox(rows: Rows, num_slots: int = 4, pin_memory: bool | None = None) -> dg.DraftMailbox:
    mailbox = dg.DraftMailbox(FIELDS, num_slots, pin_memory)
    for i in range(len(rows["topk_p"])):
        mailbox.put(i, 100 + i, **row_of(rows, i))
    return mailbox


def serve(mailbox: dg.DraftMailbox, rows: Rows, **options: Any) -> tuple[str, str]:
    """Batches of one assembler, its slots written anew between them. The routes of slots and of pageable rows."""
    assembler = dg.DraftAssembler(FIELDS, "cuda", max_batch_size=4, mailbox=mailbox, **options)
    routes = []
    for order in ([0, 2, 3], [3, 1], [2]):
        batch = assembler.assemble_slots(order, [100 + i for i in order])
        assert_batch(batch, FIELDS, picked(rows, order))
        separate = assembler.assemble_rows(**picked(rows, order))
        assert_batch(separate, FIELDS, picked(rows, order))
        routes.append((batch.route, separate.route))
        # The records live on: what the device saw first must not be what it sees next.
        for i in order:
            rows["topk_index"][i] = rows["topk_index"][i] + 1
            mailbox.put(i, 100 + i, **row_of(rows, i))
    assert len(set(routes)) == 1
    return routes[0]


def serve_all(mailbox: dg.DraftMailbox, rows: Rows, **options: Any) -> tuple[str, str]:
    """Several assemblers of each kind of outputs: the routes, which are the same for all."""
    routes = {serve(mailbox, rows, outputs=mode, **options) for mode in ("fresh", "fixed", "fresh", "fixed")}
    assert len(routes) == 1
    return routes.pop()


# -- the scenarios


def everything_is_there(bench: Bench) -> None:
    bench.start()
    rows = some_rows()
    mailbox = filled_mailbox(rows)
    assert mailbox.is_pinned
    assert serve_all(mailbox, rows) == ("slots", "staged")
    assert serve_all(mailbox, rows, output_memory="pinned") == ("slots", "staged")
    assert machine_for(GPU) == Machine(GPU, has_kernel=True, pins=True, zero_copy=True)
    assert bench.notices == []


def nothing_is_pinned(bench: Bench, pin_memory: bool | None = None) -> None:
    bench.start(most_pinned=0)
    for _ in range(3):
        rows = some_rows()
        mailbox = filled_mailbox(rows, pin_memory=pin_memory)
        assert not mailbox.is_pinned
        assert serve_all(mailbox, rows) == ("staged", "staged")
    assert machine_for(GPU) == Machine(GPU, has_kernel=True, pins=False, zero_copy=False)
    assert bench.notices == [NONE_LEFT]


def pinned_outputs_without_pinning(bench: Bench) -> None:
    bench.start(most_pinned=0)
    rows = some_rows()
    assert serve_all(filled_mailbox(rows), rows, output_memory="pinned") == ("staged", "staged")
    assert bench.notices == [NONE_LEFT, NO_PINNED_OUTPUTS]


def mailbox_above_the_limit(bench: Bench) -> None:
    bench.start(most_pinned=PROBES + 8 * RING_BYTES)
    for _ in range(2):
        rows = some_rows()
        mailbox = filled_mailbox(rows, num_slots=100)
        assert not mailbox.is_pinned
        assert serve_all(mailbox, rows) == ("staged", "staged")
    assert machine_for(GPU) == Machine(GPU, has_kernel=True, pins=True, zero_copy=True)
    assert bench.notices == [NONE_LEFT]


def ring_above_the_limit(bench: Bench) -> None:
    """The mailbox took what there was: its records are read in place, by slot numbers that are uploaded."""
    bench.start(most_pinned=PROBES + 4 * RECORD_BYTES + RING_BYTES - 1)
    assert can_pin() and zero_copy_works(GPU)
    rows = some_rows()
    mailbox = filled_mailbox(rows)
    assert mailbox.is_pinned
    assert serve_all(mailbox, rows) == ("slots", "staged")
    assert bench.notices == [NONE_LEFT]


def ring_grows_above_the_limit(bench: Bench) -> None:
    """Launches are late, and the second buffer is not pinned any more: each is used as what it is."""
    runtime = bench.start(most_pinned=PROBES + 4 * RECORD_BYTES + RING_BYTES)
    assert can_pin() and zero_copy_works(GPU)
    rows = some_rows()
    assembler = dg.DraftAssembler(FIELDS, "cuda", max_batch_size=4, mailbox=filled_mailbox(rows))
    runtime.are_launches_done = False
    for order in ([0], [2, 1], [3, 3, 0]):
        assert_batch(assembler.assemble_slots(order), FIELDS, picked(rows, order))
        assert_batch(assembler.assemble_rows(**picked(rows, order)), FIELDS, picked(rows, order))
    assert assembler.num_staging_buffers == 6
    runtime.are_launches_done = True
    for order in ([1], [2, 0], [3], [0, 2], [1, 3], [2]) * 2:
        assert_batch(assembler.assemble_slots(order), FIELDS, picked(rows, order))
    assert assembler.num_staging_buffers == 6
    assert bench.notices == [NONE_LEFT]


def fixed_outputs_above_the_limit(bench: Bench) -> None:
    """Of four tables the first two can still be pinned; the others lie on the device, all of them for good."""
    runtime = bench.start(most_pinned=PROBES + 4 * RECORD_BYTES + 4 * 16 + 4 * 32)
    assert can_pin() and zero_copy_works(GPU)
    rows = some_rows()
    mailbox = filled_mailbox(rows)
    for are_pinned in ([True, True, False, False], [False] * 4):
        assembler = dg.DraftAssembler(
            FIELDS, "cuda", max_batch_size=4, mailbox=mailbox, outputs="fixed", output_memory="pinned"
        )
        addresses = set()
        for order in ([3, 0], [2, 3, 0]):
            batch = assembler.assemble_slots(order)
            assert_batch(batch, FIELDS, picked(rows, order))
            assert [runtime.is_pinned(tensor) for tensor in batch.tensors.values()] == are_pinned
            addresses.add(tuple(tensor.data_ptr() for tensor in batch.tensors.values()))
        assert len(addresses) == 1
    assert bench.notices == [NONE_LEFT]


def fresh_outputs_above_the_limit(bench: Bench) -> None:
    """The outputs of one batch are still pinned, those of the later ones lie on the device."""
    row_bytes = 16 + 32 + 128 + 12
    runtime = bench.start(most_pinned=PROBES + 4 * RECORD_BYTES + RING_BYTES + 3 * row_bytes)
    assert can_pin() and zero_copy_works(GPU)
    rows = some_rows()
    assembler = dg.DraftAssembler(
        FIELDS, "cuda", max_batch_size=4, mailbox=filled_mailbox(rows), output_memory="pinned"
    )
    assert assembler._ring is not None
    assembler._ring.take()
    batches = []
    for are_pinned in (True, False, False):
        batches.append(assembler.assemble_slots([3, 0, 2]))
        assert {runtime.is_pinned(tensor) for tensor in batches[-1].tensors.values()} == {are_pinned}
    for batch in batches:
        assert_batch(batch, FIELDS, picked(rows, [3, 0, 2]))
    assert bench.notices == [NONE_LEFT]


def the_flag_lies(bench: Bench) -> None:
    bench.start(lies_from=1)
    for _ in range(2):
        rows = some_rows()
        mailbox = filled_mailbox(rows, pin_memory=True)
        assert not mailbox.is_pinned
        assert serve_all(mailbox, rows) == ("staged", "staged")
    assert machine_for(GPU) == Machine(GPU, has_kernel=True, pins=False, zero_copy=False)
    assert bench.notices == [NOT_PINNED]


def the_flag_lies_of_large_mailboxes(bench: Bench) -> None:
    bench.start(lies_from=100 * RECORD_BYTES)
    for _ in range(2):
        rows = some_rows()
        mailbox = filled_mailbox(rows, num_slots=100)
        assert not mailbox.is_pinned
        assert serve_all(mailbox, rows) == ("staged", "staged")
    assert bench.notices == [NOT_PINNED]


def the_flag_lies_of_outputs(bench: Bench) -> None:
    runtime = bench.start(lies_from=4 * 128)
    # Below: the record slab of one slot. The probe's own 512 bytes are as many as a table's.
    assert can_pin()
    machine = Machine(GPU, has_kernel=True, pins=True, zero_copy=True)
    rows = some_rows()
    mailbox = filled_mailbox(rows, pin_memory=False)
    for mode in ("fixed", "fresh", "fixed"):
        assembler = dg.DraftAssembler(
            FIELDS,
            "cuda",
            max_batch_size=4,
            mailbox=mailbox,
            outputs=mode,  # type: ignore[arg-type]
            output_memory="pinned",
            machine=machine,
        )
        batch = assembler.assemble_slots([3, 0, 2, 0])
        assert_batch(batch, FIELDS, picked(rows, [3, 0, 2, 0]))
        are_pinned = {name: runtime.is_pinned(tensor) for name, tensor in batch.tensors.items()}
        # Fresh outputs ask no more once they were refused: not at every call.
        is_seed_pinned = mode == "fixed"
        assert are_pinned == {"topk_p": True, "topk_index": True, "hidden_states": False, "seed": is_seed_pinned}
    assert bench.notices == [NOT_PINNED]


def the_mapping_is_dead(bench: Bench, mapping: str) -> None:
    runtime = bench.start(mapping=mapping)
    for _ in range(2):
        rows = some_rows()
        mailbox = filled_mailbox(rows)
        assert mailbox.is_pinned
        assert serve_all(mailbox, rows) == ("staged", "staged")
        # Nor are a caller's own pinned rows read in place.
        for row in rows["hidden_states"]:
            assert row is not None
            runtime.register(row)
        assert serve_all(mailbox, rows) == ("staged", "staged")
    assert not zero_copy_works(GPU)
    assert machine_for(GPU) == Machine(GPU, has_kernel=True, pins=True, zero_copy=False)
    assert bench.notices == [NOT_LIVE]


def the_mapping_is_dead_for_outputs(bench: Bench) -> None:
    bench.start(mapping="unseen")
    rows = some_rows()
    assert serve_all(filled_mailbox(rows), rows, output_memory="pinned") == ("staged", "staged")
    assert bench.notices == [NOT_LIVE, NO_PINNED_OUTPUTS]


# Of three rows' hidden states, 128 bytes each: row -> the bytes of it that are page-locked.
PARTS = {
    "all but the last element": dict.fromkeys(range(3), (0, 126)),
    "the first byte": dict.fromkeys(range(3), (0, 1)),
    "the last bytes": dict.fromkeys(range(3), (64, None)),
    "the middle": dict.fromkeys(range(3), (2, 126)),
    "the first half of the last row": {0: (0, None), 1: (0, None), 2: (0, 64)},
    "two rows of three": {0: (0, None), 2: (0, None)},
    "the last row only": {2: (0, None)},
}


def rows_registered_in_part(bench: Bench, parts: dict[int, tuple[int, int | None]]) -> None:
    """A caller has page-locked every field, but of the hidden states only some bytes: none is read in place."""
    runtime = bench.start()
    rows = picked(some_rows(), [0, 2, 3])
    for name, given in rows.items():
        for i, row in enumerate(given):
            assert row is not None
            part = (0, None) if name != "hidden_states" else parts.get(i)
            if part is not None:
                runtime.register(row, *part)
    assembler = dg.DraftAssembler(FIELDS, "cuda", max_batch_size=4)
    for _ in range(2):
        batch = assembler.assemble_rows(**rows)
        assert batch.route == "staged"
        assert_batch(batch, FIELDS, rows)
    assert bench.notices == []


def rows_of_a_pool_registered_in_part(bench: Bench) -> None:
    """A caller's registration ends within the pool, in the middle of row 1: rows 0 and 3 pinned and not."""
    runtime = bench.start()
    fields = (dg.Field("hidden_states", 64, torch.bfloat16),)
    pool = torch.stack(random_rows(fields, 4)["hidden_states"])
    runtime.register(pool, 0, 128 + 64)
    assembler = dg.DraftAssembler(fields, "cuda", max_batch_size=4)
    for order, route in (([0, 0], "pointers"), ([0, 1], "staged"), ([1], "staged"), ([3, 0], "staged")):
        given: Rows = {"hidden_states": [pool[i] for i in order]}
        batch = assembler.assemble_rows(**given)
        assert batch.route == route
        assert_batch(batch, fields, given)


# -- tests


def test_pinned_memory_that_works(bench: Bench) -> None:
    """Guards against a fake that refuses everything: with live memory the records are read in place, and no notice."""
    everything_is_there(bench)


def test_rows_pinned_by_the_caller_are_read_in_place(bench: Bench) -> None:
    """Guards against rows that are staged for nothing: every byte of every row is page-locked."""
    runtime = bench.start()
    rows = picked(some_rows(), [0, 2, 3])
    for given in rows.values():
        for row in given:
            assert row is not None
            runtime.register(row)
    batch = dg.DraftAssembler(FIELDS, "cuda", max_batch_size=4).assemble_rows(**rows)
    assert batch.route == "pointers"
    assert_batch(batch, FIELDS, rows)


@pytest.mark.parametrize("pin_memory", [None, True])
def test_a_machine_that_pins_nothing(bench: Bench, pin_memory: bool | None) -> None:
    """Guards WSL2 and containers: the allocator raises, everything is staged and uploaded, one line in the log."""
    nothing_is_pinned(bench, pin_memory)


def test_pinned_outputs_on_a_machine_that_pins_nothing(bench: Bench) -> None:
    """Guards against outputs that are not there: they lie on the device, and a line says so once."""
    pinned_outputs_without_pinning(bench)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has pinned memory here")
def test_a_torch_without_pinned_memory(bench: Bench) -> None:
    """Guards against a fake that errs: torch's own allocator raises RuntimeError where it has no CUDA."""
    rows = random_rows(FIELDS, 2)
    for _ in range(2):
        mailbox = filled_mailbox(rows, pin_memory=True)
        assert not mailbox.is_pinned
        batch = dg.DraftAssembler(FIELDS, mailbox=mailbox).assemble_slots([1, 0])
        assert_batch(batch, FIELDS, picked(rows, [1, 0]))
    assert [notice.partition(" (")[0] for notice in bench.notices] == [NONE_LEFT.partition(" (")[0]]


def test_a_mailbox_above_the_limit(bench: Bench) -> None:
    """Guards `ulimit -l`: small buffers are pinned, the slab is not, and its records are not read in place."""
    mailbox_above_the_limit(bench)


def test_a_staging_ring_above_the_limit(bench: Bench) -> None:
    """Guards the device from slot numbers and rows in a staging buffer that it cannot read."""
    ring_above_the_limit(bench)


def test_a_staging_ring_that_grows_above_the_limit(bench: Bench) -> None:
    """Guards a ring of which some buffers are pinned and later ones are not."""
    ring_grows_above_the_limit(bench)


def test_fixed_outputs_above_the_limit(bench: Bench) -> None:
    """Guards fixed outputs of which some are pinned: all keep their addresses, and the device writes each."""
    fixed_outputs_above_the_limit(bench)


def test_fresh_outputs_above_the_limit(bench: Bench) -> None:
    """Guards against an error, or a line in the log, at every batch from the one on that has no pinned memory left."""
    fresh_outputs_above_the_limit(bench)


def test_fresh_outputs_ask_for_pinned_memory_where_they_may(bench: Bench) -> None:
    """Guards the two kinds of table apart: pinned if asked for, on the device if not or where there is none left."""
    runtime = bench.start(most_pinned=3 * 12)
    fields = FIELDS[-1:]
    assert not runtime.is_pinned(FreshOutputs(fields, GPU, has_kernel=True, pin=False).take(3)[0].tensor)
    outputs = FreshOutputs(fields, GPU, has_kernel=True, pin=True)
    assert [runtime.is_pinned(outputs.take(3)[0].tensor) for _ in range(3)] == [True, False, False]


def test_memory_that_is_not_pinned_after_all(bench: Bench) -> None:
    """Guards against the allocator's word: what is not page-locked after asking for it is treated as pageable."""
    the_flag_lies(bench)


def test_a_large_mailbox_that_is_not_pinned_after_all(bench: Bench) -> None:
    """Guards a slab that silently is not page-locked, where small allocations are."""
    the_flag_lies_of_large_mailboxes(bench)


def test_outputs_that_are_not_pinned_after_all(bench: Bench) -> None:
    """Guards the device from writing to a table that silently is not page-locked."""
    the_flag_lies_of_outputs(bench)


@pytest.mark.parametrize("mapping", ["when first read", "when allocated", "unseen"])
def test_a_mapping_that_is_a_dead_copy(bench: Bench, mapping: str) -> None:
    """Guards against the first tenant's row for ever (confidential computing): the probe says no, rows are copied."""
    the_mapping_is_dead(bench, mapping)


def test_pinned_outputs_that_the_host_would_not_see(bench: Bench) -> None:
    """Guards against outputs that stay as they were: the device's writes to them are not seen."""
    the_mapping_is_dead_for_outputs(bench)


def test_the_probe_where_the_device_reads_pageable_memory(bench: Bench) -> None:
    """Guards HMM and ATS: what is not page-locked is staged, though the device would not fault."""
    bench.start(most_pinned=PROBES, reads_pageable=True)
    assert can_pin() and zero_copy_works(GPU)
    rows = some_rows()
    assert serve_all(filled_mailbox(rows), rows) == ("staged", "staged")
    assert bench.notices == [NONE_LEFT]


def test_the_probe_survives_one_lost_race(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a rank's start: the first variant is compiled by the probe, when another tidies the compiler's cache."""
    runtime = bench.start()
    lost = [FileNotFoundError("tmp.pid_1")]

    def gather_rows(descriptor: LaunchDescriptor, plan: object = None) -> None:
        if lost:
            raise lost.pop()
        runtime.launch(descriptor)

    monkeypatch.setattr(memory, "gather_rows", gather_rows)
    rows = some_rows()
    assert serve_all(filled_mailbox(rows), rows) == ("slots", "staged")


@pytest.mark.parametrize("which", PARTS)
def test_rows_registered_in_part(bench: Bench, which: str) -> None:
    """Guards against a fault of the device in a row, or a batch, of which only a part is page-locked."""
    rows_registered_in_part(bench, PARTS[which])


def test_rows_of_a_pool_registered_in_part(bench: Bench) -> None:
    """Guards against one answer for a whole pool: each row is asked for itself."""
    rows_of_a_pool_registered_in_part(bench)


def test_the_library_registers_no_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against memory that is registered twice, which CUDA refuses: the library registers none itself."""

    def refuse(*_: object) -> None:
        raise AssertionError("registers host memory")

    runtime = SimpleNamespace(cudaHostRegister=refuse, cudaHostUnregister=refuse)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    everything_is_there(bench)


# -- the same without the guards

# Each with the scenario that it breaks.
MUTATIONS: dict[str, tuple[Callable[[Bench], None], Mutation]] = {
    "only the first byte is asked about": (
        lambda bench: rows_registered_in_part(bench, PARTS["all but the last element"]),
        Mutation(machine_module._is_pinned, " and tensor[last].is_pinned()", ""),
    ),
    "only the last byte is asked about": (
        lambda bench: rows_registered_in_part(bench, PARTS["the last bytes"]),
        Mutation(machine_module._is_pinned, "tensor.is_pinned() and ", ""),
    ),
    "whatever is on the host is read in place": (
        lambda bench: rows_registered_in_part(bench, PARTS["two rows of three"]),
        Mutation(Machine.can_read, "self.zero_copy and _is_pinned(tensor)", "self.zero_copy"),
    ),
    "pinned is what was asked for": (
        the_flag_lies_of_outputs,
        Mutation(try_pinned, "if not tensor.is_pinned():", "if False:"),
    ),
    "one that lies is said to pin": (
        the_flag_lies,
        Mutation(try_pinned, "if not tensor.is_pinned():", "if False:"),
    ),
    "a failure to pin is an error": (
        nothing_is_pinned,
        Mutation(try_pinned, "except RuntimeError as error:", "except ZeroDivisionError as error:"),
    ),
    "every failure is told": (
        mailbox_above_the_limit,
        Mutation(notices.notice_once, "_noticed.add(text)", "pass"),
    ),
    "the probe reads once": (
        lambda bench: the_mapping_is_dead(bench, "when first read"),
        Mutation(memory._probe_zero_copy, "for value in (1, 2):", "for value in (1,):"),
    ),
    "the probe does not look at what the device writes": (
        lambda bench: the_mapping_is_dead(bench, "unseen"),
        Mutation(memory._probe_zero_copy, ", bool(written.eq(value).all())]", "]"),
    ),
    "the probe is not asked": (
        lambda bench: the_mapping_is_dead(bench, "when allocated"),
        Mutation(zero_copy_works, "if not all(seen):", "seen = [True]\n    if not all(seen):"),
    ),
    "a dead mapping is read": (
        lambda bench: the_mapping_is_dead(bench, "when first read"),
        Mutation(Machine.can_read, "self.zero_copy and ", ""),
    ),
    "every staging buffer is read in place": (
        ring_above_the_limit,
        Mutation(Machine.can_read_staging, " and (not self.pins or slab.is_pinned())", ""),
    ),
    "the first staging buffer speaks for all": (
        ring_grows_above_the_limit,
        Mutation(Machine.can_read_staging, " and (not self.pins or slab.is_pinned())", ""),
    ),
    "a mailbox is pinned because the machine pins": (
        mailbox_above_the_limit,
        Mutation(dg.DraftMailbox.__init__, "pin and self._slab.is_pinned()", "pin"),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_scenarios_fail_without_the_guard(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above against ones that cannot fail."""
    scenario, mutation = MUTATIONS[name]
    if mutation.function is zero_copy_works:
        # `Mutation` knows plain functions; this one is behind a cache.
        mutated = mutation._replace(function=zero_copy_works.__wrapped__)._mutated()
        for module in (memory, machine_module):
            monkeypatch.setattr(module, "zero_copy_works", mutated)
    else:
        mutation.apply(monkeypatch)
    # A wrong row or notice; the device's fault, or one in a stale slot number; or the allocator's own error.
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        scenario(bench)


def test_sizes_of_the_scenarios() -> None:
    """Guards the limits above: they are counted in these sizes."""
    mailbox = dg.DraftMailbox(FIELDS, 1, pin_memory=False)
    assert mailbox.buffer_info().record_bytes == RECORD_BYTES
    assert StagingRing.bytes_for(FIELDS, 4) == RING_BYTES
