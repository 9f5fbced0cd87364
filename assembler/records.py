"""The writer's side of a transfer: where the mailbox's records lie, and records packed as a mailbox takes them."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Sequence

from draftgather.errors import LayoutError, Problem, SlotError, raise_problems, shown
from draftgather.fields import RECORD_ALIGNMENT, TAG, Field, RecordLayout
from draftgather.mailbox import BufferInfo, DraftMailbox, checked_owner, range_fault
from draftgather.memory import allocate_slab, can_pin
from draftgather.rows import places_of, row_moves

# Called by this module's name, so that a test can look on.
_memmove = ctypes.memmove


@dataclasses.dataclass(frozen=True, slots=True)
class MailboxAddress:
    """Where a mailbox's records lie: what a decode node sends its writers when they connect.

    Its memory must be registered with the transfer engine, and the mailbox alive, for as long as anybody may
    write. ValueError for numbers that no mailbox has.
    """

    address: int  # of record 0, in the decode node's process
    num_slots: int
    record_bytes: int  # record i lies at address + i * record_bytes
    fingerprint: int  # of the field list

    def __post_init__(self) -> None:
        for name, least, end in (
            ("address", 1, 1 << 64),
            ("num_slots", 1, 1 << 63),
            ("record_bytes", RECORD_ALIGNMENT, 1 << 63),
            ("fingerprint", 1, 1 << 55),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < end:
                raise ValueError(f"{name} is {shown(value)}, expected an integer from {least} to {end - 1}")
        if self.address + self.num_slots * self.record_bytes > 1 << 64:
            raise ValueError(f"{self.num_slots} records of {self.record_bytes} bytes pass the end of all addresses")

    @classmethod
    def of(cls, mailbox: DraftMailbox) -> MailboxAddress:
        info = mailbox.buffer_info()
        return cls(info.address, mailbox.num_slots, info.record_bytes, mailbox.layout.fingerprint)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MailboxAddress:
        """What `to_json` gave; ValueError that names what is wrong with any other text."""
        try:
            got = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a mailbox's address is {shown(text)}, expected JSON: {error}") from None
        if not isinstance(got, dict):
            raise ValueError(f"a mailbox's address is {shown(got)}, expected an object")
        names = [field.name for field in dataclasses.fields(cls)]
        if sorted(got) != sorted(names):
            raise ValueError(f"a mailbox's address has the keys {shown(sorted(got))}, expected {names}")
        return cls(**got)

    def record(self, slot: int) -> int:
        """The address of a slot's record, for the engine. SlotError where the mailbox has no such slot."""
        return self.address + _in_range("slot", slot, self.num_slots) * self.record_bytes


class RecordWriter:
    """`num_records` records beside a transfer engine, in one page-aligned slab to be registered with it.

    A prefill node packs a request's row into a record and lets the engine write the whole record to
    `MailboxAddress.record(slot)`. The slot and its generation come from the decode node, which holds
    the slot by `acquire` before it says so.

    Who may pack a record again: whoever started its last transfer, once the engine has said that this is done
    or has failed. Before that the engine may still read the record, and what it writes is neither row; the
    writer does not know of transfers, and does not look. A record is packed by one thread at a time, different
    ones by as many as you like.

    Memory belongs to the writer: it must live, and stay registered, until the engine is done with it.
    """

    def __init__(self, fields: Sequence[Field], num_records: int, pin_memory: bool | None = None) -> None:
        """fields, pin_memory: as the mailbox's."""
        self.layout = RecordLayout.of(fields)
        self.fields = self.layout.fields
        if not isinstance(num_records, int) or isinstance(num_records, bool) or num_records < 1:
            raise ValueError(f"num_records is {num_records!r}, expected an integer of at least 1")
        self.num_records = num_records
        self._slab = allocate_slab(
            num_records * self.layout.record_bytes, can_pin() if pin_memory is None else pin_memory
        )
        self._address = self._slab.data_ptr()
        self._bytes = memoryview(self._slab.numpy())  # type: ignore[arg-type]
        self._places = places_of(self.layout)

    def buffer_info(self) -> BufferInfo:
        return BufferInfo(self._address, self._slab.numel(), self.layout.record_bytes)

    def address_of(self, index: int) -> int:
        """The address of a record of this process, for the engine. SlotError where there is none."""
        return self._address + _in_range("record", index, self.num_records) * self.layout.record_bytes

    def check(self, address: MailboxAddress) -> None:
        """LayoutError unless the mailbox has the records that are packed here: before the first byte moves."""
        self.layout.check_peer(address.fingerprint)
        if address.record_bytes != self.layout.record_bytes:
            raise LayoutError(f"the peer's records have {address.record_bytes} bytes, these {self.layout.record_bytes}")

    def pack(self, index: int, owner: int, generation: int, /, **rows: object) -> None:
        """Place the row of one request in record `index`, for a slot of this generation; nothing is sent.

        owner: any 64-bit integer. generation: `DraftMailbox.generation` of the slot, from the decode node.
        rows: as `DraftMailbox.put` takes them, on the CPU. Each is copied once.
        Raises SlotError, MissingRowError, RowShapeError, RowDtypeError or RowDeviceError before anything is
        written; ValueError for an unknown field, an owner or a generation that no tag can hold.
        """
        record = self.address_of(index)
        owner = checked_owner(owner)
        if range_fault(generation, 1 << 63) is not None or generation < 1:
            raise ValueError(f"generation is {shown(generation)}, expected an integer from 1 to {(1 << 63) - 1}")
        moves, present = row_moves(self._places, record, rows, "record", index)
        tag_at = record - self._address + self.layout.tag_offset
        # No tag stands over a row that is half there: not if an interrupt comes, nor for an engine that reads early.
        TAG.pack_into(self._bytes, tag_at, 0, 0, 0)
        for destination, source, num_bytes, _ in moves:
            _memmove(destination, source, num_bytes)
        TAG.pack_into(self._bytes, tag_at, owner, int(generation), self.layout.layout_word(present))


def _in_range(name: str, number: int, count: int) -> int:
    fault = range_fault(number, count)
    if fault is not None:
        raise_problems([Problem(0, None, name, *fault, SlotError)])
    return int(number)
