"""What is counted, told and ranged: literal figures after known calls, over living owners and ended ones."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import draftgather as dg
from draftgather import errors, notices, ranges, tallies
from draftgather.completion import DONE
from draftgather.describe import StagingRing
from draftgather.machine import Machine
from draftgather.notices import RateLimit
from draftgather.tallies import AssemblerTally, FutureMapTally, MailboxTally, Register
from helpers import FakeMarker, random_rows, write_record, written_mailbox

FIELDS = (dg.Field("topk_index", 2, torch.int64), dg.Field("hidden_states", 3, torch.float32))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers of the test's own: whatever other tests left behind is not counted."""
    for name, make in (("ASSEMBLERS", AssemblerTally), ("MAILBOXES", MailboxTally), ("FUTURE_MAPS", FutureMapTally)):
        register = Register(make)
        for module in [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "draftgather"]:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, register)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Log lines are limited by a clock that the test moves."""
    clock = SimpleNamespace(now=100.0)
    limit = RateLimit(10, lambda: clock.now)
    for module in [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "draftgather"]:
        if hasattr(module, "WARNINGS"):
            monkeypatch.setattr(module, "WARNINGS", limit)
    return clock


def changed(before: Any, after: Any) -> dict[str, Any]:
    """The figures that differ, by name; those of a mapping that differ in it."""
    found: dict[str, Any] = {}
    for figure in dataclasses.fields(after):
        old, new = getattr(before, figure.name), getattr(after, figure.name)
        if isinstance(new, dict):
            new = {k: n for k, n in new.items() if n != old.get(k, 0) and isinstance(n, int)}
            old = {}
        if old != new and isinstance(new, (int, dict)):
            found[figure.name] = new
    return found


def rows(num_rows: int) -> dict[str, list[torch.Tensor]]:
    return random_rows(FIELDS, num_rows)  # type: ignore[return-value]


def indices(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# -- figures


def test_calls_and_rows_by_route() -> None:
    """Guards each route's two figures, and the histogram of each call: padding and refused calls are not in them."""
    assembler = dg.DraftAssembler(FIELDS, mailbox=written_mailbox(FIELDS, rows(3), 4))
    staged = dg.DraftAssembler(FIELDS, machine=Machine(CPU, has_kernel=True, pins=False, zero_copy=True))
    before = dg.metrics().assembler
    assembler.assemble_slots([0, 1, 2], pad_to=8)
    assembler.assemble_slots([1])
    assembler.assemble_slots([], pad_to=2)
    assembler.assemble_rows(**rows(5))
    assembler.stacked(rows(2))
    staged.assemble_rows(topk_index=[[1, 2]], hidden_states=[[0.5, 1.5, 2.5]])
    with pytest.raises(dg.SlotError):
        assembler.assemble_slots([3])
    now = dg.metrics().assembler
    assert changed(before, now) == {
        "calls": {"slots": 2, "pointers": 2, "staged": 1, "empty": 1},
        "rows": {"slots": 4, "pointers": 7, "staged": 1},
        "refused_calls": {"SlotError": 1},
        "bad_rows": {"SlotError": 1},
        "staging_buffers": 1,
        "staging_buffers_made": 1,
    }
    assert (now.living, now.rows["empty"]) == (2, 0)
    assert {call: h.cumulative[-1] for call, h in now.call_seconds.items()} == {"assemble_slots": 3, "assemble_rows": 3}
    assert all(0 < h.total_seconds < 60 for h in now.call_seconds.values())


def test_histogram() -> None:
    """Guards the buckets: a time of just a bound is in that bound's bucket, and the longest in the last one."""
    times = tallies.Times()
    for seconds in (1e-6, 10e-6, 10.1e-6, 0.1, 7.0):
        times.count(seconds)
    assert times.counts == [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert times.seconds == pytest.approx(7.1000211)
    assert sorted(tallies.BOUNDS) == [*tallies.BOUNDS] and (tallies.BOUNDS[0], tallies.BOUNDS[-1]) == (1e-5, 0.1)
    histogram = dg.metrics().future_map.resolve_seconds
    assert (histogram.bounds, histogram.counts, histogram.total_seconds) == (tallies.BOUNDS, (0,) * 14, 0)


def test_mailbox_figures() -> None:
    """Guards the counts of a slot's life, and how many are in use and draining at this moment."""
    mailbox = dg.DraftMailbox(FIELDS, 6, pin_memory=False)
    slots = [mailbox.acquire(), mailbox.acquire()]
    row = {"topk_index": [1, 2], "hidden_states": [0.5, 1.5, 2.5]}
    mailbox.put(slots[0], 7, **row)
    mailbox.put(5, 7, **row)
    given = random_rows(FIELDS, 1)
    admitted = mailbox.admit(8, [memoryview(given[f.name][0].view(torch.uint8).numpy()) for f in FIELDS])
    write_record(mailbox, 4, 9, {name: values[0] for name, values in given.items()})
    mailbox.accept([4], [9])
    mailbox.release(slots[1])
    read = mailbox.begin_read(np.array([4]))
    mailbox.release([4])
    now = dg.metrics().mailbox
    mailbox.end_read(read, DONE)
    assert now == dataclasses.replace(
        now,
        living=1,
        slots=6,
        slots_in_use=3,  # slots[0], 5 and the admitted one
        slots_draining=1,
        acquired=3,
        put=3,
        accepted=1,
        released=2,
        refused_calls={},
        bad_rows={},
    )
    assert admitted not in slots


def test_future_map_figures() -> None:
    """Guards the counts of the relay, and the wait for the fence that resolve puts on the stream."""
    future_map, two = dg.FutureMap(FIELDS, 8), indices(1, 2)
    given = {name: torch.stack(values) for name, values in rows(2).items()}
    draft_input: Any = SimpleNamespace(**given, bonus_tokens=two, future_indices=two)
    future_map.publish(two, two)
    future_map.publish(indices(), indices())
    future_map.stash(two, draft_input)
    future_map.resolve(SimpleNamespace(spec_info=None))
    future_map.resolve(SimpleNamespace(spec_info=draft_input))
    waits: list[object] = []
    future_map.publish_ready = SimpleNamespace(wait=waits.append)  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
        future_map.resolve(SimpleNamespace(spec_info=draft_input))
    with pytest.raises(dg.RelayError):
        future_map.publish(indices(8), indices(1))
    now = dg.metrics().future_map
    assert (now.living, now.published, now.stashed, now.resolved_rows, now.fence_waits) == (1, 1, 1, 4, 1)
    assert (now.resolve_seconds.cumulative[-1], now.refused_calls, len(waits)) == (2, {"RelayError": 1}, 1)


def refuse_missing(assembler: dg.DraftAssembler) -> None:
    assembler.assemble_rows(**(rows(3) | {"topk_index": [None, torch.zeros(2, dtype=torch.int64), None]}))  # type: ignore[arg-type]


def refuse_two_kinds(assembler: dg.DraftAssembler) -> None:
    given: Any = rows(2) | {"topk_index": [None, torch.zeros(3, dtype=torch.int64)]}
    assembler.assemble_rows(**given)


def refuse_dtype(assembler: dg.DraftAssembler) -> None:
    assembler.assemble_rows(**(rows(1) | {"topk_index": [torch.zeros(2)]}))  # type: ignore[arg-type]


def refuse_relay(assembler: dg.DraftAssembler) -> None:
    future_map = dg.FutureMap(FIELDS, 4)
    assembler.assemble_rows(relay=dg.Relay(future_map, indices(9), indices(1), indices(1)), **rows(1))


def refuse_capture(assembler: dg.DraftAssembler) -> None:
    cuda = Machine(torch.device("cuda", 0), has_kernel=True, pins=False, zero_copy=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        dg.DraftAssembler(FIELDS, machine=cuda).assemble_rows(**rows(1))


# A refusal, and what of it is counted: the calls' kinds, and the bad rows'.
REFUSALS: dict[str, tuple[Callable[[dg.DraftAssembler], object], dict[str, int], dict[str, int]]] = {
    "missing": (refuse_missing, {"MissingRowError": 1}, {"MissingRowError": 2}),
    "two kinds": (refuse_two_kinds, {"DraftRowError": 1}, {"MissingRowError": 1, "RowShapeError": 1}),
    "dtype": (refuse_dtype, {"RowDtypeError": 1}, {"RowDtypeError": 1}),
    "slot": (lambda a: a.assemble_slots([2, 3]), {"SlotError": 1}, {"SlotError": 2}),
    "capacity": (lambda a: a.assemble_rows(**rows(9)), {"CapacityError": 1}, {}),
    "relay": (refuse_relay, {"RelayError": 1}, {}),
    "capture": (refuse_capture, {"CaptureError": 1}, {}),
    "misuse": (lambda a: a.assemble_rows(other=[]), {"ValueError": 1}, {}),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals_by_kind(kind: str) -> None:
    """Guards the figures that say why: the error's class for the call, each problem's for the rows."""
    refuse, calls, bad_rows = REFUSALS[kind]
    assembler = dg.DraftAssembler(FIELDS, max_batch_size=8, mailbox=written_mailbox(FIELDS, rows(2), 4))
    with pytest.raises((ValueError, RuntimeError)):
        refuse(assembler)
    now = dg.metrics().assembler
    assert (now.refused_calls, now.bad_rows) == (calls, bad_rows)
    assert sum(now.calls.values()) == sum(now.rows.values()) == 0


MAILBOX_REFUSALS: dict[str, tuple[Callable[[dg.DraftMailbox], object], dict[str, int], dict[str, int]]] = {
    "full": (lambda m: m.acquire(), {"MailboxFullError": 1}, {}),
    "admit": (lambda m: m.admit(1, []), {"MailboxFullError": 1}, {}),
    "put": (lambda m: m.put(0, 5, topk_index=[1, 2], hidden_states=[0.5]), {"RowShapeError": 1}, {"RowShapeError": 1}),
    "accept": (lambda m: m.accept([0, 1], [5, 5]), {"SlotError": 1}, {"SlotError": 2}),
    "release": (lambda m: m.release([0, 0, 7]), {"SlotError": 1}, {"SlotError": 2}),
}


@pytest.mark.parametrize("kind", MAILBOX_REFUSALS)
def test_refusals_of_a_mailbox(kind: str) -> None:
    """Guards a full mailbox and refused slots from going by unseen."""
    refuse, calls, bad_rows = MAILBOX_REFUSALS[kind]
    mailbox = dg.DraftMailbox(FIELDS, 2, pin_memory=False)
    mailbox.acquire()
    mailbox.acquire()
    with pytest.raises((ValueError, RuntimeError)):
        refuse(mailbox)
    now = dg.metrics().mailbox
    assert (now.refused_calls, now.bad_rows) == (calls, bad_rows)
    assert (now.acquired, now.put, now.accepted, now.released) == (2, 0, 0, 0)


def test_busy_staging_buffers() -> None:
    """Guards the growth of a ring, and the buffers that it found in flight."""
    ring = StagingRing(64, pin=False)
    markers = [FakeMarker(), FakeMarker()]
    for marker in markers:
        ring.take().marker = marker
    assert (ring.counts.made, ring.counts.busy) == (2, 1)
    markers[1].is_done = True
    ring.take()  # looks at the first, which is busy, before the second
    assert (ring.counts.made, ring.counts.busy) == (2, 2)


def test_warmup_is_no_traffic() -> None:
    """Guards the figures from what warm-up does with an assembler, a mailbox and a future map of its own."""
    assembler = dg.DraftAssembler(FIELDS)
    before = dg.metrics()
    assembler.warmup()
    assert dg.metrics() == before
    assert sum(before.assembler.calls.values()) == 0


def test_late_compiles() -> None:
    """Guards the figure of kernels that serving had to wait for."""
    machine = Machine(CPU, has_kernel=True, pins=False, zero_copy=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "plan", lambda self, descriptor: SimpleNamespace(is_new=True))
        patch.setattr("draftgather.draft_assembler.launch", lambda *_: DONE)
        assembler = dg.DraftAssembler(FIELDS, machine=machine)
        assembler.assemble_rows(**rows(1))
        assert dg.metrics().assembler.late_compiles == 0
        assembler._is_warm = True
        assembler._plans.clear()
        assembler.assemble_rows(**rows(1))
    assert dg.metrics().assembler.late_compiles == 1


# -- living owners and ended ones


def test_counts_of_ended_owners_stay() -> None:
    """Guards counters that go down when a builder makes its assembler anew; what is of this moment does."""
    mailbox = written_mailbox(FIELDS, rows(3), 3)
    assembler, future_map = dg.DraftAssembler(FIELDS, mailbox=mailbox), dg.FutureMap(FIELDS, 4)
    assembler.assemble_slots([0, 1, 2])
    future_map.publish(indices(1), indices(1))
    with pytest.raises(dg.SlotError):
        assembler.assemble_slots([9])
    before = dg.metrics()
    assert (before.assembler.living, before.mailbox.living, before.future_map.living) == (1, 1, 1)
    del assembler, mailbox, future_map
    gc.collect()
    now = dg.metrics()
    assert now.assembler == dataclasses.replace(before.assembler, living=0)
    assert now.mailbox == dataclasses.replace(before.mailbox, living=0, slots=0, slots_in_use=0)
    assert now.future_map == dataclasses.replace(before.future_map, living=0)
    assert (now.assembler.rows["slots"], now.mailbox.put, now.future_map.published) == (3, 3, 1)


def test_an_owner_that_ends_while_it_is_read() -> None:
    """Guards the sum from an owner that the garbage collector ends in the midst of it: counted once, not twice."""
    owners: list[Any] = []

    class Ending(MailboxTally):
        def add(self, other: MailboxTally) -> None:
            if owners:
                owners.pop()
            super().add(other)

    register: Register[MailboxTally] = Register(Ending)
    for _ in range(3):
        owners.append(type("Owner", (), {})())
        register.enter(owners[-1], MailboxTally()).put = 1
    gc.collect()
    assert register.read()[0].put == 3
    assert owners == []


def test_two_threads_and_a_reader() -> None:
    """Guards the sum over threads: nothing lost, no figure that goes down, no reader that fails."""
    mailbox, num_calls = written_mailbox(FIELDS, rows(4), 64), 300
    assemblers = [dg.DraftAssembler(FIELDS, mailbox=mailbox) for _ in range(2)]

    def work(assembler: dg.DraftAssembler, owner: int) -> None:
        for _ in range(num_calls):
            assembler.assemble_slots([0, 1])
            slot = mailbox.acquire()
            mailbox.put(slot, owner, topk_index=[1, 2], hidden_states=[0.5, 1.5, 2.5])
            mailbox.release(slot)
            with pytest.raises(dg.SlotError):
                mailbox.release(-1)

    threads = [threading.Thread(target=work, args=(assembler, i)) for i, assembler in enumerate(assemblers)]
    for thread in threads:
        thread.start()
    last = dg.metrics()
    while any(thread.is_alive() for thread in threads):
        now = dg.metrics()
        assert now.assembler.rows["slots"] >= last.assembler.rows["slots"]
        assert now.mailbox.put >= last.mailbox.put
        last = now
    for thread in threads:
        thread.join(60)
    now = dg.metrics()
    assert (now.assembler.calls["slots"], now.assembler.rows["slots"]) == (600, 1200)
    assert (now.mailbox.acquired, now.mailbox.put, now.mailbox.released) == (600, 604, 600)
    assert now.mailbox.refused_calls == now.mailbox.bad_rows == {"SlotError": 600}


def test_a_snapshot_is_plain() -> None:
    """Guards a snapshot that changes later, or that cannot be sent elsewhere."""
    assembler = dg.DraftAssembler(FIELDS)
    snapshot = dg.metrics()
    assembler.assemble_rows(**rows(1))
    assert snapshot.assembler.calls["pointers"] == 0
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert dataclasses.asdict(snapshot)["assembler"]["living"] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.assembler.living = 5  # type: ignore[misc]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_counts() -> None:
    """Guards a child of a fork at a moment when another thread of the parent held the locks: it would hang."""
    code = """
import os, signal, threading, warnings
warnings.simplefilter("ignore")
import draftgather as dg
from draftgather import notices, tallies
held, done = threading.Event(), threading.Event()
def hold():
    with notices.WARNINGS._lock, tallies.MAILBOXES._lock:
        held.set()
        done.wait(60)
threading.Thread(target=hold).start()
held.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(20)
    mailbox = dg.DraftMailbox(dg.eagle_fields(1, 2), 1, pin_memory=False)
    mailbox.acquire()
    try:
        mailbox.acquire()
    except dg.MailboxFullError:
        os._exit(dg.metrics().mailbox.refused_calls["MailboxFullError"] + 6)
    os._exit(0)
_, status = os.waitpid(child, 0)
done.set()
print(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "7\n", done.stderr


# -- log lines


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all((record.name, record.levelname) == ("draftgather", "WARNING") for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_a_refusal_is_told(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the line: which call, which request, what came and was expected, and what to do about it."""
    assembler = dg.DraftAssembler(FIELDS, mailbox=dg.DraftMailbox(FIELDS, 2, pin_memory=False))
    with pytest.raises(dg.SlotError):
        assembler.assemble_slots([1], request_ids=["a7 100%s"])
    assert lines(caplog) == [
        "draftgather: assemble_slots refused, SlotError: request 'a7 100%s': slot is 1, which is free: nothing was "
        "written since it was released, expected a written slot. Remedy: put or accept a slot before its batch, "
        "release it only after, and pass the owner that it was put for"
    ]


def test_lines_are_few(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a log line a refusal: one a kind in ten seconds, and the next says what was left out."""
    mailbox = dg.DraftMailbox(FIELDS, 1, pin_memory=False)
    mailbox.acquire()

    def refuse(times: int) -> None:
        for _ in range(times):
            with pytest.raises(dg.MailboxFullError):
                mailbox.acquire()

    refuse(5)
    clock.now += 9.9
    refuse(2)
    with pytest.raises(dg.SlotError):
        mailbox.accept([0], [1])
    assert [line.partition(",")[0] for line in lines(caplog)] == [
        "draftgather: acquire refused",
        "draftgather: accept refused",
    ]
    clock.now += 0.1
    refuse(3)
    clock.now += 10
    refuse(1)
    assert [line.partition("a copy")[2] for line in lines(caplog)[2:]] == [
        " (6 more of this kind left out since the last one)",
        " (2 more of this kind left out since the last one)",
    ]


def test_a_line_never_raises(clock: SimpleNamespace) -> None:
    """Guards the refusal from its log line: a handler, a clock or a text that fails is not what the caller gets."""

    class Broken(RuntimeError):
        remedy = "none"

        def __str__(self) -> str:
            raise KeyError("no text")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notices._logger, "warning", lambda *_: 1 / 0)
        notices.tell_refusal("a call", dg.RelayError("why"))
    notices.tell_refusal("another call", ValueError("none of ours"))
    RateLimit(10, lambda: 1 // 0).warn("kind", "text")
    notices.tell_refusal("a third call", Broken())


def test_expected_refusals_are_not_told(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the output of programs that inject faults; what is refused after them is told."""
    with notices.refusals_expected():
        notices.tell_refusal("a call", dg.RelayError("why"))
    assert lines(caplog) == []
    notices.tell_refusal("a call", dg.RelayError("why"))
    assert len(lines(caplog)) == 1


def test_a_ring_that_grows_is_told(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Guards memory that grows in silence: eight buffers are in order, the ninth is told."""
    ring = StagingRing(64, pin=False)
    for _ in range(8):
        ring.take().marker = FakeMarker()
    assert lines(caplog) == []
    for _ in range(3):
        ring.take().marker = FakeMarker()
    (line,) = lines(caplog)
    assert line.startswith("draftgather: a staging ring grew to 9 buffers of 64 bytes") and "Remedy: " in line


def test_every_error_has_a_remedy() -> None:
    """Guards a class of error without a way out: each has its own, in the line only."""
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    remedies = [error.remedy for error in classes]  # type: ignore[attr-defined]
    assert len(classes) == 13 and len(set(remedies)) == 13
    assert all(remedy and "\n" not in remedy and not remedy.endswith(".") for remedy in remedies)


# -- ranges

CALLS = {
    dg.DraftAssembler: ("assemble_slots", "assemble_rows"),
    dg.FutureMap: ("publish", "stash", "resolve"),
    dg.DraftMailbox: ("put", "accept"),
}


def methods() -> list[object]:
    return [vars(owner)[name] for owner, names in CALLS.items() for name in names]


@pytest.fixture
def plain() -> Iterator[list[object]]:
    before = methods()
    assert all(vars(method).get("__wrapped__") is None for method in before)  # type: ignore[call-overload]
    yield before
    assert all(now is then for now, then in zip(methods(), before, strict=True))


def test_ranges_are_off(plain: list[object]) -> None:
    """Guards the cost of ranges that nobody asked for: the very same functions before and after, after an error too."""
    with pytest.raises(KeyError), dg.profile_ranges():
        raise KeyError
    assert all(now is then for now, then in zip(methods(), plain, strict=True))
    with dg.profile_ranges():
        with dg.profile_ranges():
            pass
        assert not any(now is then for now, then in zip(methods(), plain, strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_ranges_have_names(plain: list[object]) -> None:
    """Guards the names in a profiler's trace, one for each call."""
    mailbox, future_map = written_mailbox(FIELDS, rows(1), 2), dg.FutureMap(FIELDS, 4)
    assembler, one = dg.DraftAssembler(FIELDS, mailbox=mailbox), indices(1)
    draft_input: Any = SimpleNamespace(bonus_tokens=one, future_indices=one)
    write_record(mailbox, 1, 9, {name: values[0] for name, values in rows(1).items()})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace, dg.profile_ranges():
        mailbox.put(0, 100, topk_index=[1, 2], hidden_states=[0.5, 1.5, 2.5])
        mailbox.accept([1], [9])
        batch = assembler.assemble_slots([0])
        assembler.assemble_rows(**rows(1))
        vars(draft_input).update(batch.tensors)
        future_map.publish(one, one)
        future_map.stash(one, draft_input)
        future_map.resolve(SimpleNamespace(spec_info=draft_input))
    names = [event.name for event in trace.events() if event.name.startswith("draftgather.")]
    assert sorted(names) == sorted(f"draftgather.{name}" for calls in CALLS.values() for name in calls)


def test_ranges_by_the_environment() -> None:
    """Guards the switch for whoever cannot change the program: read once, at import."""
    code = "import draftgather as dg; print(hasattr(dg.DraftAssembler.assemble_slots, '__wrapped__'))"
    for value, expected in (("1", "True\n"), ("0", "False\n")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"DRAFTGATHER_PROFILE_RANGES": value},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.stdout, done.stderr) == (expected, "")
    assert not ranges._originals
