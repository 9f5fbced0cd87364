"""sglang's builder beside the plugged-in one, on a real sglang: `draftgather bench --sglang PATH`.

One process, one node a path (sglang, draftgather with sglang's publish and stash, draftgather fused, fused with
rows in the mailbox), the same rows. *Rotating*: another batch at each call, over a pool of requests, as each
request passes the builder once. *Hot*: the same batch again and again. *Stall a tick*: arrivals of a trace are
grouped by scheduler tick, and the builder's host time is what a tick waits for. *Arrival*: what becomes of the
three draft rows of one request, sglang's three clones or one record, another metadata slot at each call. Paths
take turns; before and after, all must have written the same bytes. CPU figures are proxies: decode nodes run GPUs.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from draftgather.bench.arrivals import Arrival
from draftgather.bench.timing import interleaved
from draftgather.dropin import DropIn, Mode
from draftgather.dropin_mailbox import ArrivalMailbox

_PATHS = ("sglang", "draftgather", "fused", "mailbox")
_OURS = _PATHS[1:]


class Request:
    """What arriving rows are hung on."""

    output_topk_p: torch.Tensor
    output_topk_index: torch.Tensor
    hidden_states_tensor: torch.Tensor


class SglangNotUsable(Exception):
    """There is no sglang at the path, or it cannot be imported here."""


@dataclass(frozen=True, slots=True)
class BuilderFigure:
    """Median host time of one call, microseconds."""

    case: str  # "rotating" | "hot"
    num_rows: int
    us: dict[str, float]  # a path


@dataclass(frozen=True, slots=True)
class StallFigure:
    """Host time in the builder a tick that has arrivals, microseconds."""

    path: str
    ticks: int
    p50_us: float
    p99_us: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class ArrivalFigure:
    """Median host time of one arriving row, microseconds."""

    sglang_us: float
    mailbox_us: float


class SglangBench:
    """Four nodes with the same rows, and one batch of requests for each call."""

    def __init__(self, path: Path, hidden_size: int, topk: int, pool: int, seed: int = 0) -> None:
        """path: the folder that holds the package `sglang`. Raises SglangNotUsable."""
        self._drop_in = _load(path)
        from draftgather.bench.sglang_node import Node, NodeOptions

        options = NodeOptions(topk=topk, hidden_size=hidden_size, max_requests=pool)
        self.version = self._drop_in.engine.version
        self._nodes = {name: Node(options) for name in _PATHS}
        generator = torch.Generator().manual_seed(seed)
        writer = self._nodes["sglang"]
        for slot in range(pool):
            row = {
                "topk_p": torch.rand(topk, generator=generator),
                "topk_index": torch.randint(0, 1 << 17, (topk,), generator=generator),
                "hidden_states": torch.randn(hidden_size, generator=generator),
            }
            writer.write_row(slot, row, room=slot + 1)
        order = torch.randperm(pool, generator=generator).tolist()
        self._metadata, self._pool = writer.metadata, pool
        self._arrivals = ArrivalMailbox(writer.metadata, pool)
        chosen = replace(self._drop_in.options, fused=False)
        self._options = {
            "sglang": (Mode.OFF, chosen, None),
            "draftgather": (Mode.ON, chosen, None),
            "fused": (Mode.ON, replace(chosen, fused=True), None),
            "mailbox": (Mode.ON, replace(chosen, fused=True), self._arrivals),
        }
        clones = [writer.commit(slot, slot + 1) for slot in order]
        self._choose("mailbox")
        records = [writer.request(slot + 1, slot + 1) for slot in order]
        for slot, req in zip(order, records, strict=True):
            self._drop_in.commit(partial(writer.take_rows, req, slot), req)
        self._reqs = {name: records if name == "mailbox" else clones for name in _PATHS}
        # Steady state: the relay is laid out, and all of its pages have been touched.
        for name in _PATHS:
            self._build(name, self._batch(name, range(pool)))

    def measure(self, case: str, num_rows: int, rounds: int, calls_a_turn: int) -> BuilderFigure:
        """case: "rotating" or "hot"."""
        starts = range(0, self._pool - num_rows + 1, num_rows)
        if case == "hot":
            starts = starts[:1]
        batches = {name: [self._batch(name, range(s, s + num_rows)) for s in starts] for name in _PATHS}
        self._check_equal(batches)
        third = max(len(starts) // 3, 1)
        paths = [self._rotate(name, batches[name], i * third) for i, name in enumerate(_PATHS)]
        medians = [times.enqueue_us.p50 for times in interleaved(paths, rounds, calls_a_turn)]
        self._check_equal(batches)
        return BuilderFigure(case, num_rows, dict(zip(_PATHS, medians, strict=True)))

    def measure_arrival(self, rounds: int, calls_a_turn: int) -> ArrivalFigure:
        """The rows are kept for as long as in a pool of 64 requests."""
        buffers = (self._metadata.output_topk_p, self._metadata.output_topk_index, self._metadata.output_hidden_states)
        mailbox, position = ArrivalMailbox(self._metadata, 256), 0
        living: dict[str, deque[Any]] = {name: deque(maxlen=64) for name in ("sglang", "mailbox")}

        def next_slot() -> int:
            nonlocal position
            position = (position + 7) % self._pool
            return position

        def clone() -> None:
            slot, req = next_slot(), Request()
            req.output_topk_p, req.output_topk_index, req.hidden_states_tensor = [b[slot].clone() for b in buffers]
            living["sglang"].append(req)

        def keep() -> None:
            slot, req = next_slot(), Request()
            arrived = mailbox.receive(slot, slot)
            assert arrived is not None
            req.output_topk_p, req.output_topk_index, req.hidden_states_tensor = arrived.rows.values()
            mailbox.settle(arrived, req)
            living["mailbox"].append(req)

        times = interleaved([clone, keep], 10 * rounds, calls_a_turn)
        return ArrivalFigure(*(t.enqueue_us.p50 for t in times))

    def replay(self, arrivals: Iterable[Arrival], tick_ms: float) -> list[StallFigure]:
        """The ticks of a trace one after the other, each path's builder in turn."""
        sizes = _arrivals_a_tick(arrivals, tick_ms, most=self._pool)
        times: dict[str, list[int]] = {name: [] for name in _PATHS}
        position, names = 0, list(_PATHS)
        for size in sizes:
            if position + size > self._pool:
                position = 0
            for name in names:
                batch = self._batch(name, range(position, position + size))
                start = perf_counter_ns()
                self._build(name, batch)
                times[name].append(perf_counter_ns() - start)
            names.append(names.pop(0))
            position += size
        return [
            StallFigure(
                name,
                len(sizes),
                float(np.percentile(times[name], 50)) / 1e3,
                float(np.percentile(times[name], 99)) / 1e3,
                sum(times[name]) / 1e6,
            )
            for name in _PATHS
        ]

    def _batch(self, name: str, positions: Sequence[int]) -> tuple[Any, torch.Tensor]:
        batch = self._nodes[name].prebuilt([self._reqs[name][i] for i in positions])
        return batch, torch.arange(len(positions))

    def _build(self, name: str, batch: tuple[Any, torch.Tensor]) -> Any:
        self._choose(name)
        return self._nodes[name].build(*batch)

    def _choose(self, name: str) -> None:
        self._drop_in.mode, self._drop_in.options, self._drop_in.arrivals = self._options[name]

    def _rotate(self, name: str, batches: Sequence[tuple[Any, torch.Tensor]], start: int) -> Callable[[], object]:
        position = start

        def run() -> object:
            nonlocal position
            position = (position + 1) % len(batches)
            return self._build(name, batches[position])

        return run

    def _check_equal(self, batches: dict[str, list[tuple[Any, torch.Tensor]]]) -> None:
        """What the paths return and relay is the same to the byte; figures come only after this."""
        from draftgather.dropin_shadow import compare

        served = self._build("sglang", batches["sglang"][0])
        for name in _OURS:
            before = self._drop_in.stats.batches
            ours = self._build(name, batches[name][0])
            if self._drop_in.stats.batches != before + 1:
                raise SystemExit(f"{name}: the drop-in left this batch to sglang: no figures")
            future_maps = self._nodes["sglang"].future_map, self._nodes[name].future_map
            different = compare(served, ours, *future_maps, batches["sglang"][0][0]).different()
            # Two batches hold two tensors of the same indices and tokens: compare looks at their values too.
            if different:
                raise SystemExit(f"{name} differs from sglang in {different}: no figures")


def _arrivals_a_tick(arrivals: Iterable[Arrival], tick_ms: float, most: int) -> list[int]:
    """How many requests arrive in each tick that has any."""
    counts: dict[int, int] = {}
    for arrival in arrivals:
        tick = int(arrival.time_ms // tick_ms)
        counts[tick] = counts.get(tick, 0) + 1
    return [min(count, most) for _, count in sorted(counts.items())]


def _load(path: Path) -> DropIn:
    """The drop-in, put in place by the sglang at `path`, and passing through."""
    if not (path / "sglang" / "srt").is_dir():
        raise SglangNotUsable(
            f"{path} has no package sglang: expected a site-packages, or the folder `python` of a clone"
        )
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.update(DRAFTGATHER_SGLANG="on", DRAFTGATHER_SGLANG_MAILBOX="1")
    sys.path.insert(0, str(path))
    try:
        from sglang.srt.plugins import load_plugins
    except ImportError as error:
        raise SglangNotUsable(f"the sglang at {path} cannot be imported: {error}") from error
    load_plugins()
    from draftgather import sglang_plugin

    drop_in = sglang_plugin.drop_in()
    if drop_in is None or drop_in.mode is Mode.OFF:
        raise SglangNotUsable(f"the drop-in is not in place: {sglang_plugin.describe_installed()}")
    return drop_in
