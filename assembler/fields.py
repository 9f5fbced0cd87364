"""What one draft row consists of, and how a mailbox record lays it out."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftgather.errors import LayoutError
from draftgather.kernels.row_tables import RowFormat

# A record's tag: owner, generation and layout word, int64 each, at the record's end.
TAG_WORDS = 3
TAG_BYTES = 8 * TAG_WORDS
TAG = struct.Struct(f"={TAG_WORDS}q")
RECORD_ALIGNMENT = 128
FIELD_ALIGNMENT = 16
# The layout word's low byte tells which optional fields the record has; the rest is the fingerprint.
MAX_OPTIONAL_FIELDS = 8

_RESERVED_NAMES = frozenset(
    {"bonus_tokens", "seq_lens", "future_indices", "relay", "pad_to", "batch_outputs", "request_ids", "self"}
    | {"slot", "owner"}
)


_INTEGERS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64}
    | {torch.int64}
)


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a draft row.

    name: keyword of `put` and `assemble_rows`, key of `DraftBatch.tensors`.
    width: elements a row; a row has the shape (width,).
    dtype: of the batch's tensor, any real torch dtype of 1, 2, 4 or 8 bytes.
    optional: a request may come without it (a missing row of any other field is an error).
    allow_cast: convert rows of any other dtype, also where that loses precision.
    exact: refuse rows of any other dtype, also where converting would lose nothing.
    leading: a row may be wider; its first `width` elements count (sglang's metadata rows are 16 wide).
    """

    name: str
    width: int
    dtype: torch.dtype
    optional: bool = False
    allow_cast: bool = False
    leading: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name in _RESERVED_NAMES:
            raise ValueError(f"field name {self.name!r} is not a free identifier")
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise ValueError(f"field {self.name!r}: width is {self.width!r}, expected an integer of at least 1")
        if self.width >= 1 << 31:
            raise ValueError(f"field {self.name!r}: width is {self.width}, expected less than 2**31")
        is_number = isinstance(self.dtype, torch.dtype) and (
            self.dtype in _INTEGERS or (self.dtype.is_floating_point and not str(self.dtype).startswith("torch.float4"))
        )
        if not is_number or self.dtype.itemsize not in (1, 2, 4, 8):
            raise ValueError(f"field {self.name!r}: dtype is {self.dtype!r}, expected a real one of 1, 2, 4 or 8 bytes")
        if self.exact and self.allow_cast:
            raise ValueError(f"field {self.name!r}: exact and allow_cast exclude each other")

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def format(self) -> RowFormat:
        """As the kernel and its twin take it."""
        return RowFormat.of(self.width, self.dtype)


def eagle_fields(
    topk: int,
    hidden_size: int,
    hidden_dtype: torch.dtype = torch.bfloat16,
    num_steps: int = 1,
) -> tuple[Field, ...]:
    """The three fields of an EAGLE draft row.

    hidden_size is the draft model's own width: not the target's, and not the three-fold
    auxiliary states of EAGLE-3. num_steps above 1 (multi-layer EAGLE) multiplies the top-k widths.
    """
    for name, value in (("topk", topk), ("num_steps", num_steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")
    return (
        Field("topk_p", topk * num_steps, torch.float32),
        Field("topk_index", topk * num_steps, torch.int64),
        Field("hidden_states", hidden_size, hidden_dtype),
    )


def check_fields(fields: Sequence[Field]) -> tuple[Field, ...]:
    """`fields` as a tuple of distinct names, at least one."""
    fields = tuple(fields)
    if not fields or not all(isinstance(field, Field) for field in fields):
        raise ValueError(f"expected a sequence of at least one draftgather.Field, got {fields!r}")
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise ValueError(f"field names repeat: {names}")
    return fields


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where each field of one mailbox record lies.

    offsets: byte offset of each field in the record, multiples of 16.
    tag_offset: of the owner, generation and layout words: the record's last 24 bytes, so that
        an engine that writes in order writes them last.
    record_bytes: from one record to the next, a multiple of 128.
    fingerprint: equal on both sides of a transfer if, and only if, the field lists are.
    """

    fields: tuple[Field, ...]
    offsets: tuple[int, ...]
    tag_offset: int
    record_bytes: int
    fingerprint: int

    @classmethod
    def of(cls, fields: Sequence[Field]) -> RecordLayout:
        fields = check_fields(fields)
        if sum(field.optional for field in fields) > MAX_OPTIONAL_FIELDS:
            raise ValueError(f"a record holds at most {MAX_OPTIONAL_FIELDS} optional fields")
        offsets, end = [], 0
        for field in fields:
            offsets.append(end)
            end += -(-field.row_bytes // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
        record_bytes = -(-(end + TAG_BYTES) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        text = ";".join(f"{f.name}:{f.width}:{f.dtype}:{f.optional}" for f in fields) + f";{record_bytes}"
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        # Seven bytes above the presence byte, the top bit clear: a positive int64, never zero.
        fingerprint = max(int.from_bytes(digest, "little") >> 1, 1)
        return cls(fields, tuple(offsets), record_bytes - TAG_BYTES, record_bytes, fingerprint)

    def layout_word(self, present: Sequence[bool]) -> int:
        """The tag's third word: `present` tells of each optional field whether the record has it."""
        word = self.fingerprint << 8
        for i, is_present in enumerate(present):
            word |= is_present << i
        return word

    def check_peer(self, fingerprint: int) -> None:
        """LayoutError unless it is this layout's: both sides of a transfer exchange it before the first byte moves."""
        if fingerprint != self.fingerprint:
            raise LayoutError(
                f"the peer's records have the layout {fingerprint:#x}, these {self.fingerprint:#x} "
                f"({self.record_bytes} bytes: {', '.join(f'{f.name} {f.width} {f.dtype}' for f in self.fields)})"
            )

    @property
    def optional_fields(self) -> tuple[int, ...]:
        """Positions of the optional fields."""
        return tuple(i for i, field in enumerate(self.fields) if field.optional)
