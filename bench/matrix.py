"""The matrix of `draftgather bench`: every path in every case, in turns, and checked to the byte before and after.

*rotating*: another batch at each call, over a pool of rows and as many relay slots, so that rows and relay are cold in
cache. *hot*: the same batch at each call. *overlap*: publish and stash too. *busy*: the host's core is shared with a
process that spins. CPU ratios are proxies: decode nodes run GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch

from draftgather.bench.paths import FLOOR, PATHS, PLAIN, Batch, RowPath, Workload
from draftgather.bench.timing import Call, Times, busy_core, interleaved

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CLONES, PUT = "three clones", "put"


@dataclass(frozen=True)
class Matrix:
    """What is run: each axis's values, and how long."""

    sizes: tuple[int, ...] = SIZES
    hidden_sizes: tuple[int, ...] = (7168,)
    topks: tuple[int, ...] = (4,)
    num_steps: tuple[int, ...] = (1,)
    overlaps: tuple[bool, ...] = (True, False)
    temperatures: tuple[str, ...] = ("rotating", "hot")
    loads: tuple[str, ...] = ("quiet",)
    paths: tuple[str, ...] = tuple(path.name for path in PATHS)
    dtype: str = "bfloat16"
    device: str = "cpu"
    pool: int = 4096  # rows, mailbox slots and relay slots
    rounds: int = 20
    turn: int = 8  # calls that a path makes in its turn

    @cached_property
    def chosen(self) -> list[RowPath]:
        """Those that this device can run; the plain one and the floor always."""
        names = {PLAIN, FLOOR, *self.paths}
        return [path for path in PATHS if path.name in names and path.in_words(torch.device(self.device)) is not None]


FULL = Matrix(hidden_sizes=(4096, 7168), topks=(1, 4, 8), num_steps=(1, 3), loads=("quiet", "busy"))


@dataclass(frozen=True, slots=True)
class Group:
    """What the figures of one table have in common."""

    step: str  # "batch", or "arrival" of one row
    device: str  # "cpu" | "cuda"
    dtype: str
    hidden_size: int
    topk: int
    num_steps: int
    overlap: bool
    temperature: str  # "rotating" | "hot"
    load: str  # "quiet" | "busy"

    def __str__(self) -> str:
        """In one line, for a title."""
        words = f"hidden {self.hidden_size} {self.dtype}, top-k {self.topk}, steps {self.num_steps}, "
        if self.step == "batch":
            words += f"overlap {'on' if self.overlap else 'off'}, "
        return f"{words}{self.temperature}, {self.load} host"


@dataclass(frozen=True, slots=True)
class Figure:
    """One path's times in one case."""

    group: Group
    num_rows: int
    path: str
    times: Times


def run(matrix: Matrix, on_progress: Callable[[int], None] = lambda _: None) -> Iterator[list[Figure]]:
    """A list for each group. on_progress: told of each case. Raises BytesDiffer at the first wrong byte."""
    m, device = matrix, torch.device(matrix.device)
    for hidden_size, topk, num_steps in product(m.hidden_sizes, m.topks, m.num_steps):
        dtype = getattr(torch, m.dtype)
        pool = max(m.pool, *m.sizes)
        work = Workload(hidden_size, topk, num_steps, dtype, pool, max(m.sizes), device)
        for load in m.loads:
            head = (device.type, m.dtype, hidden_size, topk, num_steps)
            for overlap, temperature in product(m.overlaps, m.temperatures):
                group = Group("batch", *head, overlap, temperature, load)
                figures = []
                for num_rows in m.sizes:
                    figures += _measure(work, m, group, num_rows)
                    on_progress(1)
                yield figures
            yield _measure_arrival(work, m, Group("arrival", *head, False, "rotating", load))


def num_cases(matrix: Matrix) -> int:
    """How many times on_progress is called."""
    m = matrix
    axes = (m.sizes, m.hidden_sizes, m.topks, m.num_steps, m.overlaps, m.temperatures, m.loads)
    return len(list(product(*axes)))


def _measure(work: Workload, m: Matrix, group: Group, num_rows: int) -> list[Figure]:
    batches = work.batches(num_rows, is_hot=group.temperature == "hot")
    work.check_equal(m.chosen, batches[0], group.overlap)
    calls = [_rotate(work, path, batches, group.overlap, seed) for seed, path in enumerate(m.chosen)]
    for call in calls:
        for _ in range(m.turn):
            call()
    with busy_core(group.load == "busy"):
        times = interleaved(calls, m.rounds, m.turn, work.device)
    work.check_equal(m.chosen, batches[-1], group.overlap)
    return [Figure(group, num_rows, path.name, t) for path, t in zip(m.chosen, times, strict=True)]


def _rotate(work: Workload, path: RowPath, batches: Sequence[Batch], overlap: bool, seed: int) -> Call:
    """Each call takes the next batch, in an order of this path's own: none finds what another has just read."""
    order, position = random.Random(seed).sample(range(len(batches)), len(batches)), 0

    def run() -> object:
        nonlocal position
        position = (position + 1) % len(order)
        return path.call(work, batches[order[position]], overlap)

    return run


def _measure_arrival(work: Workload, m: Matrix, group: Group) -> list[Figure]:
    """One row comes: three clones out of a pool, as sglang's get_buf makes them, and one put. Host time alone."""
    names = ("topk_p", "topk_index", "hidden_states")
    pools = [torch.stack([getattr(row, name) for row in work.rows]) for name in names]
    narrow = [work.narrow(row) for row in work.rows]
    kept: list[list[torch.Tensor]] = [[]] * len(work.rows)
    position = 0

    def next_slot() -> int:
        nonlocal position
        position = (position + 1) % len(narrow)
        return work.order[position]

    def clones() -> None:
        slot = next_slot()
        # Kept until the slot comes again, as a waiting request keeps its rows.
        kept[slot] = [pool[slot].clone() for pool in pools]

    def put() -> None:
        slot = next_slot()
        work.mailbox.put(slot, slot, **narrow[slot])

    with busy_core(group.load == "busy"):
        times = interleaved([clones, put], 10 * m.rounds, m.turn)
    return [Figure(group, 1, name, t) for name, t in zip((CLONES, PUT), times, strict=True)]
