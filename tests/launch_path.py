"""Run by test_launch_path.py in a process of its own: the launch path down to a driver that does nothing.

Triton's interpreter is off here, so what is launched, compiled and logged is what a GPU machine would see.
Prints one JSON object: what each part found.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs

import draftgather as dg
from draftgather.bench.do_nothing import Counts, DoNothingMachine, do_nothing
from draftgather.kernels import gather_rows as kernel
from draftgather.kernels.row_tables import LaunchDescriptor

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 255, 256, 512)
FIELDS = (*dg.eagle_fields(4, 7168), dg.Field("seed", 8, torch.int32, optional=True))
log: list[str] = []


class Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.append(record.getMessage())


class Bench:
    """An assembler that is warmed up, and everything it is given."""

    def __init__(self, counts: Counts, **machine: Any) -> None:
        self.counts = counts
        self.machine = DoNothingMachine.of(counts, **machine)
        self.mailbox = dg.DraftMailbox(FIELDS, 512, pin_memory=False)
        self.blocks = {f.name: torch.zeros(f.width + 16, dtype=f.dtype) for f in FIELDS}
        for slot in range(512):
            row = {f.name: self.blocks[f.name][: f.width] for f in FIELDS}
            self.mailbox.put(slot, slot, **(row if slot % 2 else row | {"seed": None}))
        self.assembler = dg.DraftAssembler(FIELDS, mailbox=self.mailbox, machine=self.machine)
        self.future_map = dg.FutureMap(FIELDS, 513, machine=self.machine)
        self.assembler.warmup()

    def relay(self, num_rows: int, dtype: torch.dtype = torch.int64, step: int = 1) -> dg.Relay:
        """step: above 1, the vectors are strided."""
        wide = torch.arange(1, num_rows + 1, dtype=dtype).repeat_interleave(step)[::step]
        return dg.Relay(self.future_map, wide, wide, wide)

    def rows(self, num_rows: int, start: int = 0, blocks: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        blocks = blocks or self.blocks
        return {f.name: [blocks[f.name][start : start + f.width]] * num_rows for f in FIELDS}

    def resolve(self, num_rows: int, dtype: torch.dtype = torch.int64) -> Any:
        indices = torch.arange(1, num_rows + 1, dtype=dtype)
        running = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=indices), seq_lens=None)
        self.future_map.resolve(running)
        return running

    def first_call(self, n: int) -> Any:
        """Its plan is made from vectors that the launch copies."""
        assembler = dg.DraftAssembler(FIELDS, mailbox=self.mailbox, machine=self.machine)
        return assembler.assemble_slots(range(n), relay=self.relay(n, step=2))

    def rows_at_odd_bytes(self, n: int) -> dict[str, Any]:
        blocks = {f.name: torch.zeros(f.row_bytes + 1, dtype=torch.uint8)[1:] for f in FIELDS}
        return {f.name: [torch.frombuffer(blocks[f.name].numpy(), dtype=f.dtype)] * n for f in FIELDS}

    def calls(self, n: int) -> dict[str, Callable[[], Any]]:
        """One of every kind, of n rows."""
        a, relay = self.assembler, self.relay
        calls: dict[str, Callable[[], Any]] = {
            "slots": lambda: a.assemble_slots(range(n)),
            "slots, strided relay of an assembler's first call": lambda: self.first_call(n),
            "rows inside of elements": lambda: a.assemble_rows(**self.rows_at_odd_bytes(n)),
            "slots, relay": lambda: a.assemble_slots(range(n), relay=relay(n)),
            "slots, int32 relay": lambda: a.assemble_slots(range(n), relay=relay(n, torch.int32)),
            "slots, strided relay": lambda: a.assemble_slots(range(n), relay=relay(n, step=2)),
            "slots, relay only": lambda: a.assemble_slots(range(n), relay=relay(n), batch_outputs=False),
            "slots, padded": lambda: a.assemble_slots(range(n), pad_to=512),
            "rows": lambda: a.assemble_rows(**self.rows(n)),
            "rows, relay": lambda: a.assemble_rows(relay=relay(n), **self.rows(n)),
            "odd rows, relay": lambda: a.assemble_rows(relay=relay(n), **self.rows(n, 1)),
            "rows without seed": lambda: a.assemble_rows(**(self.rows(n) | {"seed": None})),
            "resolve": lambda: self.resolve(n),
            "resolve, int32": lambda: self.resolve(n, torch.int32),
        }
        return calls


def num_variants() -> int:
    return len(kernel._compiled._variants)


def count_calls(counts: Counts, **machine: bool) -> dict[str, Any]:
    """What each kind of call asks of the device, as a list of what differs from one launch and nothing else."""
    bench = Bench(counts, **machine)
    before, wrong, most_uploads, events, num_calls = num_variants(), [], 0, counts.events, 0
    for n in SIZES:
        for name, call in bench.calls(n).items():
            launches, uploads = counts.launches, counts.uploads
            call()
            num_calls += 1
            launched, uploaded = counts.launches - launches, counts.uploads - uploads
            if "inside of elements" not in name:  # those are copied, row for row
                most_uploads = max(most_uploads, uploaded)
            if launched != 1:
                wrong.append(f"{name} of {n}: {launched} launches")
    launches = counts.launches
    bench.assembler.assemble_slots([])
    return {
        "wrong": wrong,
        "most_uploads": most_uploads,
        "waits": counts.waits,
        "events": (counts.events - events) / num_calls,
        "launches_of_nothing": counts.launches - launches,
        "compiled_after_warmup": num_variants() - before,
        "runs_directly": kernel._compiled.run_directly,
        "log": [line for line in log if "compiled" in line],
    }


def compare_with_plain(counts: Counts) -> dict[str, Any]:
    """The arguments of the direct launch and of Triton's plain call, of the same descriptors."""
    bench = Bench(counts)
    caught: list[tuple[LaunchDescriptor, Any]] = []
    run = DoNothingMachine.run

    def catching(machine: DoNothingMachine, descriptor: LaunchDescriptor, plan: Any = None) -> Any:
        caught.append((descriptor, plan))
        return run(machine, descriptor, plan)

    DoNothingMachine.run = catching  # type: ignore[method-assign]
    try:
        kinds = {f"{name} of {n}": call for n in (3, 16) for name, call in bench.calls(n).items()}
        for call in kinds.values():
            call()
        bench.future_map.stash(torch.arange(1, 4), bench.resolve(3).spec_info)
    finally:
        DoNothingMachine.run = run  # type: ignore[method-assign]
    names, different, planned = [*kinds, "resolve", "stash"], [], 0
    for name, (descriptor, plan) in zip(names, caught, strict=True):
        kernel.gather_rows(descriptor, plan)
        direct = counts.last
        planned += plan is not None
        kernel._compiled.run_directly = False
        kernel.gather_rows(descriptor)
        kernel._compiled.run_directly = True
        plain = counts.last
        # Copies of strided vectors are made anew each time: their addresses differ.
        if (
            "strided" not in name
            and "inside" not in name
            and (direct[:4], _plain(direct[9:])) != (plain[:4], _plain(plain[9:]))
        ):
            different.append(name)
    return {"compared": len(caught), "planned": planned, "different": different}


def _plain(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(_plain(item) for item in argument)
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def late_compile(counts: Counts) -> dict[str, Any]:
    """Rows of another dtype take a variant that warm-up does not know."""
    fields = (dg.Field("topk_index", 4, torch.int64),)
    assembler = dg.DraftAssembler(fields, machine=DoNothingMachine.of(counts))
    assembler.warmup()
    before = [len(log)]
    for dtype in (torch.int64, torch.int32, torch.int32):
        assembler.assemble_rows(topk_index=[torch.zeros(4, dtype=dtype)])
        before.append(len(log))
    return {"lines": [after - earlier for earlier, after in itertools.pairwise(before)], "last": log[-1]}


def hooks(counts: Counts) -> dict[str, Any]:
    """A profiler's hooks see a direct launch as they see a plain one."""
    bench, seen = Bench(counts), []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    def launch() -> None:
        bench.assembler.assemble_slots([0])

    launch()
    chain = knobs.runtime.launch_enter_hook
    chain.add(hook)
    launch()
    chain.remove(hook)
    launch()
    knobs.runtime.launch_enter_hook = hook
    launch()
    knobs.runtime.launch_enter_hook = chain
    return {"seen": seen}


def give_up(counts: Counts) -> dict[str, Any]:
    """Where the direct form is not there, every call is Triton's plain one."""
    state = kernel._compiled
    warmup, variants, start = kernel._gather_rows_kernel.warmup, dict(state._variants), len(log)
    state._variants.clear()
    kernel._gather_rows_kernel.warmup = lambda *given, **named: SimpleNamespace(run=None)
    try:
        launches = counts.launches
        assembler = dg.DraftAssembler(FIELDS[:1], machine=DoNothingMachine.of(counts))
        for _ in range(3):
            assembler.assemble_rows(topk_p=[torch.zeros(4)])
        return {"launches": counts.launches - launches, "lines": log[start:]}
    finally:
        kernel._gather_rows_kernel.warmup = warmup
        state._variants.update(variants)
        state.run_directly = True


def wrong_plan(counts: Counts) -> dict[str, Any]:
    """A plan that would pass other arguments than it was made from is not used."""
    real, start = kernel.LaunchPlan.arguments, len(log)
    kernel.LaunchPlan.arguments = lambda plan, d: (*real(plan, d)[:-6], -1, *real(plan, d)[-5:])  # type: ignore[method-assign]
    try:
        launches = counts.launches
        dg.DraftAssembler(FIELDS[:1], machine=DoNothingMachine.of(counts)).assemble_rows(topk_p=[torch.zeros(4)])
        return {"launches": counts.launches - launches, "lines": log[start:]}
    finally:
        kernel.LaunchPlan.arguments = real  # type: ignore[method-assign]
        kernel._compiled.run_directly = True


def main() -> None:
    logging.getLogger("draftgather").addHandler(Log())
    report: dict[str, Any] = {}
    with do_nothing() as counts:
        report["in place"] = count_calls(counts)
        report["uploaded"] = count_calls(counts, zero_copy=False)
        report["staged"] = count_calls(counts, zero_copy=False, reads_rows=False)
        report["plain"] = compare_with_plain(counts)
        report["late compile"] = late_compile(counts)
        report["hooks"] = hooks(counts)
        report["give up"] = give_up(counts)
        report["wrong plan"] = wrong_plan(counts)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
