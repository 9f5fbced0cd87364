"""The mailbox: the pool of draft records that draftgather owns."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from draftgather.completion import DONE, CompletionMarker
from draftgather.errors import MailboxFullError, Problem, SlotError, raise_problems, shown
from draftgather.fields import TAG, TAG_WORDS, Field, RecordLayout
from draftgather.kernels.row_tables import FieldSource, RowTable
from draftgather.memory import allocate_slab, can_pin
from draftgather.notices import tell_refusal
from draftgather.rows import has_memory, places_of, row_moves
from draftgather.slot_numbers import SlotNumbers
from draftgather.tallies import MAILBOXES, MailboxTally

# What a slot is. A slot that is being freed stays WRITTEN or HELD to nobody: it is DRAINING.
FREE, HELD, WRITTEN, DRAINING = range(4)
_STATE_WORDS = ("free", "not written", "written", "released, with a launch that still reads it")

Int64Array = np.ndarray[Any, np.dtype[np.int64]]

_memmove = ctypes.memmove


def checked_owner(owner: int) -> int:
    """`owner` as an int; ValueError where it is none of 64 bits."""
    if type(owner) is int and -(1 << 63) <= owner < 1 << 63:
        return owner
    if isinstance(owner, (int, np.integer)) and -(1 << 63) <= owner < 1 << 63:
        return int(owner)
    raise ValueError(f"owner is {owner!r}, expected a 64-bit integer")


def range_fault(number: object, count: int) -> tuple[str, str] | None:
    """(got, expected) where `number` is no integer from 0 to `count` - 1; None where it is."""
    if isinstance(number, (int, np.integer)) and not isinstance(number, bool) and 0 <= number < count:
        return None
    return f"is {shown(number)}", f"an integer from 0 to {count - 1}"


def _holds(own: Field, field: Field) -> bool:
    """Whether records with the field `own` have the rows of `field`."""
    is_wide_enough = own.width == field.width or (field.leading and own.width > field.width)
    return is_wide_enough and (own.name, own.dtype, own.optional) == (field.name, field.dtype, field.optional)


class _Reader(NamedTuple):
    """A launch that reads records."""

    number: int
    marker: CompletionMarker
    slots: Int64Array


# Beyond so many launches in flight, those that are done are looked for behind those that are not.
_MANY_READERS = 64


class BufferInfo(NamedTuple):
    """The one packed entry with which a transfer engine registers the mailbox and writes whole records."""

    address: int  # of record 0
    num_bytes: int  # of the slab
    record_bytes: int  # record i lies at address + i * record_bytes


class DraftMailbox:
    """`num_slots` records in one page-aligned slab, pinned where the machine can.

    A slot's life: `acquire` (or a first `put` or `accept` on a number of the caller's own)
    holds it for one tenant; `put` or `accept` makes it *written*, a state of its own, for owner 0
    as for any other; `release` ends the tenancy, and the record is free for the next once the
    last launch that read it is done. Each tenancy of a slot has a generation number, one above
    the last one's, so that `accept` tells a late write of a former tenant with the same owner. A `put` carries no
    generation: one that comes after its own release takes the free slot anew.

    Threads: every method may be called from any thread, beside assemblers of other threads. A `put`
    into a slot that `assemble_slots` or its launch still reads is refused, and a release then frees
    the slot only later, as it does while a `put` still writes there. Finalizers may call `release`.
    Two puts into one slot at once, of one owner, are not told apart: a slot is written by one thread
    at a time.

    Memory belongs to the mailbox, and lives as long as it, its views and the launches that read it.
    """

    def __init__(self, fields: Sequence[Field], num_slots: int, pin_memory: bool | None = None) -> None:
        """pin_memory: None pins if the machine can; False touches no CUDA state (fork safety).

        Where so much cannot be pinned the slab is pageable, with one notice: see `is_pinned`.
        """
        self.layout = RecordLayout.of(fields)
        self.fields = self.layout.fields
        if not isinstance(num_slots, int) or isinstance(num_slots, bool) or num_slots < 1:
            raise ValueError(f"num_slots is {num_slots!r}, expected an integer of at least 1")
        self.num_slots = num_slots
        pin = can_pin() if pin_memory is None else pin_memory
        self._slab = allocate_slab(num_slots * self.layout.record_bytes, pin)
        self.is_pinned = pin and self._slab.is_pinned()
        self._address = self._slab.data_ptr()
        self._record_bytes, self._tag_offset = self.layout.record_bytes, self.layout.tag_offset
        self._places = places_of(self.layout)
        self.optional_fields = self.layout.optional_fields
        self._spans = tuple([(offset, offset + num_bytes) for _, _, _, num_bytes, offset in self._places])
        self._views = {field.name: self._field_view(i) for i, field in enumerate(self.fields)}
        tag_item = self.layout.tag_offset // 8
        record_items = self.layout.record_bytes // 8
        words = self._slab.view(torch.int64).view(num_slots, record_items)
        self._tags: np.ndarray[Any, np.dtype[np.int64]] = words[:, tag_item : tag_item + TAG_WORDS].numpy()

        self._full_word = self.layout.layout_word([True] * len(self.layout.optional_fields))
        self._bytes = memoryview(self._slab.numpy())  # type: ignore[arg-type]

        # Host copies of the tags, contiguous: the hot path never reads inside the records. Each is one
        # memory seen twice: by NumPy for whole batches, by Python for one slot (three times faster).
        self._state_of = bytearray(num_slots)
        self._owner_of = array("q", bytes(8 * num_slots))
        self.states = np.frombuffer(self._state_of, np.int8)
        self.owners = np.frombuffer(self._owner_of, np.int64)
        # A row an optional field: which records have it.
        self.presence = np.zeros((len(self.layout.optional_fields), num_slots), bool)
        self._all_present = [True] * len(self.presence)
        self._generations = [1] * num_slots
        self.slot_numbers = SlotNumbers(num_slots)

        # Reentrant: the garbage collector may run somebody's finalizer, and that a release, inside any call here.
        self._lock = threading.RLock()
        # First in, first out: a freed slot rests for as long as possible before its next tenant.
        self._free = deque(range(num_slots))
        self._is_queued = bytearray(b"\1" * num_slots)
        # Launches that may still read, in their order; and of every slot the number of the last one.
        self._readers: deque[_Reader] = deque()
        self._num_readers = 0
        self._last_reader_of = array("q", bytes(8 * num_slots))
        self._last_reader = np.frombuffer(self._last_reader_of, np.int64)
        self._being_read: dict[int, Int64Array] = {}  # of calls that have not launched yet: their slots
        self._num_reads = 0
        self._being_put: dict[int, int] = {}  # slot -> the puts that move bytes into it just now
        self._draining: deque[int] = deque()
        self.tally = MAILBOXES.enter(self, MailboxTally(self.states))

    # -- what a transfer engine needs

    def buffer_info(self) -> BufferInfo:
        return BufferInfo(self._address, self._slab.numel(), self.layout.record_bytes)

    def view(self, name: str) -> torch.Tensor:
        """[num_slots, width] of one field, strided over the records: for reading. ValueError for another name."""
        if name not in self._views:
            raise ValueError(f"unknown field {name!r}; the mailbox has {list(self._views)}")
        return self._views[name]

    def row(self, name: str, slot: int) -> torch.Tensor | None:
        """[width] of one field of a written slot, in place; None where it came without that optional field."""
        return self.view(name)[self._slot(slot)] if self._has_field(name, slot) else None

    def generation(self, slot: int) -> int:
        """The number of the slot's tenancy (the coming one, of a free slot): a writer puts it into the tag."""
        return self._generations[self._slot(slot)]

    def sources_for(self, fields: Sequence[Field]) -> tuple[FieldSource, ...]:
        """Where an assembler of `fields` reads each of them.

        They are the mailbox's own, in their order; one that says `leading` may be narrower. ValueError otherwise.
        """
        for own, field in zip_longest(self.fields, fields):
            if own is None or field is None or not _holds(own, field):
                raise ValueError(f"the mailbox has the fields {self.fields}, the assembler {tuple(fields)}")
        return tuple(FieldSource(pool=RowTable.over(self._views[f.name][:, : f.width])) for f in fields)

    # -- a slot's life

    def acquire(self) -> int:
        """Hold a free slot; MailboxFullError at once where there is none."""
        try:
            with self._lock:
                return self._take_slot()
        except MailboxFullError as error:
            self._refused("acquire", error)
            raise

    def put(self, slot: int, owner: int, **rows: object) -> None:
        """Write the row of one request that is in this process.

        owner: any 64-bit integer; 0 is one like any other. rows: a keyword a field, a CPU tensor or
        array [width], or a list; an optional field may be left out. A held slot takes its first
        owner; a written one may be written again by its owner only.
        Raises SlotError, MissingRowError, RowShapeError, RowDtypeError or RowDeviceError before
        anything is written; ValueError for an unknown field or an owner of more than 64 bits.
        """
        try:
            self._put(slot, owner, rows)
        except Exception as error:
            self._refused("put", error)
            raise

    def _put(self, slot: int, owner: int, rows: dict[str, object]) -> None:
        if type(slot) is not int or not 0 <= slot < self.num_slots:
            slot = self._slot(slot)
        owner = checked_owner(owner)
        record = self._address + slot * self._record_bytes
        moves, present = row_moves(self._places, record, rows, "slot", slot)
        self._write(slot, owner, moves, present)

    def admit(self, owner: int, rows: Iterable[memoryview]) -> int:
        """`acquire` and `put` in one, for those who know their rows: only their sizes are looked at.

        rows: the bytes of a dense row of each field, in their order; none is absent. Gives the slot.
        """
        try:
            return self._admit(owner, rows)
        except Exception as error:
            self._refused("admit", error)
            raise

    def _admit(self, owner: int, rows: Iterable[memoryview]) -> int:
        owner = checked_owner(owner)
        with self._lock:
            slot = self._take_slot()
            self._being_put[slot] = 1
            generation = self._generations[slot]
        record, records = slot * self._record_bytes, self._bytes
        try:
            for (start, end), row in zip(self._spans, rows, strict=True):
                records[record + start : record + end] = row
        except BaseException:  # another size; an interrupt
            with self._lock:
                self._end_put(slot)
                self._end_tenancy(slot)
            raise
        self._end_write(slot, owner, generation, self._all_present)
        return slot

    def accept(self, slots: Sequence[int], owners: Sequence[int]) -> None:
        """Take over records that a transfer engine wrote, after its completion message.

        Each record's own tag must name the expected owner, the slot's generation and this layout;
        not written, torn, foreign, former generation and wrong owner are told apart in SlotError's
        problems, and then no record is accepted.
        """
        try:
            self._accept(slots, owners)
        except Exception as error:
            self._refused("accept", error)
            raise

    def _accept(self, slots: Sequence[int], owners: Sequence[int]) -> None:
        if len(slots) != len(owners):
            raise ValueError(f"{len(slots)} slots but {len(owners)} owners")
        wanted = list(zip(slots, map(checked_owner, owners), strict=True))
        with self._lock:
            self._drain()
            self._refuse(
                [(slot, range_fault(slot, self.num_slots) or self._tag_fault(slot, owner)) for slot, owner in wanted],
                "distinct slots",
            )
            for slot, owner in wanted:
                bits = int(self._tags[slot, 2]) & 0xFF
                self.presence[:, slot] = [bits >> i & 1 for i in range(len(self.presence))]
                self._owner_of[slot] = owner
                self._state_of[slot] = WRITTEN
            self.tally.accepted += len(wanted)

    def release(self, slots: Iterable[int] | int) -> None:
        """End the tenancy of each slot; it is free once the last launch that read it is done.

        SlotError names slots that nobody holds (a double release), and then none is released.
        """
        try:
            self._release(slots)
        except Exception as error:
            self._refused("release", error)
            raise

    def _release(self, slots: Iterable[int] | int) -> None:
        if type(slots) is int and 0 <= slots < self.num_slots:
            with self._lock:
                if self._state_of[slots] in (HELD, WRITTEN):
                    self.tally.released += 1
                    self._end_tenancy(slots)
                    return
        if isinstance(slots, (torch.Tensor, np.ndarray)):
            if isinstance(slots, torch.Tensor) and not (slots.is_cpu and has_memory(slots)):
                raise TypeError(f"slots are {shown(slots)} without values on the host")
            slots = slots.tolist()
        wanted = [slots] if isinstance(slots, (int, np.integer)) else list(slots)
        with self._lock:
            self._refuse(
                [(slot, range_fault(slot, self.num_slots) or self._tenancy_fault(slot)) for slot in wanted],
                "a held slot, once",
            )
            self.tally.released += len(wanted)
            for slot in wanted:
                self._end_tenancy(int(slot))

    @property
    def num_free(self) -> int:
        """Slots that `acquire` would give."""
        with self._lock:
            self._drain()
            return int(np.count_nonzero(self.states == FREE))

    def late_writes(self, slots: Int64Array, request_ids: Sequence[object] | None) -> list[Problem]:
        """Of written slots, those whose record has another tag by now: a transfer engine wrote there since.

        For debug mode: it reads the records.
        """
        problems = []
        for i, slot in enumerate(slots.tolist()):
            fault = self._tag_fault(slot, self._owner_of[slot])
            if fault is not None:
                request_id = None if request_ids is None else request_ids[i]
                problems.append(Problem(i, request_id, f"the record of slot {slot}", *fault, SlotError))
        return problems

    def begin_read(self, slots: Int64Array) -> int:
        """For the assembler, before it looks at `slots`: nobody puts or frees them until `end_read`.

        Gives the number to end it with. Slots out of range do no harm.
        """
        with self._lock:
            self._num_reads += 1
            self._being_read[self._num_reads] = slots
            return self._num_reads

    def end_read(self, read: int, marker: CompletionMarker) -> None:
        """The slots are read by a launch behind `marker`, and by nothing else any more."""
        with self._lock:
            slots = self._being_read.pop(read)
            if marker is not DONE:
                self._num_readers += 1
                self._last_reader[slots] = self._num_readers
                # A copy: from now on the caller's array may change.
                self._readers.append(_Reader(self._num_readers, marker, slots.copy()))
                self._drop_readers()

    # -- inside

    def _refused(self, call: str, error: Exception) -> None:
        with self._lock:
            self.tally.refusals.count(error)
        tell_refusal(call, error)

    def _field_view(self, i: int) -> torch.Tensor:
        field, offset = self.fields[i], self.layout.offsets[i]
        records = self._slab.view(self.num_slots, self.layout.record_bytes)
        return records[:, offset : offset + field.row_bytes].view(field.dtype)

    def _has_field(self, name: str, slot: int) -> bool:
        optional = [self.fields[f].name for f in self.layout.optional_fields]
        return name not in optional or bool(self.presence[optional.index(name), self._slot(slot)])

    def _slot(self, slot: int) -> int:
        fault = range_fault(slot, self.num_slots)
        if fault is not None:
            raise SlotError([Problem(0, None, "slot", *fault, SlotError)])
        return int(slot)

    def _refuse(self, slots: Sequence[tuple[int, tuple[str, str] | None]], expected: str) -> None:
        """Raise for every slot that has a fault (got, expected), or is there twice."""
        problems, seen = [], set()
        for position, (slot, fault) in enumerate(slots):
            # What is no slot number at all may not even be hashable.
            if fault is None and slot in seen:
                fault = "is given twice", expected
            if fault is None:
                seen.add(slot)
            else:
                problems.append(Problem(position, None, f"slot {shown(slot)}", *fault, SlotError))
        raise_problems(problems)

    def _write(
        self, slot: int, owner: int, moves: Sequence[tuple[int, int, int, object]], present: Sequence[bool]
    ) -> None:
        """Move the bytes in (destination, source, bytes, what keeps the source alive), and show the record."""
        generation = self._begin_write(slot, owner)
        try:
            for destination, source, num_bytes, _ in moves:
                _memmove(destination, source, num_bytes)
        except BaseException:  # an interrupt
            with self._lock:
                self._end_put(slot)
            raise
        self._end_write(slot, owner, generation, present)

    def _begin_write(self, slot: int, owner: int) -> int:
        """Hold the slot while its bytes change, so that nobody gathers it. The tenancy's generation."""
        with self._lock:
            if self._state_of[slot] == DRAINING:
                self._drain()
            state, fault = self._state_of[slot], None
            if state == DRAINING:
                fault = (f"is {_STATE_WORDS[DRAINING]}", "a slot that nobody reads")
            elif state == WRITTEN and self._owner_of[slot] != owner:
                fault = (
                    f"holds the row of owner {self._owner_of[slot]}",
                    f"a slot of owner {owner}, or a released one",
                )
            elif state == WRITTEN and self._is_read(slot):
                fault = ("is read by a launch that is not done", "a slot that nobody reads")
            if fault is None and self._state_of[slot] != state:  # by a finalizer, meanwhile
                fault = ("was released while its row was put", "a slot held until put returns")
            if fault is not None:
                raise SlotError([Problem(0, None, f"slot {slot}", *fault, SlotError)])
            self._state_of[slot] = HELD
            self._being_put[slot] = self._being_put.get(slot, 0) + 1
            return self._generations[slot]

    def _end_write(self, slot: int, owner: int, generation: int, present: Sequence[bool]) -> None:
        """Tag the record, and show it to readers."""
        with self._lock:
            self._end_put(slot)
            if self._generations[slot] != generation:
                fault = "was released while its row was put", "a slot held until put returns"
                raise SlotError([Problem(0, None, f"slot {slot}", *fault, SlotError)])
            word = self._full_word
            if present:
                word = self.layout.layout_word(present)
                self.presence[:, slot] = present
            self._tag(slot, owner, generation, word)
            self._owner_of[slot] = owner
            self._state_of[slot] = WRITTEN
            self.tally.put += 1

    def _end_put(self, slot: int) -> None:
        self._being_put[slot] -= 1
        if not self._being_put[slot]:
            del self._being_put[slot]

    def _end_tenancy(self, slot: int) -> None:
        self._state_of[slot] = DRAINING
        # The tag goes at once: whatever is written here later is not this tenant's.
        self._tag(slot, 0, 0, 0)
        self._generations[slot] += 1
        if self._draining:
            self._drain()
        if not self._free_if_quiet(slot):
            self._draining.append(slot)

    def _tag(self, slot: int, owner: int, generation: int, word: int) -> None:
        tag_at = slot * self._record_bytes + self._tag_offset
        TAG.pack_into(self._bytes, tag_at, owner, generation, word)

    def _is_read(self, slot: int) -> bool:
        """Whether a call or a launch still reads the record."""
        if self._being_read and any([(slots == slot).any() for slots in self._being_read.values()]):
            return True
        if not self._readers or self._last_reader_of[slot] < self._readers[0].number:
            return False
        self._drop_readers()
        # Launches on two streams may end in either order, so all that are left are looked at.
        return any((reader.slots == slot).any() and not reader.marker.query() for reader in list(self._readers)[::-1])

    def _drop_readers(self) -> None:
        """Those that are done: from the front; and where many wait behind one, from all.

        A finalizer may run inside `query`, and come here itself: what was first may be gone by then.
        """
        while self._readers:
            first = self._readers[0]
            if not first.marker.query():
                break
            if self._readers and self._readers[0] is first:
                self._readers.popleft()
        if len(self._readers) > _MANY_READERS:
            self._readers = deque([reader for reader in list(self._readers) if not reader.marker.query()])

    def _tenancy_fault(self, slot: int) -> tuple[str, str] | None:
        state = self._state_of[slot]
        return None if state in (HELD, WRITTEN) else (f"is {_STATE_WORDS[state]}", "a held slot")

    def _tag_fault(self, slot: int, owner: int) -> tuple[str, str] | None:
        """(got, expected) where the record's tag is not that of `owner`'s finished write; None where it is."""
        got_owner, generation, word = (int(value) for value in self._tags[slot])
        state = self._state_of[slot]
        if state == DRAINING:
            return self._tenancy_fault(slot)
        if word == 0:
            torn = bool(got_owner or generation)
            got = "is torn: its tag has no layout word" if torn else "is not written"
            return got, f"a record of owner {owner}"
        if word >> 8 != self.layout.fingerprint or (word & 0xFF) >> len(self.presence):
            return f"has the foreign layout {word >> 8:#x}", f"layout {self.layout.fingerprint:#x}"
        if generation != self._generations[slot]:
            return f"is of generation {generation}", f"generation {self._generations[slot]}"
        if got_owner != owner:
            return f"is owned by {got_owner}", f"owner {owner}"
        if state == WRITTEN and self._owner_of[slot] != owner:
            return f"holds the row of owner {self._owner_of[slot]}", f"a slot of owner {owner}"
        return None

    def _take_slot(self) -> int:
        """`acquire`, with the lock held."""
        slot = self._take_free()
        if slot is None:
            self._drain()
            slot = self._take_free()
        if slot is None:
            raise MailboxFullError(
                f"all {self.num_slots} slots are in use, {len(self._draining)} of them released but still "
                "read by a launch: release slots, make the mailbox larger, or keep your own copy of the row"
            )
        self._state_of[slot] = HELD
        self.tally.acquired += 1
        return slot

    def _take_free(self) -> int | None:
        while self._free:
            slot = self._free.popleft()
            self._is_queued[slot] = False
            # Slots that a caller took by number are still queued, and skipped here.
            if self._state_of[slot] == FREE:
                return slot
        return None

    def _drain(self) -> None:
        """Free the released slots that nobody reads, and no put still writes."""
        for _ in range(len(self._draining)):
            if not self._draining:
                return
            slot = self._draining.popleft()
            if not self._free_if_quiet(slot):
                self._draining.append(slot)

    def _free_if_quiet(self, slot: int) -> bool:
        """Free a released slot, unless a put still writes it or a launch reads it."""
        if slot in self._being_put or self._is_read(slot):
            return False
        if self._state_of[slot] != DRAINING:
            return True  # freed already, by a finalizer inside of these questions
        self._state_of[slot] = FREE
        if not self._is_queued[slot]:
            self._is_queued[slot] = True
            self._free.append(slot)
        return True
