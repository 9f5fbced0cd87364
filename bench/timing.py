"""How calls are timed: paths in turns within one run, host and device apart, and beside a busy core where asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch

Call = Callable[[], object]

_CPU = torch.device("cpu")
# Per microsecond of the host's part, that many cycles of the GPU: it starts only when all is enqueued.
_HOLD_CYCLES = 6000
# Ends by itself, whatever becomes of the benchmark.
_SPIN = """
import os, sys, time
end, parent = time.monotonic() + float(sys.argv[1]), os.getppid()
print(flush=True)
while time.monotonic() < end and os.getppid() == parent: pass
"""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one path's times, microseconds."""

    p50: float
    p90: float
    p99: float
    calls: int  # how many were timed

    @classmethod
    def of_ns(cls, times: Sequence[float]) -> Percentiles:
        p50, p90, p99 = (round(float(value) / 1000, 3) for value in np.percentile(times, (50, 90, 99)))
        return cls(p50, p90, p99, len(times))


@dataclass(frozen=True, slots=True)
class Times:
    """On the CPU the call is all there is: only the first."""

    enqueue_us: Percentiles  # the call, until the host has the result in hand
    device_us: Percentiles | None  # what was queued, between two CUDA events, with no wait for the host in between
    wall_us: Percentiles | None  # the call, until the device is done


def interleaved(calls: Sequence[Call], rounds: int, calls_a_turn: int, device: torch.device = _CPU) -> list[Times]:
    """Time each of `calls`: they take turns, in reversed order every second round.

    The first call of a longer turn is not timed, as it finds the caches full of another path. On a GPU nothing is
    queued when a call begins.
    """
    is_cuda = device.type == "cuda"
    enqueue: list[list[float]] = [[] for _ in calls]
    on_device: list[list[float]] = [[] for _ in calls]
    wall: list[list[float]] = [[] for _ in calls]
    order = list(enumerate(calls))
    for _ in range(rounds):
        for i, call in order:
            if calls_a_turn > 1:
                call()
            for _ in range(max(calls_a_turn - 1, 1)):
                if is_cuda:
                    torch.cuda.synchronize(device)
                start = perf_counter_ns()
                result = call()
                enqueue[i].append(perf_counter_ns() - start)
                if is_cuda:
                    torch.cuda.synchronize(device)
                    wall[i].append(perf_counter_ns() - start)
                del result
            if is_cuda:
                on_device[i].append(_device_ns(call, device, held_us=enqueue[i][-1] / 1000))
        order.reverse()
    return [
        Times(
            Percentiles.of_ns(host), *(Percentiles.of_ns(times[i]) if is_cuda else None for times in (on_device, wall))
        )
        for i, host in enumerate(enqueue)
    ]


def _device_ns(call: Call, device: torch.device, held_us: float) -> float:
    """What one call queues, run without gaps: the GPU is held until the host has enqueued everything."""
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(_HOLD_CYCLES * held_us))  # type: ignore[no-untyped-call]
        start.record()
        result = call()
        end.record()
        torch.cuda.synchronize(device)
        del result
        return float(start.elapsed_time(end)) * 1e6


@contextmanager
def busy_core(is_wanted: bool = True, most_seconds: float = 600) -> Iterator[int | None]:
    """A slow host: this thread shares its core with a process that spins. Yields that process's id.

    The process is killed at the end, and ends by itself after `most_seconds` or with this one. RuntimeError if it
    ended before: what was timed meanwhile was not a slow host.
    """
    if not is_wanted:
        yield None
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        # It inherits the one core.
        spinner = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SPIN, str(most_seconds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        try:
            assert spinner.stdout is not None
            spinner.stdout.readline()
            yield spinner.pid
            if spinner.poll() is not None:
                raise RuntimeError(f"the busy process ended before the measurement, after {most_seconds:g} s at most")
        finally:
            spinner.kill()
            spinner.communicate()
    finally:
        os.sched_setaffinity(0, before)
