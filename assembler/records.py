"""Records from the writer's side: a row packed with its tag, and where on the decode node it goes.

The decode node holds a slot (`mailbox.acquire`) and tells the writer its number, the owner and
`mailbox.generation(slot)`. The writer packs the row into a record of its own, the transfer engine writes that record
to `MailboxAddress.record(slot)`, and after the engine's completion message the decode node calls `mailbox.accept`.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from draftgather.errors import LayoutError, Problem, SlotError, raise_problems, shown
from draftgather.fields import TAG_WORDS, Field, RecordLayout
from draftgather.memory import allocate_slab, can_pin
from draftgather.rows import row_problem, to_row

_CPU = torch.device("cpu")
_TAG = struct.Struct(f"={TAG_WORDS}q")
_memmove = ctypes.memmove


class BufferInfo(NamedTuple):
    """The one packed entry with which a transfer engine registers records, and moves whole ones."""

    address: int  # of record 0
    num_bytes: int  # of the slab
    record_bytes: int  # record i lies at address + i * record_bytes


class Move(NamedTuple):
    """The bytes of one field into a record."""

    destination: int
    source: int
    num_bytes: int
    row: torch.Tensor  # keeps the source alive


class RecordMoves:
    """How the rows of one request become moves of bytes into a record."""

    def __init__(self, layout: RecordLayout) -> None:
        self._layout = layout
        self._places = tuple(
            (field, (field.width,), field.dtype, field.row_bytes, offset)
            for field, offset in zip(layout.fields, layout.offsets, strict=True)
        )

    def of(self, record: int, rows: dict[str, object], position: int, what: str) -> tuple[list[Move], list[bool]]:
        """Moves into the record at the address `record`, and of each optional field whether it is there.

        rows: a row a field; consumed. position, what: of the record, for errors ("slot", 3). Nothing is written here.
        """
        moves, present = [], []
        for field, shape, dtype, num_bytes, offset in self._places:
            row = rows.pop(field.name, None)
            if not (
                type(row) is torch.Tensor
                and row.dtype is dtype
                and row.layout is torch.strided
                and not row.is_nested
                and row.shape == shape
                and row.is_cpu
                and row.is_contiguous()
                and not row.is_neg()
                and row.untyped_storage().nbytes() >= row.storage_offset() * dtype.itemsize + num_bytes
            ):
                row = _converted(field, row, position, what)
            if field.optional:
                present.append(row is not None)
            if row is not None:
                moves.append(Move(record + offset, row.data_ptr(), num_bytes, row))
        if rows:
            raise ValueError(f"unknown fields {sorted(rows)}; the records have {[f.name for f in self._layout.fields]}")
        return moves, present


def _converted(field: Field, row: object, position: int, what: str) -> torch.Tensor | None:
    """The row as a contiguous tensor of exactly the field's width and dtype."""
    problem = row_problem(field, row, position, f"{what} {position}", _CPU)
    if problem is not None:
        raise_problems([problem])
    tensor = to_row(field, row)
    return None if tensor is None else tensor.detach()[: field.width].to(field.dtype).resolve_neg().contiguous()


def as_owner(owner: int) -> int:
    """`owner` as a Python integer of 64 bits; ValueError."""
    return _int64(owner, "owner")


def _int64(number: int, name: str) -> int:
    if type(number) is int and -(1 << 63) <= number < 1 << 63:
        return number
    if isinstance(number, (int, np.integer)) and -(1 << 63) <= number < 1 << 63:
        return int(number)
    raise ValueError(f"{name} is {shown(number)}, expected a 64-bit integer")


def _refuse_number(number: object, count: int, what: str) -> None:
    """SlotError unless it is one of `count`."""
    if isinstance(number, (int, np.integer)) and not isinstance(number, bool) and 0 <= number < count:
        return
    raise SlotError([Problem(0, None, what, f"is {shown(number)}", f"an integer from 0 to {count - 1}", SlotError)])


@dataclass(frozen=True, slots=True)
class MailboxAddress:
    """Where a decode node's records lie: what it tells its writer at connection time."""

    address: int  # of record 0
    num_slots: int
    record_bytes: int
    fingerprint: int  # of the field list

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 64:
                raise ValueError(f"{name} is {shown(value)}, expected a positive integer of 64 bits")

    @classmethod
    def of(cls, mailbox: Any) -> MailboxAddress:
        """Of a DraftMailbox."""
        info = mailbox.buffer_info()
        return cls(info.address, mailbox.num_slots, info.record_bytes, mailbox.layout.fingerprint)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MailboxAddress:
        """ValueError where it is not what `to_json` gave."""
        try:
            members = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the address of a mailbox is {shown(text)}, expected JSON") from error
        names = list(cls.__slots__)
        if not isinstance(members, dict) or sorted(members) != sorted(names):
            raise ValueError(f"the address of a mailbox is {shown(members)}, expected the members {names}")
        return cls(**members)

    def record(self, slot: int) -> int:
        """The address of a slot's record; SlotError where the mailbox has no such slot."""
        _refuse_number(slot, self.num_slots, "slot")
        return self.address + int(slot) * self.record_bytes


class RecordWriter:
    """`num_records` records of the writer's own, in one page-aligned slab: what the engine reads.

    A record may be packed again once the engine has said that it no longer reads it: nobody here knows when that is.
    One thread packs a record at a time. Memory belongs to the writer, and lives as long as it.
    """

    def __init__(self, fields: Sequence[Field], num_records: int, pin_memory: bool | None = None) -> None:
        """pin_memory: None pins if the machine can; False touches no CUDA state."""
        self.layout = RecordLayout.of(fields)
        if not isinstance(num_records, int) or isinstance(num_records, bool) or num_records < 1:
            raise ValueError(f"num_records is {num_records!r}, expected an integer of at least 1")
        self.num_records = num_records
        pin = can_pin() if pin_memory is None else pin_memory
        self._slab = allocate_slab(num_records * self.layout.record_bytes, pin)
        self._bytes = memoryview(self._slab.numpy())  # type: ignore[arg-type]
        self._moves = RecordMoves(self.layout)

    def buffer_info(self) -> BufferInfo:
        return BufferInfo(self._slab.data_ptr(), self._slab.numel(), self.layout.record_bytes)

    def check(self, address: MailboxAddress) -> None:
        """LayoutError unless that mailbox has these records: before the first byte moves."""
        self.layout.check_peer(address.fingerprint)
        if address.record_bytes != self.layout.record_bytes:
            raise LayoutError(
                f"the peer's records have {address.record_bytes} bytes, these {self.layout.record_bytes} bytes"
            )

    def address_of(self, index: int) -> int:
        """The address of a record; SlotError where there is none."""
        _refuse_number(index, self.num_records, "record")
        return self._slab.data_ptr() + int(index) * self.layout.record_bytes

    def pack(self, index: int, owner: int, generation: int, **rows: object) -> None:
        """Place a request's row and its tag in record `index`: one copy a field, the tag last.

        owner, generation: as the decode node gave them, 64-bit integers. rows: as for `DraftMailbox.put`.
        Raises SlotError, MissingRowError, RowShapeError, RowDtypeError, RowDeviceError or ValueError before
        anything is written.
        """
        record = self.address_of(index)
        owner, generation = as_owner(owner), _int64(generation, "generation")
        if generation < 1:
            raise ValueError(f"generation is {generation}, expected that of a held slot, at least 1")
        moves, present = self._moves.of(record, rows, int(index), "record")
        tag_at = int(index) * self.layout.record_bytes + self.layout.tag_offset
        # A record that the engine reads too early is torn, not somebody's.
        _TAG.pack_into(self._bytes, tag_at, 0, 0, 0)
        for move in moves:
            _memmove(move.destination, move.source, move.num_bytes)
        _TAG.pack_into(self._bytes, tag_at, owner, generation, self.layout.layout_word(present))
