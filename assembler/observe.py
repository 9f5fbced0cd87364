"""What this process has done so far: `metrics()`, over all assemblers, mailboxes and future maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from draftgather.mailbox import DRAINING, HELD, WRITTEN
from draftgather.tallies import ASSEMBLERS, BOUNDS, FUTURE_MAPS, MAILBOXES, Times


@dataclass(frozen=True, slots=True)
class Histogram:
    """Host times of calls that were not refused. Bucket i: at most bounds[i], and longer than the bound before."""

    bounds: tuple[float, ...]  # [n] seconds, ascending
    counts: tuple[int, ...]  # [n + 1] calls a bucket; the last is without bound
    total_seconds: float

    @property
    def cumulative(self) -> tuple[int, ...]:
        """[n + 1] calls of at most each bound; the last is all of them."""
        return tuple(accumulate(self.counts))


@dataclass(frozen=True, slots=True)
class AssemblerMetrics:
    """Of all DraftAssemblers. What `warmup` does is left out."""

    living: int  # now
    calls: Mapping[str, int]  # by route: "slots", "pointers", "staged", "empty"
    rows: Mapping[str, int]  # by route; padding left out
    call_seconds: Mapping[str, Histogram]  # by call: "assemble_slots", "assemble_rows"
    refused_calls: Mapping[str, int]  # by the name of the error's class
    bad_rows: Mapping[str, int]  # by the name of the class of each row's problem
    late_compiles: int  # kernels compiled after `warmup`
    staging_buffers: int  # now, of the living
    staging_buffers_made: int
    staging_buffers_busy: int  # times that a buffer was still in flight, and passed over: nobody waited for it


@dataclass(frozen=True, slots=True)
class MailboxMetrics:
    """Of all DraftMailboxes. A released slot counts as draining until the mailbox next looks whether it is free."""

    living: int  # now
    slots: int  # now, of the living, as the next two
    slots_in_use: int  # held or written
    slots_draining: int  # released, perhaps still read by a launch
    acquired: int  # slots that `acquire` and `admit` gave
    put: int  # rows that `put` and `admit` wrote
    accepted: int  # records
    released: int  # slots
    refused_calls: Mapping[str, int]  # by the name of the error's class; MailboxFullError is a full mailbox
    bad_rows: Mapping[str, int]  # by the name of the class of each row's or slot's problem


@dataclass(frozen=True, slots=True)
class FutureMapMetrics:
    """Of all FutureMaps: calls that had rows. A relay in an assembler's launch counts as that assembler's call."""

    living: int  # now
    published: int  # calls
    stashed: int  # calls
    resolved_rows: int
    resolve_seconds: Histogram  # of calls of `resolve`
    fence_waits: int  # of the device's stream, which `resolve` queued; the host never waits
    refused_calls: Mapping[str, int]  # by the name of the error's class


@dataclass(frozen=True, slots=True)
class Metrics:
    """A snapshot. Counts are of this process since its start, of ended owners too, and never go down.

    Figures that say "now" are of the living, and may. Each figure is right by itself; another thread that assembles
    meanwhile may have been counted in one of two that belong together.
    """

    assembler: AssemblerMetrics
    mailbox: MailboxMetrics
    future_map: FutureMapMetrics


def metrics() -> Metrics:
    """The counts of this process. From any thread; no device is asked, and no call of others is held up."""
    return Metrics(_of_assemblers(), _of_mailboxes(), _of_future_maps())


def _of_assemblers() -> AssemblerMetrics:
    total, living = ASSEMBLERS.read()
    return AssemblerMetrics(
        living=len(living),
        calls=total.calls,
        rows=total.rows,
        call_seconds={"assemble_slots": _histogram(total.slots_times), "assemble_rows": _histogram(total.rows_times)},
        refused_calls=dict(total.refusals.calls),
        bad_rows=dict(total.refusals.rows),
        late_compiles=total.late_compiles,
        staging_buffers=sum([tally.staging.made for tally in living]),
        staging_buffers_made=total.staging.made,
        staging_buffers_busy=total.staging.busy,
    )


def _of_mailboxes() -> MailboxMetrics:
    total, living = MAILBOXES.read()
    numbers = np.zeros(DRAINING + 1, np.int64)  # of slots, by state
    for tally in living:
        numbers += np.bincount(tally.states, minlength=len(numbers))
    return MailboxMetrics(
        living=len(living),
        slots=int(numbers.sum()),
        slots_in_use=int(numbers[HELD] + numbers[WRITTEN]),
        slots_draining=int(numbers[DRAINING]),
        acquired=total.acquired,
        put=total.put,
        accepted=total.accepted,
        released=total.released,
        refused_calls=dict(total.refusals.calls),
        bad_rows=dict(total.refusals.rows),
    )


def _of_future_maps() -> FutureMapMetrics:
    total, living = FUTURE_MAPS.read()
    return FutureMapMetrics(
        living=len(living),
        published=total.published,
        stashed=total.stashed,
        resolved_rows=total.resolved_rows,
        resolve_seconds=_histogram(total.resolve_times),
        fence_waits=total.fence_waits,
        refused_calls=dict(total.refusals.calls),
    )


def _histogram(times: Times) -> Histogram:
    return Histogram(BOUNDS, tuple(times.counts), times.seconds)
