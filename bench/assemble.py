"""How much host time a batch takes on the CPU, beside the plain torch.stack path.

    python -m draftgather.bench.assemble            # the table
    python -m draftgather.bench.assemble --json F   # and its figures with the environment

One thread, overlap on (publish and stash included), checks on. *Rotating*: another batch at each
call, over a pool of --pool rows and as many relay slots, so that rows and relay are cold in cache.
*Hot*: the same batch at each call. Paths take turns of --turn calls within one run, the order
reversed every round; each figure is the median. Before a case is timed, and after, all paths must have written
the same bytes. These are CPU ratios, proxies: decode nodes run GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

import draftgather as dg
from draftgather.bench.environment import environment
from draftgather.bench.torch_stack import METADATA_WIDTH, ArrivedRow, StackRelay, stack_rows

CPU = torch.device("cpu")
Path_ = Callable[[], object]
Input = TypeVar("Input")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; times in microseconds."""

    case: str  # "slots rotating", ...
    num_rows: int
    torch_stack_us: float
    ours_us: float
    memcpy_us: float  # the floor: two memcpys of the same bytes, into the batch and into the relay

    @property
    def ratio(self) -> float:
        """How many times faster than torch.stack."""
        return self.torch_stack_us / self.ours_us


class Workload:
    """A pool of rows, as separate tensors and in a mailbox, and both relays."""

    def __init__(self, pool: int, hidden_size: int, dtype: torch.dtype, topk: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.topk = topk
        self.fields = dg.eagle_fields(topk, hidden_size, dtype)
        wide = (dg.Field("topk_p", topk, torch.float32, leading=True), *self.fields[1:])
        wide = (wide[0], dg.Field("topk_index", topk, torch.int64, leading=True), wide[2])
        self.rows = [_random_row(hidden_size, dtype, generator) for _ in range(pool)]
        self.mailbox = dg.DraftMailbox(self.fields, pool)
        for slot, row in enumerate(self.rows):
            self.mailbox.put(slot, slot, **_narrow(row, topk))
        self.future_map = dg.FutureMap(self.fields, pool + 1)
        self.stack_relay = StackRelay(pool + 1, topk, hidden_size, dtype, CPU)
        self.by_slot = dg.DraftAssembler(self.fields, max_batch_size=pool, mailbox=self.mailbox)
        self.by_row = dg.DraftAssembler(wide, max_batch_size=pool)
        # Steady state: every page of both relays has been written before.
        for buffer in (*self.future_map.buffers.values(), *vars(self.stack_relay).values()):
            buffer.fill_(1)
        self.order: list[int] = torch.randperm(pool, generator=generator).tolist()
        self.relay_order = (torch.randperm(pool, generator=generator) + 1).tolist()
        self.row_bytes = sum(field.row_bytes for field in self.fields)
        self.memcpy_pools = [torch.ones((pool, self.row_bytes), dtype=torch.uint8) for _ in range(2)]


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one call, made before it is timed, as a scheduler has them at hand."""

    slots: list[int]
    owners: list[int]
    rows: list[ArrivedRow]
    indices: torch.Tensor  # [b] future indices
    seq_lens: torch.Tensor  # [b]
    bonus_tokens: torch.Tensor  # [b]


def _random_row(hidden_size: int, dtype: torch.dtype, generator: torch.Generator) -> ArrivedRow:
    return ArrivedRow(
        torch.rand(METADATA_WIDTH, generator=generator),
        torch.randint(0, 1 << 17, (METADATA_WIDTH,), generator=generator),
        torch.randn(hidden_size, generator=generator).to(dtype),
    )


def _narrow(row: ArrivedRow, topk: int) -> dict[str, torch.Tensor]:
    return {
        "topk_p": row.topk_p[:topk],
        "topk_index": row.topk_index[:topk],
        "hidden_states": row.hidden_states,
    }


def _batches(work: Workload, num_rows: int, is_hot: bool) -> list[Batch]:
    batches = []
    for start in range(0, len(work.order) - num_rows + 1, num_rows):
        slots = work.order[start : start + num_rows]
        indices = torch.tensor(work.relay_order[start : start + num_rows])
        rows = [work.rows[slot] for slot in slots]
        batches.append(Batch(slots, slots, rows, indices, indices + 1000, indices + 7))
        if is_hot:
            break
    return batches


def _torch_stack(work: Workload, batch: Batch) -> object:
    stacked = stack_rows(batch.rows, work.topk, CPU)
    work.stack_relay.publish(batch.indices, batch.seq_lens)
    work.stack_relay.stash(batch.indices, stacked, batch.bonus_tokens)
    return stacked


def _relay(work: Workload, batch: Batch) -> dg.Relay:
    return dg.Relay(work.future_map, batch.indices, batch.seq_lens, batch.bonus_tokens)


def _assemble_slots(work: Workload, batch: Batch) -> dg.DraftBatch:
    return work.by_slot.assemble_slots(batch.slots, batch.owners, relay=_relay(work, batch))


def _assemble_rows(work: Workload, batch: Batch) -> dg.DraftBatch:
    return work.by_row.assemble_rows(
        topk_p=[row.topk_p for row in batch.rows],
        topk_index=[row.topk_index for row in batch.rows],
        hidden_states=[row.hidden_states for row in batch.rows],
        relay=_relay(work, batch),
    )


_OURS = {"slots": _assemble_slots, "rows": _assemble_rows}


def _check_equal(work: Workload, batch: Batch, ours: Callable[[Workload, Batch], dg.DraftBatch]) -> None:
    """Both paths' batch and relay rows hold the same bytes; a benchmark speaks only after this."""
    expected = _torch_stack(work, batch)
    got = ours(work, batch)
    for field in work.fields:
        pairs = (
            (got.tensors[field.name], getattr(expected, field.name)),
            (work.future_map.buffers[field.name][batch.indices], getattr(work.stack_relay, field.name)[batch.indices]),
        )
        for left, right in pairs:
            if not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
                raise SystemExit(f"{field.name} differs from torch.stack: no figures")
    relayed = (work.future_map.new_seq_lens_buf, work.future_map.output_tokens_buf)
    for left, right in zip(relayed, (work.stack_relay.seq_lens, work.stack_relay.bonus_tokens), strict=True):
        if not torch.equal(left[batch.indices], right[batch.indices]):
            raise SystemExit("sequence lengths or bonus tokens differ from torch.stack: no figures")


def interleaved(paths: Sequence[Path_], rounds: int, calls_a_turn: int) -> list[float]:
    """The median time of each path in microseconds.

    They take turns, in reversed order every second round; the first call of a longer turn is not
    timed, as it finds the caches full of the other path.
    """
    times: list[list[int]] = [[] for _ in paths]
    order = list(enumerate(paths))
    for _ in range(rounds):
        for i, path in order:
            if calls_a_turn > 1:
                path()
            for _ in range(max(calls_a_turn - 1, 1)):
                start = time.perf_counter_ns()
                result = path()
                times[i].append(time.perf_counter_ns() - start)
                del result
        order.reverse()
    return [statistics.median(samples) / 1000 for samples in times]


def _rotate(call: Callable[[Workload, Input], object], work: Workload, batches: Sequence[Input]) -> Path_:
    position = 0

    def run() -> object:
        nonlocal position
        position = (position + 1) % len(batches)
        return call(work, batches[position])

    return run


def measure(work: Workload, source: str, temperature: str, num_rows: int, rounds: int, calls_a_turn: int) -> Figure:
    batches = _batches(work, num_rows, is_hot=temperature == "hot")
    ours = _OURS[source]
    _check_equal(work, batches[0], ours)
    for call in (_torch_stack, ours):
        for batch in batches:
            call(work, batch)
    # Rows that lie one after the other, in the source and in the relay: as cold or hot as the batches are.
    memcpy_batch = torch.empty((num_rows, work.row_bytes), dtype=torch.uint8)

    def memcpy_twice(work: Workload, start: int) -> None:
        memcpy_batch.copy_(work.memcpy_pools[0][start : start + num_rows])
        work.memcpy_pools[1][start : start + num_rows].copy_(memcpy_batch)

    # Each path rotates on its own; half a round apart, so that none finds rows another has just read.
    half = len(batches) // 2
    stack_us, ours_us, memcpy_us = interleaved(
        [
            _rotate(_torch_stack, work, batches),
            _rotate(ours, work, batches[half:] + batches[:half]),
            _rotate(memcpy_twice, work, [i * num_rows for i in range(len(batches))]),
        ],
        rounds,
        calls_a_turn,
    )
    _check_equal(work, batches[-1], ours)
    return Figure(f"{source} {temperature}", num_rows, stack_us, ours_us, memcpy_us)


def measure_arrival(work: Workload, rounds: int, calls_a_turn: int) -> tuple[float, float]:
    """Microseconds a row: three clones out of a pool, as sglang's get_buf makes them, and one put."""
    pool = {
        "topk_p": torch.stack([row.topk_p for row in work.rows]),
        "topk_index": torch.stack([row.topk_index for row in work.rows]),
        "hidden_states": torch.stack([row.hidden_states for row in work.rows]),
    }
    narrow = [_narrow(row, work.topk) for row in work.rows]
    position = 0
    kept: list[tuple[torch.Tensor, ...]] = [()] * len(work.rows)

    def advance() -> int:
        nonlocal position
        position = (position + 1) % len(narrow)
        slot: int = work.order[position]
        return slot

    def clones() -> None:
        i = advance()
        # Kept until the slot comes again, as a waiting request keeps its rows.
        kept[i] = (pool["topk_p"][i].clone(), pool["topk_index"][i].clone(), pool["hidden_states"][i].clone())

    def put() -> None:
        i = advance()
        work.mailbox.put(i, i, **narrow[i])

    clone_us, put_us = interleaved([clones, put], rounds, calls_a_turn)
    return clone_us, put_us


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Host time a batch on the CPU, beside torch.stack.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--pool", type=int, default=4096, help="rows, mailbox slots and relay slots")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn", type=int, default=8, help="calls a path makes in its turn; 1: strictly alternating")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = Workload(options.pool, options.hidden_size, getattr(torch, options.dtype), options.topk, seed=0)
    print(f"hidden {options.hidden_size} {options.dtype}, top-k {options.topk}, one CPU thread, medians in us")
    print(f"{'case':<16}{'N':>5}{'torch.stack':>13}{'draftgather':>13}{'ratio':>8}{'2 memcpy':>10}{'to memcpy':>11}")
    figures = []
    for source in _OURS:
        for temperature in ("rotating", "hot"):
            for num_rows in options.sizes:
                f = measure(work, source, temperature, num_rows, options.rounds, options.turn)
                figures.append(f)
                print(
                    f"{f.case:<16}{f.num_rows:>5}{f.torch_stack_us:>13.1f}{f.ours_us:>13.1f}{f.ratio:>8.2f}"
                    f"{f.memcpy_us:>10.1f}{f.ours_us / f.memcpy_us:>11.2f}",
                    flush=True,
                )
    clone_us, put_us = measure_arrival(work, 10 * options.rounds, options.turn)
    print(f"arrival of a row: three clones {clone_us:.1f} us, put {put_us:.1f} us, put/clones {put_us / clone_us:.2f}")
    if options.json:
        report = {
            "environment": environment(),
            "options": {k: v for k, v in vars(options).items() if k != "json"},
            "figures": [{**asdict(f), "ratio": f.ratio} for f in figures],
            "arrival": {"clone_us": clone_us, "put_us": put_us},
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
