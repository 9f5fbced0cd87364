"""The host's side of a launch, on a driver that does nothing: `python -m draftgather.bench.host_side`.

A whole checked `assemble_slots` call (owners, relay, NumPy index arrays) and an `assemble_rows` call, against the
host's half of stock's three stack-and-upload calls (slices and stacks, the uploads left out), another batch of a
pool at each call, taking turns in one run, one thread. The last column is Triton's plain call of the same kernel in
place of the direct one. **Figures end before the C launcher and the CUDA driver**: a decode node adds those.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import draftgather as dg
from draftgather.bench.do_nothing import CPU, DoNothingMachine, do_nothing
from draftgather.bench.environment import environment
from draftgather.bench.timing import interleaved
from draftgather.bench.torch_stack import METADATA_WIDTH, ArrivedRow, stack_rows
from draftgather.kernels import gather_rows as kernel

_POOL, _TOPK = 1024, 4


@dataclass(frozen=True, slots=True)
class HostFigure:
    """Medians of one batch size, microseconds."""

    num_rows: int
    stock_us: float
    slots_us: float
    rows_us: float
    plain_us: float  # assemble_slots with Triton's plain call

    @property
    def ratio(self) -> float:
        return self.stock_us / self.slots_us


def measure(sizes: Sequence[int], hidden_size: int, rounds: int, calls_a_turn: int) -> list[HostFigure]:
    """Needs Triton's compiler: not under TRITON_INTERPRET."""
    with do_nothing() as counts:
        machine = DoNothingMachine.of(counts)
        fields = dg.eagle_fields(_TOPK, hidden_size)
        wide = tuple(dg.Field(f.name, f.width, f.dtype, leading=f.name.startswith("topk")) for f in fields)
        mailbox, arrived = dg.DraftMailbox(fields, _POOL, pin_memory=False), []
        for slot in range(_POOL):
            row = ArrivedRow(
                torch.rand(METADATA_WIDTH), torch.arange(METADATA_WIDTH), torch.randn(hidden_size).bfloat16()
            )
            arrived.append(row)
            mailbox.put(
                slot,
                slot,
                topk_p=row.topk_p[:_TOPK],
                topk_index=row.topk_index[:_TOPK],
                hidden_states=row.hidden_states,
            )
        by_slot = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine, outputs="fixed")
        by_row = dg.DraftAssembler(wide, machine=machine)
        future_map = dg.FutureMap(fields, _POOL + 1, machine=machine)
        by_slot.warmup()
        by_row.warmup()
        order = np.random.default_rng(0).permutation(_POOL)
        figures = []
        for n in sizes:
            batches = [order[start : start + n] for start in range(0, _POOL - n + 1, n)]
            numbers = [batch.tolist() for batch in batches]
            relays = [dg.Relay(future_map, *[torch.from_numpy(batch + 1)] * 3) for batch in batches]

            def slots(i: int, batches: list[np.ndarray] = batches, relays: list[dg.Relay] = relays) -> object:
                return by_slot.assemble_slots(batches[i], batches[i], relay=relays[i])

            def rows(i: int, numbers: list[list[int]] = numbers, relays: list[dg.Relay] = relays) -> object:
                given = [arrived[slot] for slot in numbers[i]]
                return by_row.assemble_rows(
                    topk_p=[row.topk_p for row in given],
                    topk_index=[row.topk_index for row in given],
                    hidden_states=[row.hidden_states for row in given],
                    relay=relays[i],
                )

            def stock(i: int, numbers: list[list[int]] = numbers) -> object:
                return stack_rows([arrived[slot] for slot in numbers[i]], _TOPK, CPU)

            def plain(i: int, slots: Callable[[int], object] = slots) -> object:
                kernel._compiled.run_directly, plans = False, dict(by_slot._plans)
                by_slot._plans.clear()
                try:
                    return slots(i)
                finally:
                    kernel._compiled.run_directly = True
                    by_slot._plans.update(plans)

            paths = [_rotating(path, len(batches)) for path in (stock, slots, rows, plain)]
            times = interleaved(paths, rounds, calls_a_turn)
            figures.append(HostFigure(n, *[path_times.enqueue_us.p50 for path_times in times]))
    return figures


def _rotating(path: Callable[[int], object], num_batches: int) -> Callable[[], object]:
    position = 0

    def run() -> object:
        nonlocal position
        position = (position + 1) % num_batches
        return path(position)

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The host's side of a launch, on a driver that does nothing.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 64, 256, 512])
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn", type=int, default=8, help="calls a path makes in its turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: there is no compiled kernel to launch")
    torch.set_num_threads(1)
    figures = measure(options.sizes, options.hidden_size, options.rounds, options.turn)
    print(f"hidden {options.hidden_size} bf16, top-k {_TOPK}, relay, one thread; us; the driver does nothing")
    print(f"{'N':>5}{'stock, host half':>18}{'slots':>9}{'ratio':>8}{'rows':>9}{'slots, plain call':>19}")
    for f in figures:
        print(
            f"{f.num_rows:>5}{f.stock_us:>18.1f}{f.slots_us:>9.1f}{f.ratio:>8.1f}{f.rows_us:>9.1f}{f.plain_us:>19.1f}"
        )
    if options.json:
        report = {"environment": environment(), "figures": [{**asdict(f), "ratio": f.ratio} for f in figures]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
