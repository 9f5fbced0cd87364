"""Random schedules on a device that runs late, against a dull model that copies everything at once.

`Lifetimes` puts, assembles, relays, resolves, releases, aborts, resumes, writes late and reuses slots, while
launches of two streams wait. The same schedules must fail when a guard is taken out: `MUTATIONS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from deferred import DeferredDevice, DeferredMachine, Marker
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from mutations import Mutation

import draftgather as dg
from draftgather import check, describe, draft_assembler, future_map
from draftgather.completion import IN_FLIGHT, InFlight
from draftgather.describe import StagingRing
from draftgather.kernels import gather_rows as kernel
from draftgather.kernels import gather_rows_torch as twin
from draftgather.mailbox import DraftMailbox
from helpers import Bytes, random_row, raw, write_record

FIELDS = (*dg.eagle_fields(topk=2, hidden_size=9), dg.Field("seed", 3, torch.int32, optional=True))
NUM_SLOTS, NUM_INDICES, MAX_ROWS = 3, 10, 5
MACHINES = {
    "slots": {},
    "upload": {"zero_copy": False},
    "staged": {"reads_host_rows": False},
    "staged-upload": {"zero_copy": False, "reads_host_rows": False},
}
RowBytes = dict[str, Bytes | None]


@dataclass
class Tenant:
    """What the model knows of a slot that somebody holds."""

    owner: int
    row: RowBytes | None = None  # None: not written yet


@dataclass
class Expected:
    """A batch that was assembled, and what must be in it once it is done."""

    batch: dg.DraftBatch
    rows: list[RowBytes]
    num_padded: int
    is_fixed: bool


@dataclass
class Resolved:
    """What a resolve must have read."""

    batch: dg.ScheduleBatch
    rows: list[tuple[RowBytes, int, int]]
    done: Marker


@dataclass
class Model:
    """Everything, copied at once."""

    tenants: dict[int, Tenant] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)  # and not seen free yet
    readers: dict[int, list[Marker]] = field(default_factory=dict)
    relayed: dict[int, tuple[RowBytes, int, int]] = field(default_factory=dict)  # in the order of their launches

    def is_read(self, slot: int) -> bool:
        return any(not marker.query() for marker in self.readers.get(slot, ()))

    @property
    def num_free(self) -> int:
        return NUM_SLOTS - len(self.tenants) - sum(self.is_read(slot) for slot in self.released)


class Lifetimes(RuleBasedStateMachine):
    machine_options: dict[str, Any] = {}  # noqa: RUF012
    execute: Callable[[Any], None] = staticmethod(twin.gather_rows_torch)

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        IN_FLIGHT._held.clear()
        self.rng = np.random.default_rng(seed)
        self.device = DeferredDevice(num_streams=2)
        execute = type(self).execute
        self.machine = DeferredMachine.of(self.device, execute=execute, **self.machine_options)
        self.mailbox = dg.DraftMailbox(FIELDS, NUM_SLOTS, pin_memory=False)
        on_device = DeferredMachine.of(self.device, holds_sources=True, execute=execute)
        self.future_map = dg.FutureMap(FIELDS, NUM_INDICES, machine=on_device)
        self.assemblers = {"fresh": self.new_assembler("fresh"), "fixed": self.new_assembler("fixed")}
        self.model = Model()
        self.expected: list[Expected] = []
        self.resolved: list[Resolved] = []
        self.num_owners = 0
        self.dead: list[tuple[int, int, int]] = []  # former tenancies: slot, owner, generation

    def new_assembler(self, outputs: str) -> dg.DraftAssembler:
        return dg.DraftAssembler(
            FIELDS, max_batch_size=MAX_ROWS, mailbox=self.mailbox, outputs=outputs, machine=self.machine
        )

    # -- rows come in

    def new_row(self) -> dict[str, torch.Tensor | None]:
        row: dict[str, torch.Tensor | None] = {f.name: random_row(f, self.rng) for f in FIELDS}
        if self.rng.integers(3) == 0:
            row["seed"] = None
        return row

    def new_owner(self) -> int:
        self.num_owners += 1
        return self.num_owners - 1  # 0 is one like any other

    @rule(by_engine=st.lists(st.booleans(), min_size=1, max_size=NUM_SLOTS))
    def arrivals(self, by_engine: list[bool]) -> None:
        for is_by_engine in by_engine:
            self.arrive(is_by_engine)

    def arrive(self, by_engine: bool) -> None:
        """A request takes a free slot, and its row is put, or written by an engine and accepted."""
        if self.model.num_free == 0:
            with pytest.raises(dg.MailboxFullError):
                self.mailbox.acquire()
            return
        slot, owner, row = self.mailbox.acquire(), self.new_owner(), self.new_row()
        assert slot not in self.model.tenants and not self.model.is_read(slot), "two tenants at once"
        self.model.released.discard(slot)
        self.model.tenants[slot] = Tenant(owner)
        with pytest.raises(dg.SlotError, match="is not written yet"):
            self.assemblers["fresh"].assemble_slots([slot])
        if by_engine:
            self.write_late(slot)
            self.write_badly(slot, owner)
            write_record(self.mailbox, slot, owner, row)
            self.mailbox.accept([slot], [owner])
        else:
            self.mailbox.put(slot, owner, **row)
        self.model.tenants[slot].row = bytes_of(row)

    def write_late(self, slot: int) -> None:
        """Former tenants of the slot write after their end: nothing of theirs is accepted, for anybody."""
        for _, owner, generation in [dead for dead in self.dead if dead[0] == slot][-2:]:
            write_record(self.mailbox, slot, owner, self.new_row(), generation=generation)
            with pytest.raises(dg.SlotError, match="of generation"):
                self.mailbox.accept([slot], [owner])

    def write_badly(self, slot: int, owner: int) -> None:
        """Records that are torn, of another layout or of another owner."""
        for words, refusal in (
            ({"layout_word": 0}, "is torn"),
            ({"layout_word": 77 << 8}, "foreign layout"),
            ({"owner": owner + 1000}, "is owned by"),
        ):
            write_record(self.mailbox, slot, **{"owner": owner, "rows": self.new_row(), **words})
            with pytest.raises(dg.SlotError, match=refusal):
                self.mailbox.accept([slot], [owner])

    @precondition(lambda self: self.written())
    @rule(choice=st.integers(0, 99))
    def put_again(self, choice: int) -> None:
        """The owner's row is put again: refused while a launch reads the old one. Another's put is always refused."""
        slot = self.written()[choice % len(self.written())]
        tenant, row = self.model.tenants[slot], self.new_row()
        with pytest.raises(dg.SlotError, match="holds the row of owner"):
            self.mailbox.put(slot, tenant.owner + 1000, **row)
        if self.model.is_read(slot):
            with pytest.raises(dg.SlotError, match="is read by a launch"):
                self.mailbox.put(slot, tenant.owner, **row)
        else:
            self.mailbox.put(slot, tenant.owner, **row)
            tenant.row = bytes_of(row)

    @precondition(lambda self: self.model.tenants)
    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        """A request ends, or is aborted, whatever still reads its slot."""
        slot = sorted(self.model.tenants)[choice % len(self.model.tenants)]
        tenant = self.model.tenants.pop(slot)
        self.dead.append((slot, tenant.owner, self.mailbox.generation(slot)))
        self.mailbox.release([slot])
        self.model.released.add(slot)
        with pytest.raises(dg.SlotError):
            self.mailbox.release([slot])
        self.look()

    # -- batches go out

    def written(self) -> list[int]:
        return sorted(slot for slot, tenant in self.model.tenants.items() if tenant.row is not None)

    @precondition(lambda self: self.written())
    @rule(
        choices=st.lists(st.integers(0, 99), max_size=MAX_ROWS),
        mode=st.sampled_from(["fresh", "fixed"]),
        stream=st.integers(0, 1),
        relays=st.booleans(),
        only_relays=st.booleans(),
        pads=st.booleans(),
    )
    def assemble_slots(
        self, choices: list[int], mode: str, stream: int, relays: bool, only_relays: bool, pads: bool
    ) -> None:
        written = self.written()
        slots = [written[choice % len(written)] for choice in choices]
        owners = [self.model.tenants[slot].owner for slot in slots]
        rows = [self.model.tenants[slot].row for slot in slots]
        call = self.call(rows, mode, stream, relays, only_relays, pads)
        batch = self.assemblers[mode].assemble_slots(slots, owners, **call)
        self.expect(batch, rows, mode, call)
        if batch.route == "slots":
            for slot in slots:
                self.model.readers.setdefault(slot, []).append(batch.done)

    @precondition(lambda self: self.written())
    @rule(choice=st.integers(0, 99))
    def read_by_two_streams(self, choice: int) -> None:
        """The later launch ends first: the slot is still read by the earlier one."""
        for stream in (0, 1):
            self.assemble_slots([choice], "fresh", stream, False, False, False)
        self.run(1, self.device.num_pending(1))
        self.put_again(choice)

    @rule(
        num_rows=st.integers(0, MAX_ROWS),
        mode=st.sampled_from(["fresh", "fixed"]),
        stream=st.integers(0, 1),
        relays=st.booleans(),
        only_relays=st.booleans(),
        pads=st.booleans(),
        feeds_back=st.booleans(),
    )
    def assemble_rows(
        self, num_rows: int, mode: str, stream: int, relays: bool, only_relays: bool, pads: bool, feeds_back: bool
    ) -> None:
        """Separate rows, dropped by the caller when the call returns; or the batch before them, in reverse."""
        rows = [self.new_row() for _ in range(num_rows)]
        last = next((e for e in reversed(self.expected) if e.is_fixed), None)
        if feeds_back and self.can_feed_back(last):
            assert last is not None
            mode, stream, relays = "fixed", 0, False
            rows = [{name: t[i] for name, t in last.batch.tensors.items()} for i in reversed(range(last.num_padded))]
            expected = [{"seed": None} | row for row in padded(last)[::-1]]
        else:
            expected = [bytes_of(row) for row in rows]
        call = self.call(expected, mode, stream, relays, only_relays, pads)
        lists = {f.name: [row.get(f.name) for row in rows] for f in FIELDS}
        batch = self.assemblers[mode].assemble_rows(**lists, **call)
        self.expect(batch, expected, mode, call)

    def can_feed_back(self, last: Expected | None) -> bool:
        """The fixed outputs are written by stream 0 alone, and the device reads them in its order: no host copy."""
        return bool(
            last and last.num_padded and last.batch.tensors and self.machine.reads_host_rows and last is self.last_fixed
        )

    def call(
        self, rows: list[RowBytes], mode: str, stream: int, relays: bool, only_relays: bool, pads: bool
    ) -> dict[str, Any]:
        """The keywords of one call. Fixed outputs and the future map belong to stream 0, as the caller orders it."""
        relays = relays and len(rows) > 0
        self.device.current = 0 if relays or mode == "fixed" else stream
        call: dict[str, Any] = {"pad_to": MAX_ROWS if pads else None}
        if relays:
            indices = self.rng.permutation(np.arange(1, NUM_INDICES))[: len(rows)].tolist()
            numbers = [(int(self.rng.integers(1, 9999)), int(self.rng.integers(1, 9999))) for _ in rows]
            lengths, tokens = zip(*numbers, strict=True)
            call |= {"relay": relay_of(self.future_map, indices, lengths, tokens), "batch_outputs": not only_relays}
            for index, row, (length, token) in zip(indices, rows, numbers, strict=True):
                self.model.relayed[index] = (row, length, token)
        return call

    last_fixed: Expected | None = None

    def expect(self, batch: dg.DraftBatch, rows: list[RowBytes], mode: str, call: dict[str, Any]) -> None:
        expected = Expected(batch, rows, call["pad_to"] or len(rows), mode == "fixed")
        if mode == "fixed":
            # The next call overwrites the outputs: what the former one held is looked at no more.
            self.expected = [e for e in self.expected if not e.is_fixed]
            self.last_fixed = expected
        self.expected.append(expected)

    @precondition(lambda self: self.model.relayed)
    @rule(choices=st.lists(st.integers(0, 99), min_size=1, max_size=MAX_ROWS), stashes=st.booleans())
    def resolve(self, choices: list[int], stashes: bool) -> None:
        """The next iteration reads the future map, and perhaps stashes what it has read again."""
        known = sorted(self.model.relayed)
        indices = sorted({known[choice % len(known)] for choice in choices})
        self.device.current = 0
        vector = torch.tensor(indices)
        batch = dg.ScheduleBatch([], "cpu", vector, vector, spec_info=dg.EagleDraftInput(future_indices=vector))
        self.future_map.resolve(batch)
        self.resolved.append(Resolved(batch, [self.model.relayed[i] for i in indices], self.device.mark()))
        if stashes:
            self.future_map.stash(vector, batch.spec_info)

    @rule(num_rows=st.integers(1, MAX_ROWS))
    def publish_and_stash(self, num_rows: int) -> None:
        """The two-call mode, of an algorithm without the optional field."""
        self.device.drain()
        self.device.current = 0
        rows = [self.new_row() | {"seed": None} for _ in range(num_rows)]
        indices = torch.arange(1, num_rows + 1)
        tensors = {f.name: torch.stack([row[f.name] for row in rows]) for f in FIELDS[:3]}
        self.future_map.publish(indices, 10 * indices)
        self.future_map.stash(indices, dg.EagleDraftInput(bonus_tokens=indices + 5, **tensors))
        for i, row in zip(indices.tolist(), rows, strict=True):
            self.model.relayed[i] = (bytes_of(row), 10 * i, i + 5)

    # -- what is refused

    @precondition(lambda self: self.written())
    @rule(choice=st.integers(0, 99))
    def bad_calls(self, choice: int) -> None:
        """Refused, and nothing queued: what was expected stays so."""
        slot = self.written()[choice % len(self.written())]
        owner, before = self.model.tenants[slot].owner, self.device.num_launches
        assembler = self.assemblers["fixed"]
        with pytest.raises(dg.SlotError, match="which is owned by"):
            assembler.assemble_slots([slot], [owner + 1000])
        with pytest.raises(dg.SlotError, match=r"slot is 3, expected 0 to 2|slot is -1"):
            assembler.assemble_slots([slot, [NUM_SLOTS, -1][choice % 2]])
        for released in self.model.released - self.model.tenants.keys():
            with pytest.raises(dg.SlotError, match=r"which is released|which is free"):
                assembler.assemble_slots([released])
        with pytest.raises(dg.RelayError, match="one would overwrite the other"):
            assembler.assemble_slots([slot, slot], relay=relay_of(self.future_map, [3, 3], [1, 1], [1, 1]))
        with pytest.raises(dg.RelayError, match="out of range"):
            assembler.assemble_slots([slot], relay=relay_of(self.future_map, [NUM_INDICES], [1], [1]))
        with pytest.raises(dg.CapacityError):
            assembler.assemble_slots([slot] * (MAX_ROWS + 1))
        assert self.device.num_launches == before

    # -- time goes on

    @rule(stream=st.integers(0, 1), count=st.integers(1, 4))
    def run(self, stream: int, count: int) -> None:
        for _ in range(count):
            self.device.step(stream)
        self.look()

    @rule(mode=st.sampled_from(["fresh", "fixed"]))
    def drop_assembler(self, mode: str) -> None:
        """Its launches may still be in flight. Fixed outputs live on with the batch that has them."""
        assume(self.rng.integers(2))
        self.assemblers[mode] = self.new_assembler(mode)
        if mode == "fixed":
            self.last_fixed = None

    def look(self) -> None:
        """Compare all that is done with the model."""
        assert self.mailbox.num_free == self.model.num_free
        self.model.released = {slot for slot in self.model.released if self.model.is_read(slot)}
        for expected in self.expected:
            if expected.batch.done.query():
                assert_expected(expected)
        for resolved in [r for r in self.resolved if r.done.query()]:
            assert_resolved(resolved)
            self.resolved.remove(resolved)

    def teardown(self) -> None:
        if not hasattr(self, "device") or sys.exc_info()[0] is not None:
            return
        self.device.drain()
        self.look()
        self.mailbox.release(list(self.model.tenants))
        assert self.mailbox.num_free == NUM_SLOTS
        IN_FLIGHT.hold(self.device.mark(), None)
        assert len(IN_FLIGHT) <= 1, "memory is held that no launch reads"


def bytes_of(row: dict[str, torch.Tensor | None]) -> RowBytes:
    return {f.name: None if row.get(f.name) is None else raw(row[f.name]) for f in FIELDS}


def padded(expected: Expected) -> list[RowBytes]:
    """The rows of the batch's tensors, padding included."""
    zeros: RowBytes = {f.name: np.zeros(f.row_bytes, np.uint8) for f in FIELDS}
    rows = [*expected.rows, *[zeros] * (expected.num_padded - len(expected.rows))]
    return [{name: row[name] for name in expected.batch.tensors} for row in rows]


def assert_expected(expected: Expected) -> None:
    for name, tensor in expected.batch.tensors.items():
        rows = [row[name] for row in padded(expected)]
        assert len(tensor) == len(rows)
        if rows:
            assert (raw(tensor) == np.stack(rows)).all(), f"{name} of a batch of {len(expected.rows)} rows"


def assert_resolved(resolved: Resolved) -> None:
    draft_input = resolved.batch.spec_info
    for i, (row, length, token) in enumerate(resolved.rows):
        assert (int(resolved.batch.seq_lens[i]), int(draft_input.bonus_tokens[i])) == (length, token)
        assert bool(draft_input.valid["seed"][i]) == (row["seed"] is not None), "whose seed is it?"
        for name, expected in row.items():
            if expected is not None:
                assert (raw(draft_input.rows(name)[i]) == expected).all(), name


def relay_of(
    target: dg.FutureMap, indices: list[int], lengths: tuple[int, ...] | list[int], tokens: tuple[int, ...] | list[int]
) -> dg.Relay:
    return dg.Relay(target, torch.tensor(indices), torch.tensor(lengths), torch.tensor(tokens))


def run_schedules(which: str, max_examples: int, steps: int, execute: Any = None) -> None:
    options = {"machine_options": MACHINES[which]}
    if execute is not None:
        options["execute"] = staticmethod(execute)
    machine = type("Lifetimes", (Lifetimes,), options)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            # A failure is read, not shrunk: by hand, with more phases, where one comes up.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of this size have both kinds: slots by parameters, and by the staging ring."""
    monkeypatch.setattr(describe, "FEW_SLOTS", 2)


@pytest.mark.parametrize("which", MACHINES)
def test_random_schedules(which: str) -> None:
    """Guards every row against whatever else goes on: reuse, late writes, aborts, other streams."""
    run_schedules(which, max_examples=60, steps=40)


@pytest.mark.parametrize("which", MACHINES)
def test_random_schedules_of_the_kernel(which: str) -> None:
    """The same with the kernel itself, under Triton's interpreter."""
    run_schedules(which, max_examples=3, steps=25, execute=kernel.gather_rows)


# Each with the machine on which it shows.
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "a staging buffer is filled while a launch reads it": (
        "staged",
        Mutation(StagingRing.take, "if buffer.marker.query():", "if True:"),
    ),
    "a staging buffer is filled while it is uploaded": (
        "staged-upload",
        Mutation(StagingRing.take, "if buffer.marker.query():", "if True:"),
    ),
    "a slot is freed while a launch reads it": (
        "slots",
        Mutation(DraftMailbox._free_if_quiet, "or self._is_read(slot):", "or False:"),
    ),
    "a row is put over one that a launch reads": (
        "slots",
        Mutation(DraftMailbox._begin_write, "elif state == WRITTEN and self._is_read(slot):", "elif False:"),
    ),
    "only the last of two streams' readers counts": (
        "slots",
        Mutation(DraftMailbox._is_read, "list(self._readers)[::-1]", "list(self._readers)[-1:]"),
    ),
    "another owner puts into a written slot": (
        "slots",
        Mutation(DraftMailbox._begin_write, "elif state == WRITTEN and self._owner_of[slot] != owner:", "elif False:"),
    ),
    "another owner's row is assembled": (
        "slots",
        Mutation(check.are_slots_good, "owners is None or", "True or"),
    ),
    "an unwritten slot is assembled": (
        "slots",
        Mutation(check.are_slots_good, "(mailbox.states[slots] != WRITTEN).any()", "False"),
    ),
    "a slot out of range is assembled": (
        "slots",
        Mutation(check.are_slots_good, "if not mailbox.slot_numbers.holds(slots):", "if False:"),
    ),
    "a former tenant's record is accepted": (
        "slots",
        Mutation(DraftMailbox._tag_fault, "if generation != self._generations[slot]:", "if False:"),
    ),
    "another owner's record is accepted": (
        "slots",
        Mutation(DraftMailbox._tag_fault, "if got_owner != owner:", "if False:"),
    ),
    "a torn record is accepted": (
        "slots",
        Mutation(DraftMailbox._tag_fault, "if word == 0:", "if False:"),
    ),
    "a record of another layout is accepted": (
        "slots",
        Mutation(DraftMailbox._tag_fault, "if word >> 8 != self.layout.fingerprint or", "if False and"),
    ),
    "a generation is used again": (
        "slots",
        Mutation(DraftMailbox._end_tenancy, "self._generations[slot] += 1", "pass"),
    ),
    "what a launch reads is let go of": (
        "slots",
        Mutation(InFlight.hold, "self._held.append((marker, held))", "pass"),
    ),
    "what an assembler's launches read ends with it": (
        "staged",
        Mutation(draft_assembler.DraftAssembler._launch, "IN_FLIGHT.hold(done, (descriptor, staging.slab))", "pass"),
    ),
    "a former owner's optional field stays valid": (
        "slots",
        Mutation(
            future_map.FutureMap.tables_for,
            "tuple(self.valid.get(f.name) for f in fields)",
            "(None,) * len(fields)",
        ),
    ),
    "what was resolved as invalid is stashed as valid": (
        "slots",
        Mutation(future_map.FutureMap._stash, "if tensor is not None and flags is not None:", "if False:"),
    ),
    "two rows are relayed to one index": (
        "slots",
        Mutation(check.check_future_indices, "not slot_numbers.are_distinct(indices):", "False:"),
    ),
    "an index out of range is relayed": (
        "slots",
        Mutation(check.check_future_indices, "if not slot_numbers.holds(indices):", "if False:"),
    ),
    "a batch larger than the buffers": (
        "slots",
        Mutation(check.check_batch_size, "if num_padded > max_batch_size:", "if False:"),
    ),
    "padding keeps what was there": (
        "slots",
        Mutation(twin._gather_field, "if num_rows < len(output.raw):", "if False:"),
    ),
    "an empty batch's padding keeps what was there": (
        "slots",
        Mutation(draft_assembler.DraftAssembler._empty, "self._machine.zero(list(tensors.values()))", "DONE"),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_schedules_fail_without_the_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above against one that cannot fail."""
    which, mutation = MUTATIONS[name]
    mutation.apply(monkeypatch)
    # A wrong row, an error that did not come, or an index that should have been refused.
    with pytest.raises((AssertionError, pytest.fail.Exception, IndexError, ValueError)):
        run_schedules(which, max_examples=300, steps=40)


def test_rows_in_the_outputs_are_read_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps no order among rows, so what a batch reads of its own outputs is copied before."""
    guard = "any([((addresses < end) & (ends > start)).any() for start, end in written])"
    Mutation(describe._addressed, guard, "False").apply(monkeypatch)
    with pytest.raises(AssertionError):
        run_schedules("slots", max_examples=30, steps=40, execute=kernel.gather_rows)
