"""What happened, counted on the way: one tally an owner, merged when `draftgather.metrics` reads.

Counting takes no lock. An assembler and a future map belong to one thread at a time, and a mailbox counts while
it holds its own lock. Each count is a plain `+=` on an attribute, a list or a dict: nothing is called between its
read and its write, so a finalizer that runs in the midst of it loses nothing.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from draftgather.errors import DraftRowError

ROUTES = ("slots", "pointers", "staged", "empty")

# Upper bounds of a histogram's buckets, seconds; one more bucket holds what is longer.
BOUNDS = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3)


class Times:
    """Host times of one call: how many in each bucket, and their sum."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def count(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def add(self, other: Times) -> None:
        for i, number in enumerate(other.counts):
            self.counts[i] += number
        self.seconds += other.seconds


class Refusals:
    """Refused calls, and the bad rows in them, by the name of the error's class."""

    __slots__ = ("calls", "rows")

    def __init__(self) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.rows: defaultdict[str, int] = defaultdict(int)

    def count(self, error: Exception) -> None:
        self.calls[type(error).__name__] += 1
        if isinstance(error, DraftRowError):
            for problem in error.problems:
                self.rows[problem.error.__name__] += 1

    def add(self, other: Refusals) -> None:
        _add(self.calls, other.calls)
        _add(self.rows, other.rows)


class StagingCounts:
    """Of one staging ring."""

    __slots__ = ("busy", "made")

    def __init__(self) -> None:
        self.made = 0  # buffers: the ring never shrinks
        self.busy = 0  # buffers that `take` found in flight, and passed over


class AssemblerTally:
    """Of one DraftAssembler."""

    __slots__ = ("calls", "late_compiles", "refusals", "rows", "rows_times", "slots_times", "staging")

    def __init__(self) -> None:
        self.calls = dict.fromkeys(ROUTES, 0)
        self.rows = dict.fromkeys(ROUTES, 0)  # padding left out
        self.slots_times, self.rows_times = Times(), Times()
        self.refusals = Refusals()
        self.late_compiles = 0
        self.staging = StagingCounts()

    def count(self, times: Times, route: str, num_rows: int, seconds: float) -> None:
        self.calls[route] += 1
        self.rows[route] += num_rows
        times.count(seconds)

    def add(self, other: AssemblerTally) -> None:
        _add(self.calls, other.calls)
        _add(self.rows, other.rows)
        self.slots_times.add(other.slots_times)
        self.rows_times.add(other.rows_times)
        self.refusals.add(other.refusals)
        self.late_compiles += other.late_compiles
        self.staging.made += other.staging.made
        self.staging.busy += other.staging.busy


class MailboxTally:
    """Of one DraftMailbox. `states` [num_slots] is the mailbox's own vector, for the figures of this moment."""

    __slots__ = ("accepted", "acquired", "put", "refusals", "released", "states")

    def __init__(self, states: np.ndarray[Any, np.dtype[np.int8]] | None = None) -> None:
        self.states = np.empty(0, np.int8) if states is None else states
        self.acquired = self.put = self.accepted = self.released = 0  # slots
        self.refusals = Refusals()

    def add(self, other: MailboxTally) -> None:
        self.acquired += other.acquired
        self.put += other.put
        self.accepted += other.accepted
        self.released += other.released
        self.refusals.add(other.refusals)


class FutureMapTally:
    """Of one FutureMap: calls that had rows. What an assembler's launch relays is that assembler's call."""

    __slots__ = ("fence_waits", "published", "refusals", "resolve_times", "resolved_rows", "stashed")

    def __init__(self) -> None:
        self.published = self.stashed = self.resolved_rows = self.fence_waits = 0
        self.resolve_times = Times()
        self.refusals = Refusals()

    def add(self, other: FutureMapTally) -> None:
        self.published += other.published
        self.stashed += other.stashed
        self.resolved_rows += other.resolved_rows
        self.fence_waits += other.fence_waits
        self.resolve_times.add(other.resolve_times)
        self.refusals.add(other.refusals)


def _add(mine: dict[str, int], others: Mapping[str, int]) -> None:
    # A copy, which is made at once: the other's thread may add a key meanwhile.
    for name, number in dict(others).items():
        mine[name] += number


class _Tally(Protocol):
    def add(self, other: Any) -> None: ...


T = TypeVar("T", bound=_Tally)


class Register(Generic[T]):
    """The tallies of all owners of one kind: those of living owners, and one total of all that have ended."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._living: dict[int, T] = {}
        self._ended = make()
        self._num_changes = 0
        self.renew_lock()
        os.register_at_fork(after_in_child=self.renew_lock)

    def renew_lock(self) -> None:
        """For a forked child: the parent's other threads, one of which may hold the lock, are not in it."""
        # Reentrant: the garbage collector may end an owner inside any call here.
        self._lock = threading.RLock()

    def enter(self, owner: object, tally: T) -> T:
        """Keep `tally` for as long as `owner` lives, and its counts for ever."""
        with self._lock:
            self._num_changes += 1
            self._living[id(tally)] = tally
        weakref.finalize(owner, self._end, tally).atexit = False
        return tally

    def leave_out(self, tally: T) -> None:
        """Count nothing of this one: what a warm-up does is no traffic."""
        with self._lock:
            self._num_changes += 1
            self._living.pop(id(tally), None)

    def read(self) -> tuple[T, list[T]]:
        """The sum over all owners, in a tally of its own; and the living ones'."""
        with self._lock:
            while True:
                num_changes, total, living = self._num_changes, self._make(), list(self._living.values())
                for tally in (self._ended, *living):
                    total.add(tally)
                # An owner that ended in the midst of this, by the garbage collector, is in it twice or not at all.
                if num_changes == self._num_changes:
                    return total, living

    def _end(self, tally: T) -> None:
        with self._lock:
            self._num_changes += 1
            if self._living.pop(id(tally), None) is not None:
                self._ended.add(tally)


ASSEMBLERS = Register(AssemblerTally)
MAILBOXES = Register(MailboxTally)
FUTURE_MAPS = Register(FutureMapTally)
