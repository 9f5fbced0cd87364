"""Processes, threads and ends: forks touch no CUDA, threads keep out of each other's records, memory ends once.

Run as a program this file is what its own tests start: `shutdown` forks a process for every scenario of an end, and
`compile` forks eight that compile the kernel at once. Each prints one JSON object.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mutations import Mutation
from torch.multiprocessing.reductions import StorageWeakRef

import draftgather as dg
from draftgather import draft_assembler, memory
from draftgather import machine as machine_module
from draftgather import mailbox as mailbox_module
from draftgather.completion import DONE, IN_FLIGHT, InFlight
from draftgather.draft_assembler import DraftAssembler
from draftgather.kernels.gather_rows_torch import gather_rows_torch
from draftgather.kernels.row_tables import LaunchDescriptor
from draftgather.machine import Machine
from draftgather.mailbox import DraftMailbox
from helpers import FakeMarker

TIMEOUT = 120.0  # of anything that waits, on a busy machine too
CPU = torch.device("cpu")
# Eight rows of 16 KiB: long enough to be torn, and more than the cache of output blocks takes.
FIELDS = (dg.Field("ids", 4, torch.int64), dg.Field("hidden", 8192, torch.int16))
NUM_ROWS = 8


def a_row(value: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.full((4,), value), "hidden": torch.full((8192,), value, dtype=torch.int16)}


def value_of(tensors: dict[str, torch.Tensor], i: int) -> int:
    """The one value of which row i is made, in every element of every field."""
    (value,) = {value for tensor in tensors.values() for value in np.unique(tensor[i].numpy()).tolist()}
    return int(value)


def values_of(batch: dg.DraftBatch) -> list[int]:
    return [value_of(batch.tensors, i) for i in range(batch.num_padded)]


def filled_mailbox(num_slots: int) -> DraftMailbox:
    """Slot i is written, by owner 100 + i, with values i + 1."""
    mailbox = DraftMailbox(FIELDS, num_slots, pin_memory=False)
    for i in range(num_slots):
        assert mailbox.acquire() == i
        mailbox.put(i, 100 + i, **a_row(i + 1))
    return mailbox


def run_program(*arguments: str, rc: int = 0, **environment: str) -> str:
    """A process of its own, with warnings as errors. Its output; what it says of faults must be nothing."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert (process.returncode, process.stderr) == (rc, "")
    return process.stdout


# -- forks


FORKED = """
import os, sys
import torch

def touched(*_arguments, **_named):
    raise AssertionError("touched CUDA")

def refuse_libraries(event, arguments):
    if event == "ctypes.dlopen" and any(name in str(arguments[0]) for name in ("cuda", "nvidia-ml", "amdhip")):
        touched()

def in_child(work):
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    sys.addaudithook(refuse_libraries)
    for name in ("_lazy_init", "is_available", "init", "device_count", "current_device", "current_stream", "Event",
                 "is_current_stream_capturing", "synchronize", "get_device_properties", "cudart"):
        setattr(torch.cuda, name, touched)
    for name in ("_cuda_init", *(name for name in dir(torch._C) if name.startswith("_cuda_"))):
        setattr(torch._C, name, touched)
    work()
    os._exit(0)

def use():
    import draftgather as dg
    from draftgather import sglang_plugin

    sys.modules["sglang"] = None
    for mode in (None, "off"):
        os.environ.pop("DRAFTGATHER_SGLANG", None)
        if mode is not None:
            os.environ["DRAFTGATHER_SGLANG"] = mode
        sglang_plugin.load()
        assert sglang_plugin.drop_in() is None
    fields = dg.eagle_fields(topk=4, hidden_size=24)
    mailbox = dg.DraftMailbox(fields, 4, pin_memory=False)
    row = {field.name: torch.ones(field.width, dtype=field.dtype) for field in fields}
    slot = mailbox.acquire()
    mailbox.put(slot, 7, **row)
    future_map = dg.FutureMap(fields, 8)
    one = torch.ones(1, dtype=torch.int64)
    for outputs in ("fresh", "fixed"):
        assembler = dg.DraftAssembler(fields, mailbox=mailbox, outputs=outputs)
        assembler.warmup()
        relay = dg.Relay(future_map, one, one, one)
        batch = assembler.assemble_slots([slot], [7], relay=relay, pad_to=2)
        assert batch.tensors["topk_index"].tolist() == [[1] * 4, [0] * 4]
        assembler.assemble_rows(**{name: [value] for name, value in row.items()})
    draft_input = dg.EagleDraftInput(future_indices=one)
    future_map.resolve(dg.ScheduleBatch([], "cpu", one, one, spec_info=draft_input))
    assert draft_input.topk_index.tolist() == [[1] * 4]
    mailbox.release([slot])
    # And the patches are where a mailbox that may be pinned would come by.
    try:
        dg.DraftMailbox(fields, 1)
    except AssertionError as error:
        assert str(error) == "touched CUDA"
    else:
        raise AssertionError("nothing was patched")
    print("untouched")

in_child(use)  # which imports draftgather itself
import draftgather, draftgather.sglang_plugin
in_child(use)
"""


def test_forked_children_touch_no_cuda() -> None:
    """Guards a server that forks: a child that so much as asks CUDA for devices fails, or breaks its parent's."""
    assert run_program("-c", FORKED) == "untouched\n" * 2


# -- compiling


NUM_PROCESSES = 8


class OneVariant(DraftAssembler):
    """Warmed up with one variant of the kernel, of all: each of the processes compiles it."""

    def _warm_up(self) -> None:
        self.assemble_slots([0])


def compile_at_once() -> None:
    """In eight processes that start together, for sm_90 and down to a driver that does nothing."""
    from draftgather.bench.do_nothing import DoNothingMachine, do_nothing

    with do_nothing() as counts:
        _compile_at_once(counts, DoNothingMachine.of(counts))


def _compile_at_once(counts: Any, machine: Machine) -> None:
    from draftgather.kernels.gather_rows import _compiled

    start, all_started = os.pipe()
    results = []
    for _ in range(NUM_PROCESSES):
        result, write_result = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(all_started)
            os.read(start, 1)
            signal.alarm(int(4 * TIMEOUT))
            OneVariant(FIELDS, mailbox=filled_mailbox(1), machine=machine).warmup()
            compiled = [kernel.asm for kernel in _compiled._variants.values()]
            code = [made["ptx"].encode() + made["cubin"] for made in compiled]
            digests = sorted(hashlib.sha256(made).hexdigest() for made in code)
            os.write(write_result, json.dumps({"launches": counts.launches, "code": digests}).encode())
            os._exit(0)
        os.close(write_result)
        results.append((pid, result))
    os.close(all_started)
    printed = []
    for pid, result in results:
        with os.fdopen(result) as pipe:
            printed.append(pipe.read())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    print(json.dumps([json.loads(line) for line in printed]))


def test_eight_processes_compile_at_once(tmp_path: Path) -> None:
    """Guards a node's ranks, which start together over one empty cache: none fails, and all run the same code."""
    # Triton 3.9 warns where the second is not set; the kernel computes nothing.
    settings = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
    reports = json.loads(run_program(__file__, "compile", **settings))
    assert len(reports) == NUM_PROCESSES
    assert [report["launches"] for report in reports] == [1] * NUM_PROCESSES
    assert [len(report["code"]) for report in reports] == [1] * NUM_PROCESSES
    assert all(report["code"] == reports[0]["code"] for report in reports)


def warm_up(monkeypatch: pytest.MonkeyPatch, fails_at: tuple[int, ...], error: Exception) -> int:
    """Warm up with a compiler that fails at these launches, counted from 0. The number of launches that went well."""
    num_launches = itertools.count()
    launched = []

    def gather_rows(descriptor: LaunchDescriptor, plan: object = None) -> None:
        if next(num_launches) in fails_at:
            raise error
        gather_rows_torch(descriptor)
        launched.append(descriptor.num_rows)

    monkeypatch.setattr(machine_module, "gather_rows", gather_rows)
    mailbox = filled_mailbox(2)
    machine = Machine(CPU, has_kernel=True, pins=False, zero_copy=True)
    assembler = DraftAssembler(FIELDS, mailbox=mailbox, machine=machine)
    assembler.warmup()
    num_launched = len(launched)
    assert values_of(assembler.assemble_slots([1, 0], [101, 100])) == [2, 1]
    mailbox.release([0, 1])
    assert mailbox.num_free == 2
    return num_launched


WARMUP_LAUNCHES = 14  # three times few slots, many, rows at aligned and at odd addresses; resolve and stash


@pytest.mark.parametrize("fails_at", range(WARMUP_LAUNCHES))
def test_warmup_survives_one_lost_race(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    """Guards against a rank that dies at start-up because another one tidied the compiler's cache just then."""
    assert warm_up(monkeypatch, (fails_at,), FileNotFoundError("tmp.pid_1")) == fails_at + WARMUP_LAUNCHES


@pytest.mark.parametrize("fails_at", [(0, 1), (13, 27), (3, 4)])
def test_warmup_does_not_survive_a_second(monkeypatch: pytest.MonkeyPatch, fails_at: tuple[int, ...]) -> None:
    """Guards against a cache folder that cannot be written to, and a start that tries for ever."""
    with pytest.raises(FileNotFoundError, match=r"tmp\.pid_1"):
        warm_up(monkeypatch, fails_at, FileNotFoundError("tmp.pid_1"))


def test_warmup_hides_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a fault of the device that is taken for a lost race."""
    with pytest.raises(RuntimeError, match="out of resources"):
        warm_up(monkeypatch, (0,), RuntimeError("out of resources"))


def test_warmup_needs_its_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above against ones that cannot fail."""
    Mutation(DraftAssembler.warmup, "except FileNotFoundError:", "except ZeroDivisionError:").apply(monkeypatch)
    with pytest.raises(FileNotFoundError):
        warm_up(monkeypatch, (2,), FileNotFoundError("tmp.pid_1"))


# -- threads


class Worker(threading.Thread):
    """A thread whose result, or error, is the test's."""

    def __init__(self, work: Callable[[], Any], name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(TIMEOUT)
        assert not self.is_alive(), f"{self.name} hangs"
        if self._error is not None:
            raise self._error
        return self._result


class Stops:
    """A function of the package in which threads of given names stop until they are told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, threads: tuple[str, ...]) -> None:
        self._real = getattr(module, name)
        self._inside = {thread: threading.Event() for thread in threads}
        self._go_on = {thread: threading.Event() for thread in threads}
        monkeypatch.setattr(module, name, self._stop)

    def _stop(self, *arguments: Any) -> Any:
        name = threading.current_thread().name
        if name in self._inside:
            self._inside[name].set()
            assert self._go_on[name].wait(TIMEOUT)
        return self._real(*arguments)

    def wait_for(self, thread: str) -> None:
        assert self._inside[thread].wait(TIMEOUT), f"{thread} never came here"

    def go_on(self, *threads: str) -> None:
        for thread in threads or self._go_on:
            self._go_on[thread].set()


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), f"{thread.name} outlives its test"


@pytest.fixture
def without_collector() -> Iterator[None]:
    """It comes where the test says so, and nowhere else."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def slots_are_read(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A thread assembles slots 1 and 0, and stops on the way; another puts and releases them meanwhile."""
    mailbox = filled_mailbox(3)
    assembler = DraftAssembler(FIELDS, mailbox=mailbox)
    stops = Stops(monkeypatch, draft_assembler, where, ("reader",))
    reader = Worker(lambda: assembler.assemble_slots([1, 0], [101, 100], ["a1", "a0"]), "reader")
    try:
        stops.wait_for("reader")
        with pytest.raises(dg.SlotError, match="slot 1 is read by a launch that is not done"):
            mailbox.put(1, 101, **a_row(50))
        mailbox.put(2, 102, **a_row(60))
        mailbox.release([0])
        assert mailbox.num_free == 0
        with pytest.raises(dg.MailboxFullError, match="all 3 slots are in use, 1 of them released but still read"):
            mailbox.acquire()
        with pytest.raises(dg.SlotError, match="slot 0 is released, with a launch that still reads it"):
            mailbox.put(0, 107, **a_row(70))
    finally:
        stops.go_on()
    if where == "are_slots_good":
        with pytest.raises(dg.SlotError, match="request 'a0': slot is 0, which is released") as error:
            reader.result()
        assert [problem.position for problem in error.value.problems] == [1]
    else:
        assert values_of(reader.result()) == [2, 1]
    assert mailbox.acquire() == 0
    mailbox.put(0, 107, **a_row(70))
    mailbox.put(1, 101, **a_row(50))
    assert values_of(assembler.assemble_slots([0, 1, 2], [107, 101, 102])) == [70, 50, 60]


@pytest.mark.parametrize("where", ["are_slots_good", "locate_slots", "describe", "launch"])
def test_slots_that_are_read_are_neither_put_nor_freed(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Guards a batch from the next tenant's row: from before its slots are looked at until it has been read."""
    slots_are_read(monkeypatch, where)


def two_threads_read(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Two assemblers over one mailbox, both inside their launch, end in either order: slot 1 is read by both."""
    mailbox = filled_mailbox(3)
    stops = Stops(monkeypatch, draft_assembler, "launch", ("left", "right"))
    slots = {"left": [0, 1], "right": [1, 2]}

    def assemble(given: list[int]) -> dg.DraftBatch:
        return DraftAssembler(FIELDS, mailbox=mailbox).assemble_slots(given)

    readers = {name: Worker(lambda given=given: assemble(given), name) for name, given in slots.items()}
    last = "right" if first == "left" else "left"
    try:
        for name in slots:
            stops.wait_for(name)
        mailbox.release([0, 1, 2])
        assert mailbox.num_free == 0
        stops.go_on(first)
        assert values_of(readers[first].result()) == [slot + 1 for slot in slots[first]]
        assert mailbox.num_free == 1
        assert mailbox.acquire() == {"left": 0, "right": 2}[first]
        with pytest.raises(dg.MailboxFullError, match="2 of them released but still read"):
            mailbox.acquire()
        with pytest.raises(dg.SlotError, match="slot 1 is released, with a launch that still reads it"):
            mailbox.put(1, 107, **a_row(70))
    finally:
        stops.go_on()
    assert values_of(readers[last].result()) == [slot + 1 for slot in slots[last]]
    assert mailbox.num_free == 2


@pytest.mark.parametrize("first", ["left", "right"])
def test_two_threads_read_one_mailbox(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Guards a slot that two threads read: the one that ends first does not free it for the other."""
    two_threads_read(monkeypatch, first)


def a_writer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread stops while it moves a row's bytes: nobody gathers half a row, and others' rows are gathered."""
    mailbox = filled_mailbox(3)
    stops = Stops(monkeypatch, mailbox_module, "_memmove", ("writer",))
    assembler = DraftAssembler(FIELDS, mailbox=mailbox)
    writer = Worker(lambda: mailbox.put(1, 101, **a_row(50)), "writer")
    try:
        stops.wait_for("writer")
        with pytest.raises(dg.SlotError, match="row 1: slot is 1, which is not written yet"):
            assembler.assemble_slots([2, 1], [102, 101])
        assert values_of(assembler.assemble_slots([2, 0], [102, 100])) == [3, 1]
    finally:
        stops.go_on()
    writer.result()
    assert values_of(assembler.assemble_slots([2, 1], [102, 101])) == [3, 50]


def test_a_row_that_is_being_put_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a row of which the first half is new and the second old."""
    a_writer_is_read(monkeypatch)


def aborted_while_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owner 7's slot is released while its put still moves bytes: they must not come into the next tenant's row."""
    mailbox = DraftMailbox(FIELDS, 1, pin_memory=False)
    stops = Stops(monkeypatch, mailbox_module, "_memmove", ("writer",))
    slot = mailbox.acquire()
    writer = Worker(lambda: mailbox.put(slot, 7, **a_row(7)), "writer")
    is_free = True
    try:
        stops.wait_for("writer")
        mailbox.release([slot])
        try:
            assert mailbox.acquire() == slot
        except dg.MailboxFullError:
            is_free = False
        else:
            mailbox.put(slot, 8, **a_row(8))
    finally:
        stops.go_on()
    with pytest.raises(dg.SlotError, match="was released while its row was put"):
        writer.result()
    if not is_free:
        assert mailbox.acquire() == slot
        mailbox.put(slot, 8, **a_row(8))
    assert values_of(DraftAssembler(FIELDS, mailbox=mailbox).assemble_slots([slot], [8])) == [8]


def test_a_slot_is_not_free_while_it_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the next tenant's row from the bytes of an aborted one, whose put goes on in another thread."""
    aborted_while_put(monkeypatch)


def test_releases_by_the_garbage_collector(without_collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a hang: a request's finalizer releases its slot, and may run wherever an object is made."""
    mailbox = filled_mailbox(2)
    real = DraftMailbox._tenancy_fault

    def collect_first(self: DraftMailbox, slot: int) -> tuple[str, str] | None:
        gc.collect()  # as the collector may, inside of `release` too
        return real(self, slot)

    class Request:
        itself: Request

    request = Request()
    request.itself = request
    weakref.finalize(request, mailbox.release, [0])
    del request
    monkeypatch.setattr(DraftMailbox, "_tenancy_fault", collect_first)
    worker = Worker(lambda: mailbox.release([1]), "releaser")
    worker.join(1.0)
    hangs = worker.is_alive()
    if hangs:
        mailbox._lock.release()  # so that the thread ends
    with suppress(RuntimeError):
        worker.result()
    assert not hangs
    assert mailbox.num_free == 2


def a_stale_call_looks_at_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for a slot that was released stops before it is refused; the next tenant takes and puts it meanwhile."""
    mailbox = filled_mailbox(1)
    assembler = DraftAssembler(FIELDS, mailbox=mailbox)
    stops = Stops(monkeypatch, draft_assembler, "are_slots_good", ("reader",))
    mailbox.release([0])
    reader = Worker(lambda: assembler.assemble_slots([0], [100]), "reader")
    try:
        stops.wait_for("reader")
        assert mailbox.acquire() == 0
        mailbox.put(0, 107, **a_row(70))
    finally:
        stops.go_on()
    with pytest.raises(dg.SlotError, match="slot is 0, which is owned by 107"):
        reader.result()
    assert values_of(assembler.assemble_slots([0], [107])) == [70]


def test_a_stale_call_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a request from another thread's mistake: a call that is about to be refused does not read the slot."""
    a_stale_call_looks_at_a_slot(monkeypatch)


@dataclass
class Board:
    """What the owners of slots tell the readers."""

    held: dict[int, int] = field(default_factory=dict)  # slot -> owner of a row that is there
    ended: set[int] = field(default_factory=set)  # owners that release, or have released, their slot
    written: dict[int, set[int]] = field(default_factory=dict)  # owner -> the values that it puts
    is_over: threading.Event = field(default_factory=threading.Event)


NUM_OWNERS, NUM_TENANCIES, NUM_HELD = 6, 40, 2


def own(mailbox: DraftMailbox, board: Board, number: int) -> None:
    """Tenancies, one after the other and at most three at a time. Every second owner puts its row again."""
    mine = []
    for tenancy in range(NUM_TENANCIES):
        owner = 1 + number * NUM_TENANCIES + tenancy
        slot, value = mailbox.acquire(), 2 * owner
        board.written[owner] = {value, value + 1}
        assert any(put(mailbox, slot, owner, value) for _ in range(100_000))
        board.held[slot] = owner
        mine.append((slot, owner))
        if puts_again(owner):
            put(mailbox, slot, owner, value + 1)
        if len(mine) > NUM_HELD:
            slot, owner = mine.pop(0)
            del board.held[slot]
            board.ended.add(owner)
            mailbox.release([slot])


def put(mailbox: DraftMailbox, slot: int, owner: int, value: int) -> bool:
    """Whether it was put, or refused because somebody reads the slot just now."""
    try:
        mailbox.put(slot, owner, **a_row(value))
    except dg.SlotError as error:
        if error.problems[0].got != "is read by a launch that is not done":
            raise
        return False
    return True


def puts_again(owner: int) -> bool:
    return owner % 2 == 0


def read(mailbox: DraftMailbox, board: Board) -> None:
    """Batches of whatever is held: each row is its owner's, whole; a slot that is refused is one that may be."""
    assembler = DraftAssembler(FIELDS, max_batch_size=NUM_OWNERS * (NUM_HELD + 1), mailbox=mailbox)
    for _ in range(100_000):
        if board.is_over.is_set():
            return
        held = list(board.held.items())
        slots, owners = [slot for slot, _ in held], [owner for _, owner in held]
        try:
            batch = assembler.assemble_slots(slots, owners)
        except dg.SlotError as error:
            for problem in error.problems:
                owner = owners[problem.position]
                assert problem.got.startswith(f"is {slots[problem.position]}, which ")
                assert owner in board.ended or (puts_again(owner) and problem.got.endswith("is not written yet"))
            continue
        for value, owner in zip(values_of(batch), owners, strict=True):
            assert value in board.written[owner]


def test_many_threads_at_one_mailbox(busy_threads: None) -> None:
    """Guards rows from other threads: every batch has its owners' whole rows, or names the slots that have gone."""
    # Released slots rest while a batch reads them: as many again as are held.
    mailbox, board = DraftMailbox(FIELDS, 4 * NUM_OWNERS * (NUM_HELD + 1), pin_memory=False), Board()
    readers = [Worker(lambda: read(mailbox, board), f"reader {i}") for i in range(2)]
    writers = [Worker(lambda number=i: own(mailbox, board, number), f"owner {i}") for i in range(NUM_OWNERS)]
    try:
        for writer in writers:
            writer.result()
    finally:
        board.is_over.set()
    for reader in readers:
        reader.result()
    slots, owners = list(board.held), list(board.held.values())
    assert len(slots) == NUM_OWNERS * NUM_HELD
    batch = DraftAssembler(FIELDS, mailbox=mailbox).assemble_slots(slots, owners)
    assert all(value in board.written[owner] for value, owner in zip(values_of(batch), owners, strict=True))
    mailbox.release(slots)
    assert mailbox.num_free == mailbox.num_slots


class Held:
    """Something that launches read."""


def test_many_threads_hold_memory(busy_threads: None) -> None:
    """Guards memory of one thread's launches from another's: what is not done is kept, whoever looks through it."""
    in_flight, undone, done = InFlight(), FakeMarker(), FakeMarker()
    done.is_done = True
    kept: list[weakref.ref[Held]] = []

    def hold() -> None:
        for i in range(300):
            held = Held()
            if i % 3 == 0:
                kept.append(weakref.ref(held))
            in_flight.hold(undone if i % 3 == 0 else done, held)

    for worker in [Worker(hold) for _ in range(4)]:
        worker.result()
    assert len(kept) == 400
    assert all(reference() is not None for reference in kept)
    undone.is_done = True
    in_flight.hold(DONE, None)
    assert len(in_flight) == 1
    assert all(reference() is None for reference in kept)


def two_threads_hold(in_flight: InFlight) -> None:
    """While one thread looks at the entry before, another comes with one that is not done: it must stay."""
    undone, mine = FakeMarker(), [Held()]
    alive = weakref.ref(mine[0])

    others: list[Worker] = []

    class Slow(FakeMarker):
        def query(self) -> bool:
            if threading.current_thread().name != "other" and not others:
                others.append(Worker(hold, "other"))
                # With the lock it waits for us; without it, it is done in no time.
                others[0].join(0.2)
            return True

    def hold() -> None:
        in_flight.hold(undone, mine.pop())

    in_flight.hold(Slow(), None)
    in_flight.hold(undone, None)
    others.pop().result()
    assert len(in_flight) == 2
    assert alive() is not None


# -- the same without the guards

THREAD_MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Mutation]] = {
    "calls do not count as readers": (
        lambda monkeypatch: slots_are_read(monkeypatch, "launch"),
        Mutation(
            DraftMailbox._is_read,
            "if self._being_read and any([(slots == slot).any() for slots in self._being_read.values()]):",
            "if False:",
        ),
    ),
    "calls do not say what they read": (
        lambda monkeypatch: slots_are_read(monkeypatch, "launch"),
        Mutation(
            DraftMailbox.begin_read,
            "self._being_read[self._num_reads] = slots",
            "self._being_read[self._num_reads] = slots[:0]",
        ),
    ),
    "calls say what they read too late": (
        lambda monkeypatch: slots_are_read(monkeypatch, "are_slots_good"),
        Mutation(
            DraftAssembler._assemble_slots,
            "read, done = mailbox.begin_read(numbers), DONE",
            "read, done = mailbox.begin_read(numbers[:0]), DONE",
        ),
    ),
    "calls end their read before they launch": (
        lambda monkeypatch: slots_are_read(monkeypatch, "launch"),
        Mutation(
            DraftAssembler._assemble_slots,
            "batch = self._launch(",
            "mailbox.end_read(read, DONE); read = mailbox.begin_read(numbers[:0]); batch = self._launch(",
        ),
    ),
    "a slot that is read is put": (
        lambda monkeypatch: slots_are_read(monkeypatch, "launch"),
        Mutation(DraftMailbox._begin_write, "self._is_read(slot)", "False"),
    ),
    "a slot that is read is freed": (
        lambda monkeypatch: slots_are_read(monkeypatch, "launch"),
        Mutation(DraftMailbox._free_if_quiet, "self._is_read(slot)", "False"),
    ),
    "one call's read is another's": (
        lambda monkeypatch: two_threads_read(monkeypatch, "left"),
        Mutation(DraftMailbox.begin_read, "self._num_reads += 1", "self._num_reads = 1"),
    ),
    "a row that is being put counts as written": (
        a_writer_is_read,
        Mutation(DraftMailbox._begin_write, "self._state_of[slot] = HELD", "self._state_of[slot] = WRITTEN"),
    ),
    "what launches read is looked through by two at once": (
        lambda monkeypatch: two_threads_hold(InFlight()),
        Mutation(InFlight.hold, "with self._lock:", "if True:"),
    ),
}


def test_two_threads_hold_memory() -> None:
    """Guards the memory of a launch in flight from a second thread that drops the entry before it."""
    two_threads_hold(InFlight())


@pytest.mark.parametrize("name", THREAD_MUTATIONS)
def test_threads_fail_without_the_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above against ones that cannot fail."""
    scenario, mutation = THREAD_MUTATIONS[name]
    mutation.apply(monkeypatch)
    # A wrong row or number; a refusal that did not come; a read that ended twice.
    with pytest.raises((AssertionError, pytest.fail.Exception, KeyError)):
        scenario(monkeypatch)


# -- ends: everything that owns memory, or looks at another's


@dataclass
class Everything:
    """A little of all that there is, over memory of the library's own."""

    mailbox: Any
    fresh: Any
    fixed: Any
    future_map: Any
    batch: Any  # fresh, of slots, relayed
    rows_batch: Any  # fresh, of separate rows
    fixed_batch: Any
    padded: Any  # no rows
    view: Any  # of the records
    row: Any  # of one record
    draft_input: Any  # resolved out of the future map
    running: Any


def make_everything() -> Everything:
    mailbox = filled_mailbox(NUM_ROWS)
    fresh = DraftAssembler(FIELDS, max_batch_size=NUM_ROWS, mailbox=mailbox)
    fixed = DraftAssembler(FIELDS, max_batch_size=NUM_ROWS, mailbox=mailbox, outputs="fixed")
    future_map = dg.FutureMap(FIELDS, NUM_ROWS + 1)
    indices = torch.arange(1, NUM_ROWS + 1)
    relay = dg.Relay(future_map, indices, indices, indices)
    slots = list(range(NUM_ROWS))
    batch = fresh.assemble_slots(slots, relay=relay)
    rows_batch = fresh.assemble_rows(**{f.name: [a_row(slot + 1)[f.name] for slot in slots] for f in FIELDS})
    fixed_batch = fixed.assemble_slots(slots)
    padded = fresh.assemble_slots([], pad_to=NUM_ROWS)
    draft_input = dg.EagleDraftInput(future_indices=indices)
    running = dg.ScheduleBatch([], "cpu", indices, indices, spec_info=draft_input)
    future_map.resolve(running)
    return Everything(
        mailbox,
        fresh,
        fixed,
        future_map,
        batch,
        rows_batch,
        fixed_batch,
        padded,
        mailbox.view("hidden"),
        mailbox.row("hidden", 3),
        draft_input,
        running,
    )


# What may be left when all else is gone: something over memory of the library's own.
KEPT: dict[str, Callable[[Everything], Any]] = {
    "view of the records": lambda e: e.view,
    "row of a record": lambda e: e.row,
    "view of a view": lambda e: e.view[2:, 5:].view(torch.uint8),
    "array of a view": lambda e: e.view.numpy(),
    "memory of a view": lambda e: memoryview(e.view.numpy()[1]),
    "batch's tensor": lambda e: e.batch.tensors["hidden"],
    "row of a batch": lambda e: e.batch.tensors["hidden"][3],
    "array of a batch": lambda e: e.batch.tensors["hidden"].numpy()[2:],
    "tensor of separate rows": lambda e: e.rows_batch.tensors["hidden"],
    "padding": lambda e: e.padded.tensors["hidden"],
    "fixed outputs": lambda e: e.fixed_batch.tensors["hidden"],
    "future map's buffer": lambda e: e.future_map.buffers["hidden"],
    "resolved rows": lambda e: e.draft_input.rows("hidden"),
}


# Blocks of a cache, which has unused ones beside them.
RECYCLED = ("batch's tensor", "row of a batch", "array of a batch", "padding")


def content(kept: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(kept)).tobytes()


def overwrite_what_is_free() -> list[Any]:
    """Memory that was given back is likely to be given out here, and filled."""
    others = [make_everything() for _ in range(2)]
    for other in others:
        for tensor in (other.view, other.batch.tensors["hidden"], other.future_map.buffers["hidden"]):
            tensor.fill_(-1)
    return others + [torch.full((NUM_ROWS, 8192), -1, dtype=torch.int16) for _ in range(4)]


def leave_everywhere() -> None:
    """In the module, in a local frame of a generator, in a default, in a thread's own variables, as a module."""
    everything = make_everything()

    def frame(local: Any = everything) -> Iterator[Any]:
        yield local, make_everything()

    generator = frame()
    next(generator)
    own = threading.local()
    own.everything = make_everything()
    globals().update(generator=generator, own=own, **vars(make_everything()))
    sys.modules["left"] = make_everything()  # type: ignore[assignment]
    print(True)


def in_a_cycle(everything: Everything) -> list[Any]:
    """All parts of it in one cycle, and by attributes those that can have some.

    A tensor of which there are views cannot be in a cycle by its attributes: torch's collector never finds it.
    """
    cycle: list[Any] = [vars(everything)]
    cycle.append(cycle)
    e = everything
    batches = (*e.batch.tensors.values(), *e.rows_batch.tensors.values(), *e.fixed_batch.tensors.values())
    for part in (e.mailbox, e.fresh, e.fixed, e.future_map, e.draft_input, e.running, e.row, *batches):
        part.cycle = cycle
    return cycle


def leave_in_cycles() -> None:
    in_a_cycle(make_everything())
    gc.collect()
    gc.disable()
    globals()["left"] = [in_a_cycle(make_everything()) for _ in range(2)]
    in_a_cycle(make_everything())  # nobody's
    print(True)


def read_at_exit() -> None:
    """Of each thing a part is left, and read when all else has gone: at once, at exit, and as the module ends."""
    left = []
    for keep in KEPT.values():
        kept = keep(make_everything())
        left.append((kept, content(kept)))
    gc.collect()
    others = overwrite_what_is_free()
    assert all(content(kept) == before for kept, before in left)
    del others

    class Late:
        def __del__(self) -> None:
            # By now `print` has nowhere to print to.
            os.write(1, f"{all(bytes(memoryview(array)) == before for array, before in arrays)}\n".encode())

    arrays = [(np.ascontiguousarray(np.asarray(kept)), before) for kept, before in left]
    globals().update(late=Late(), **vars(make_everything()))
    atexit.register(lambda: print(all(content(kept) == before for kept, before in left), flush=True))


def end_in_a_thread() -> None:
    """The main thread has ended; another still puts, assembles and releases."""
    everything = make_everything()

    def work() -> None:
        threading.main_thread().join(TIMEOUT)
        everything.mailbox.put(3, 103, **a_row(50))
        values = values_of(everything.fresh.assemble_slots([3, 0], [103, 100]))
        everything.mailbox.release([3])
        print(values == [50, 1])

    thread = threading.Thread(target=work)
    globals().update(vars(everything), thread=thread)
    thread.start()


def exit_a_thread() -> None:
    """By sys.exit in a thread, which ends that thread only; and then in the main thread."""

    def work() -> None:
        globals().update(vars(make_everything()))
        sys.exit(4)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(TIMEOUT)
    print(values_of(globals()["batch"]) == list(range(1, 9)))
    sys.exit(3)


def exit_inside_a_launch() -> None:
    """The read of a call that did not come to its end is ended."""
    everything = make_everything()
    globals().update(vars(everything))

    def exits(*_: object) -> None:
        sys.exit(3)

    draft_assembler.launch = exits  # type: ignore[assignment]
    try:
        everything.fresh.assemble_slots([3])
    finally:
        everything.mailbox.put(3, 103, **a_row(50))
        print(value_of({"hidden": everything.view}, 3) == 50)


def end_by_an_exception() -> None:
    everything = make_everything()
    globals().update(vars(everything))
    print(True)
    raise RuntimeError(f"the scheduler ends here, with {everything.batch.num_rows} rows")


def end_with_launches_in_flight() -> None:
    """Launches that never end hold their memory, whose owners are gone, to the last."""
    draft_assembler.launch = lambda descriptor, machine, plan=None: (gather_rows_torch(descriptor), FakeMarker())[1]
    Machine.plan = lambda self, descriptor: None
    machine = Machine(CPU, has_kernel=True, pins=False, zero_copy=True)
    for _ in range(3):
        mailbox = filled_mailbox(NUM_ROWS)
        assembler = DraftAssembler(FIELDS, mailbox=mailbox, machine=machine)
        batch = assembler.assemble_slots([3, 0])
        assembler.assemble_rows(ids=[a_row(1)["ids"]], hidden=[a_row(1)["hidden"]])
        mailbox.release([3, 0])
    print(len(IN_FLIGHT) == 6 and values_of(batch) == [4, 1])


# A scenario, and the return code, the lines printed, and the end of what stands in stderr.
ENDS: dict[str, tuple[Callable[[], None], int, int, str]] = {
    "everywhere": (leave_everywhere, 0, 1, ""),
    "cycles": (leave_in_cycles, 0, 1, ""),
    "read at exit": (read_at_exit, 0, 2, ""),
    "in a thread": (end_in_a_thread, 0, 1, ""),
    "sys.exit in threads": (exit_a_thread, 3, 1, ""),
    "sys.exit inside a launch": (exit_inside_a_launch, 3, 1, ""),
    "exception": (end_by_an_exception, 1, 1, "RuntimeError: the scheduler ends here, with 8 rows\n"),
    "launches in flight": (end_with_launches_in_flight, 0, 1, ""),
}


def run_ends(names: list[str]) -> None:
    """Each in a forked process, all at once; a process then ends as the interpreter ends it. This one, last, too."""
    started = []
    for name in names:
        streams = os.memfd_create("output"), os.memfd_create("errors")
        pid = os.fork()
        if pid == 0:
            os.dup2(streams[0], 1)
            os.dup2(streams[1], 2)
            signal.alarm(int(TIMEOUT))
            ENDS[name][0]()
            return
        started.append((name, pid, streams))
    reports: dict[str, tuple[int, str, str]] = {}
    for name, pid, (output, errors) in started:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        reports[name] = (status, os.pread(output, 1 << 20, 0).decode(), os.pread(errors, 1 << 20, 0).decode())
    print(json.dumps(reports))
    globals().update(vars(make_everything()))


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[int, str, str]]:
    reports: dict[str, tuple[int, str, str]] = json.loads(run_program(__file__, "shutdown", *ENDS))
    return reports


@pytest.mark.parametrize("name", ENDS)
def test_ends(ends: dict[str, tuple[int, str, str]], name: str) -> None:
    """Guards the end of a process: no crash, no warning, nothing said, and right bytes until the last moment."""
    _, expected_status, num_lines, last_words = ENDS[name]
    status, output, errors = ends[name]
    assert (status, output) == (expected_status, "True\n" * num_lines), errors
    if last_words:
        assert errors.startswith("Traceback (most recent call last):\n")
        assert errors.endswith(last_words)
        assert errors.count("\nRuntimeError: ") == 1
    else:
        assert errors == ""


# -- ends: each mapping once, and not before the last that looks at it


@dataclass
class Slabs:
    """The mappings that the library makes: where each lies, and in which order they ended."""

    places: list[tuple[int, int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def map(self, *arguments: Any, **named: Any) -> mmap.mmap:
        mapping = mmap.mmap(*arguments, **named)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        weakref.finalize(mapping, self.ended.append, len(self.places)).atexit = False
        self.places.append((address, address + len(mapping)))
        return mapping

    def of(self, kept: Any) -> int:
        """The number of the mapping in which `kept` lies. (A later one may lie where a former one did.)"""
        address = np.asarray(kept).__array_interface__["data"][0]
        (number,) = [i for i, (start, end) in enumerate(self.places) if start <= address < end and i not in self.ended]
        return number

    def assert_all_ended_once(self) -> None:
        assert len(self.places) > 0
        assert sorted(self.ended) == list(range(len(self.places)))


@pytest.fixture
def slabs(without_collector: None, monkeypatch: pytest.MonkeyPatch) -> Slabs:
    """Without the garbage collector, as the library's own objects need none."""
    made = Slabs()
    monkeypatch.setattr(memory, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": made.map}))
    return made


def keep_a_part(slabs: Slabs, which: str) -> tuple[Any, set[int]]:
    """A part of everything else that is gone, and the numbers of the mappings that are left beside its own."""
    everything = make_everything()
    kept = KEPT[which](everything)
    number, before = slabs.of(kept), content(kept)
    del everything
    assert number not in slabs.ended
    assert content(kept) == before
    return kept, set(range(len(slabs.places))) - set(slabs.ended) - {number}


@pytest.mark.parametrize("which", KEPT)
def test_a_slab_lives_as_long_as_anything_over_it(slabs: Slabs, which: str) -> None:
    """Guards against memory that is unmapped under a view, and against memory that is never given back."""
    kept, others = keep_a_part(slabs, which)
    assert not others or which in RECYCLED
    del kept
    slabs.assert_all_ended_once()


@pytest.mark.parametrize("which", RECYCLED)
def test_a_batch_keeps_no_unused_blocks(slabs: Slabs, which: str) -> None:
    """Guards against one batch for which many times its memory is kept, when its assembler has gone."""
    kept, others = keep_a_part(slabs, which)
    assert len(content(kept)) > 0
    assert others == set()


def test_slabs_end_in_any_order(slabs: Slabs) -> None:
    """Guards against owners that must go in one order: in all of them each mapping ends, once, without a collector."""
    names = ("mailbox", "fresh", "fixed", "future_map", "others")
    for order in itertools.permutations(names):
        parts: dict[str, Any] = dict(vars(make_everything()))
        others = {name: parts.pop(name) for name in list(parts) if name not in names}
        parts["others"] = others
        del others
        for name in order:
            del parts[name]
        slabs.assert_all_ended_once()


def test_batches_end_in_any_order_with_their_assembler(slabs: Slabs) -> None:
    """Guards recycled blocks: those in use when the cache ends are given back by the last of their batches."""
    for order in itertools.permutations(range(4)):
        assembler = DraftAssembler(FIELDS)
        rows = {f.name: [a_row(value)[f.name] for value in range(NUM_ROWS)] for f in FIELDS}
        held: list[Any] = [assembler.assemble_rows(**rows) for _ in range(3)]
        held.append(assembler)
        del assembler
        for i in order:
            held[i] = None
            for batch in held[:3]:
                assert batch is None or values_of(batch) == list(range(NUM_ROWS))
        del batch
        slabs.assert_all_ended_once()


def test_slabs_in_cycles_end_once(slabs: Slabs) -> None:
    """Guards memory in reference cycles: kept until the collector comes, then given back, and not twice."""
    for _ in range(2):
        num_ended = len(slabs.ended)
        in_a_cycle(make_everything())
        assert len(slabs.ended) == num_ended
        gc.collect()
        slabs.assert_all_ended_once()


def launches_hold_their_memory(slabs: Slabs, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """All that a launch reads and writes is dropped by its owners while it is in flight."""
    marker = FakeMarker()

    def launch(descriptor: LaunchDescriptor, machine: Machine, plan: object = None) -> FakeMarker:
        return marker

    monkeypatch.setattr(draft_assembler, "launch", launch)
    machine = Machine(CPU, has_kernel=True, pins=False, zero_copy=True)
    mailbox = filled_mailbox(NUM_ROWS)
    future_map = dg.FutureMap(FIELDS, 4, machine=machine)
    assembler = DraftAssembler(FIELDS, mailbox=mailbox, outputs="fixed", machine=machine)
    indices = torch.arange(1, 3)
    relay = dg.Relay(future_map, indices, indices, indices)
    rows = {f.name: [a_row(value)[f.name] for value in (1, 2)] for f in FIELDS}
    storages = [StorageWeakRef(row.untyped_storage()) for given in rows.values() for row in given]
    if way == "slots":
        assembler.assemble_slots([3, 0], relay=relay)
        read = [mailbox.view("hidden"), mailbox.view("ids")]
    else:
        assembler.assemble_rows(relay=relay, **rows)
        read = []
    tables = [*read, *future_map.buffers.values(), future_map.new_seq_lens_buf, future_map.output_tokens_buf]
    assert assembler._ring is not None
    in_use = {slabs.of(table) for table in [*tables, assembler._ring._buffers[0].slab]}
    in_use |= {slabs.of(table.tensor) for table in assembler._outputs._tables}  # type: ignore[union-attr]
    del tables, read, mailbox, future_map, assembler, relay, rows, indices
    assert in_use.isdisjoint(slabs.ended), "still read or written"
    assert way == "slots" or not any(storage.expired() for storage in storages)
    IN_FLIGHT.hold(DONE, None)
    assert in_use.isdisjoint(slabs.ended), "still read or written"
    marker.is_done = True
    IN_FLIGHT.hold(DONE, None)
    assert all(storage.expired() for storage in storages)
    slabs.assert_all_ended_once()


@pytest.mark.parametrize("way", ["slots", "rows"])
def test_launches_hold_their_memory(slabs: Slabs, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Guards a launch in flight from owners that go before it: its memory ends when it is done, once."""
    launches_hold_their_memory(slabs, monkeypatch, way)


@pytest.mark.parametrize("way", ["slots", "rows"])
def test_launches_hold_their_memory_by_the_guard(slabs: Slabs, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Guards the test above against one that cannot fail."""
    guard = "IN_FLIGHT.hold(done, (descriptor, staging.slab))"
    Mutation(DraftAssembler._launch, guard, "pass").apply(monkeypatch)
    with pytest.raises(AssertionError, match="still read or written"):
        launches_hold_their_memory(slabs, monkeypatch, way)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_at_once()
    else:
        run_ends(sys.argv[2:])
