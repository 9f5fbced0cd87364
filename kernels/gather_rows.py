"""Gather draft rows into batched tensors, and into a future map's rows, in one launch.

`gather_rows` is the Triton kernel's launcher, `gather_rows_torch` its twin on
the CPU. Both take one `LaunchDescriptor` and write the same bytes. Nothing is
checked here: `draftgather.check` has done it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

# One program moves this many bytes of one field's row: 128 threads x 16 bytes.
TILE_BYTES = 2048

# Below this size of a field's rows NumPy's fancy indexing (a temporary, but no
# dispatcher) beats torch.index_select; measured equal at about 8 rows of 14 KB.
_SMALL_GATHER_BYTES = 96 * 1024

# Up to so many integers Python's own min, max and set beat NumPy's reductions and sorts, whose code is
# no longer in cache after the megabytes of the batch before.
_FEW = 512

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


_NUMPY_INTEGERS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("i2"), 4: np.dtype("i4"), 8: np.dtype("i8")}
_NUMPY_NUMBERS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("f4"),
    torch.int32: np.dtype("i4"),
    torch.int64: np.dtype("i8"),
}
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype("u4"), 8: np.dtype("u8")}
_INT64 = np.dtype("i8")


# What passes on the hot path are named tuples: frozen too, and made in a quarter of a frozen dataclass's time.


class RowFormat(NamedTuple):
    """The shape of one field's rows, and the NumPy dtypes by which their bytes are moved."""

    width: int  # elements a row
    dtype: torch.dtype
    item: np.dtype[Any]  # one opaque item of a row's bytes
    number: np.dtype[Any]  # NumPy's own dtype of an element, or an integer as wide

    @staticmethod
    @cache
    def of(width: int, dtype: torch.dtype) -> RowFormat:
        number = _NUMPY_NUMBERS.get(dtype, _NUMPY_INTEGERS[dtype.itemsize])
        return RowFormat(width, dtype, np.dtype((np.void, width * dtype.itemsize)), number)


class RowTable(NamedTuple):
    """A table of rows, and on the CPU the same memory as plain bytes, a row an item.

    NumPy moves such items by memory copies, whatever they hold: no dtype is interpreted.
    """

    tensor: torch.Tensor  # [num_rows, width], elements of a row contiguous
    raw: np.ndarray[Any, Any] | None = None  # [num_rows] one opaque item of row_bytes a row; None off the CPU
    words: torch.Tensor | None = None  # [num_rows, row_words] the rows in their widest words; for large gathers

    @classmethod
    def over(cls, tensor: torch.Tensor) -> RowTable:
        """Wrap `tensor` [num_rows, width]; rows may be strided, the elements of one may not."""
        if not tensor.is_cpu:
            return cls(tensor)
        row_format = RowFormat.of(tensor.shape[1], tensor.dtype)
        divisors = (
            row_format.item.itemsize
            | tensor.data_ptr()
            | int(tensor.storage_offset()) * tensor.element_size()
            | tensor.stride(0) * tensor.element_size()
        )
        word = next(dtype for size, dtype in _WORDS.items() if divisors % size == 0)
        words = tensor.view(word)
        return cls(tensor, words.numpy().view(row_format.item)[:, 0], words)


def empty_table(num_rows: int, row: RowFormat, memory: Any = None) -> RowTable:
    """An uninitialised table [num_rows, row.width] on the CPU, in `memory` (a buffer as large) where one is given."""
    raw = np.empty(num_rows, row.item) if memory is None else np.frombuffer(memory, row.item, num_rows)
    tensor = torch.from_numpy(np.ndarray((num_rows, row.width), row.number, raw))
    return RowTable(tensor if tensor.dtype is row.dtype else tensor.view(row.dtype), raw)


class FieldSource(NamedTuple):
    """Where the rows of one field are: by slot in `pool`, or one by one in `rows`."""

    pool: RowTable | None = None  # slots mode: [num_slots, width]
    # Pointers mode:
    rows: Sequence[torch.Tensor | None] = ()  # num_rows tensors [>= width] of `dtype`; None where absent
    dtype: torch.dtype | None = None
    addresses: list[int] | None = None  # [num_rows] of dense rows; None: not looked at yet
    stacked: RowTable | None = None  # [num_rows, width] of the field's dtype: the rows, read already, for the twin
    addresses_ptr: torch.Tensor | None = None  # [num_rows] int64, for the kernel; 0 where absent
    is_aligned: bool = True  # every address is a multiple of 16


class RelayTarget(NamedTuple):
    """The future map's rows that the launch writes, and what it writes beside the fields."""

    future_indices: torch.Tensor  # [num_rows] int; outside 0..num_slots-1: the row is not relayed
    seq_lens: torch.Tensor | None  # [num_rows] int; None: a stash without a publish
    bonus_tokens: torch.Tensor  # [num_rows] int
    seq_lens_buf: RowTable  # [num_slots, 1] int64
    bonus_tokens_buf: RowTable  # [num_slots, 1] int64
    fields: tuple[RowTable | None, ...]  # [num_slots, width] a field; None: not relayed
    valid: tuple[torch.Tensor | None, ...]  # [num_slots] bool a field; None: always there
    is_in_range: bool = False  # the host has seen that every index is; the twin then does not look again


class LaunchDescriptor(NamedTuple):
    """All that one launch needs."""

    num_rows: int  # b, at least 1
    num_padded: int  # rows of the outputs, at least b; rows b.. become zero
    sources: tuple[FieldSource, ...]  # one a field
    slots: torch.Tensor | None  # [b] int64 or int32; None in pointers mode
    present: tuple[torch.Tensor | None, ...]  # [b] uint8 a field: 0 where the row is absent; None: all there
    outputs: tuple[RowTable | None, ...]  # [num_padded, width] a field; None: relay only
    formats: tuple[RowFormat, ...]  # of outputs and relay, a field
    relay: RelayTarget | None = None


# The batch size is never specialised: one variant a field list and route, whatever the number of rows.
@triton.jit(do_not_specialize=["num_rows", "num_relay_slots"])  # type: ignore[untyped-decorator]
def _gather_rows_kernel(  # type: ignore[no-untyped-def]
    slots_ptr,  # [num_rows] int, None in pointers mode
    source_ptrs,  # a field: pool [num_slots, SLOT_STRIDE], or table of addresses [num_rows] int64
    present_ptrs,  # a field: [num_rows] uint8, or None
    output_ptrs,  # a field: [num_padded, WIDTH], or None
    relay_ptrs,  # a field: [num_relay_slots, WIDTH], or None
    valid_ptrs,  # a field: [num_relay_slots] uint8, or None
    future_indices_ptr,  # [num_rows], or None without a relay
    seq_lens_ptr,  # [num_rows], or None
    bonus_tokens_ptr,  # [num_rows]
    seq_lens_buf_ptr,  # [num_relay_slots] int64
    bonus_tokens_buf_ptr,  # [num_relay_slots] int64
    num_rows,
    num_relay_slots,
    SOURCE_DTYPES: tl.constexpr,  # a field: element type of the separate rows (pointers mode)
    SLOT_STRIDES: tl.constexpr,  # a field: elements from one slot to the next (slots mode)
    WIDTHS: tl.constexpr,  # a field
    BLOCKS: tl.constexpr,  # a field: elements a tile, a power of two
    ALIGNED: tl.constexpr,  # every address is a multiple of 16
):
    # 64 bits before any multiplication: pools pass 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    is_row = row < num_rows

    in_relay = False
    relay_row = row
    if future_indices_ptr is not None:
        relay_row = tl.load(future_indices_ptr + row, mask=is_row, other=-1).to(tl.int64)
        in_relay = (relay_row >= 0) & (relay_row < num_relay_slots)
        if tile == 0:
            if seq_lens_ptr is not None:
                seq_len = tl.load(seq_lens_ptr + row, mask=in_relay, other=0)
                tl.store(seq_lens_buf_ptr + relay_row, seq_len.to(tl.int64), mask=in_relay)
            bonus_token = tl.load(bonus_tokens_ptr + row, mask=in_relay, other=0)
            tl.store(bonus_tokens_buf_ptr + relay_row, bonus_token.to(tl.int64), mask=in_relay)

    slot = row
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row, mask=is_row, other=0).to(tl.int64)

    for f in tl.static_range(len(WIDTHS)):
        start = tile * BLOCKS[f]
        if start < WIDTHS[f]:
            is_present = is_row
            if present_ptrs[f] is not None:
                is_present = tl.load(present_ptrs[f] + row, mask=is_row, other=0) != 0
            columns = start + tl.arange(0, BLOCKS[f])
            # A condition of the whole row goes into the row's end, not into a mask: Triton 3.9's
            # interpreter makes integers of a scalar condition that it spreads over a block.
            source_end = tl.where(is_present, WIDTHS[f], 0)

            if slots_ptr is not None:
                source = source_ptrs[f] + slot * SLOT_STRIDES[f]
            else:
                address = tl.load(source_ptrs[f] + row, mask=is_present, other=0)
                source = address.to(tl.pointer_type(SOURCE_DTYPES[f]), bitcast=True)
                if ALIGNED:
                    source = tl.multiple_of(source, 16)
            # The one load of each element; padding and absent rows touch no memory.
            values = tl.load(source + columns, mask=columns < source_end, other=0)

            if output_ptrs[f] is not None:
                output = output_ptrs[f] + row * WIDTHS[f]
                tl.store(output + columns, values.to(output_ptrs[f].dtype.element_ty), mask=columns < WIDTHS[f])
            if relay_ptrs[f] is not None:
                relay = relay_ptrs[f] + relay_row * WIDTHS[f]
                relay_end = tl.where(in_relay, source_end, 0)
                tl.store(relay + columns, values.to(relay_ptrs[f].dtype.element_ty), mask=columns < relay_end)
                if valid_ptrs[f] is not None:
                    if tile == 0:
                        tl.store(valid_ptrs[f] + relay_row, is_present.to(tl.uint8), mask=in_relay)


_MOVE_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRITON_DTYPES = {
    torch.uint8: tl.uint8, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32,
    torch.int64: tl.int64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32, torch.float64: tl.float64, torch.bool: tl.int1,
}  # fmt: skip
CASTABLE = frozenset(_TRITON_DTYPES)  # dtypes between which rows may be converted


class _FieldArguments(NamedTuple):
    """The kernel's arguments for one field."""

    source_ptr: torch.Tensor  # the pool, or the addresses of the rows
    output_ptr: torch.Tensor | None
    relay_ptr: torch.Tensor | None
    valid_ptr: torch.Tensor | None
    source_dtype: tl.dtype
    slot_stride: int
    width: int
    block: int


def gather_rows(descriptor: LaunchDescriptor) -> None:
    """Launch the kernel once on the current stream of the current device."""
    d, relay = descriptor, descriptor.relay
    if d.num_padded == 0:
        return
    fields = [_field_arguments(d, f) for f in range(len(d.sources))]
    has_outputs = any(field.output_ptr is not None for field in fields)
    # Without fields there is still a bonus token a row to relay.
    num_tiles = max((-(-field.width // field.block) for field in fields), default=1)
    _gather_rows_kernel[(d.num_padded if has_outputs else d.num_rows, num_tiles)](
        _dense(d.slots),
        tuple(field.source_ptr for field in fields),
        d.present,
        tuple(field.output_ptr for field in fields),
        tuple(field.relay_ptr for field in fields),
        tuple(field.valid_ptr for field in fields),
        None if relay is None else _dense(relay.future_indices),
        None if relay is None else _dense(relay.seq_lens),
        None if relay is None else _dense(relay.bonus_tokens),
        None if relay is None else relay.seq_lens_buf.tensor,
        None if relay is None else relay.bonus_tokens_buf.tensor,
        d.num_rows,
        0 if relay is None else len(relay.bonus_tokens_buf.tensor),
        SOURCE_DTYPES=tuple(field.source_dtype for field in fields),
        SLOT_STRIDES=tuple(field.slot_stride for field in fields),
        WIDTHS=tuple(field.width for field in fields),
        BLOCKS=tuple(field.block for field in fields),
        ALIGNED=all(source.is_aligned for source in d.sources),
    )


def _field_arguments(d: LaunchDescriptor, f: int) -> _FieldArguments:
    source, row, output = d.sources[f], d.formats[f], d.outputs[f]
    relay_table = None if d.relay is None else d.relay.fields[f]
    valid = None if d.relay is None else d.relay.valid[f]
    source_dtype = source.dtype if source.pool is None else row.dtype
    assert source_dtype is not None
    # Rows that keep their dtype travel as integers, so that no bit of them is interpreted.
    own_dtype = row.dtype
    if source_dtype is own_dtype:
        source_dtype = own_dtype = _MOVE_AS[own_dtype.itemsize]
    if source.pool is None:
        assert source.addresses_ptr is not None
        source_ptr, slot_stride = source.addresses_ptr, 0
    else:
        source_ptr, slot_stride = source.pool.tensor.view(source_dtype), source.pool.tensor.stride(0)
    return _FieldArguments(
        source_ptr=source_ptr,
        output_ptr=None if output is None else output.tensor.view(own_dtype),
        relay_ptr=None if relay_table is None else relay_table.tensor.view(own_dtype),
        valid_ptr=None if valid is None else valid.view(torch.uint8),
        source_dtype=_TRITON_DTYPES[source_dtype],
        slot_stride=slot_stride,
        width=row.width,
        block=min(TILE_BYTES // source_dtype.itemsize, 1 << (row.width - 1).bit_length()),
    )


def _dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    """The kernel reads vectors by address: a strided one is copied."""
    return None if vector is None else vector.contiguous()


def gather_rows_torch(descriptor: LaunchDescriptor) -> None:
    """The kernel's twin on the CPU: the same descriptor, the same bytes written."""
    d = descriptor
    if d.num_padded == 0:
        return
    slots = None if d.slots is None else d.slots.numpy()
    # Every source is read before anything is relayed: source and relay may share memory.
    gathered = [_gather_field(d, f, slots) for f in range(len(d.sources))]
    if d.relay is not None:
        _relay_rows(
            d, d.relay, [_bytes_of(table, row)[: d.num_rows] for table, row in zip(gathered, d.formats, strict=True)]
        )


def _bytes_of(table: RowTable, row: RowFormat) -> np.ndarray[Any, Any]:
    """The rows as opaque items."""
    if table.raw is not None:
        return table.raw
    items: np.ndarray[Any, Any] = table.tensor.view(_MOVE_AS[row.dtype.itemsize]).numpy().view(row.item)[:, 0]
    return items


def _gather_field(d: LaunchDescriptor, f: int, slots: np.ndarray[Any, Any] | None) -> RowTable:
    """Gather field `f` into its output (or a temporary), and zero what has no row."""
    source, num_rows, present = d.sources[f], d.num_rows, d.present[f]
    output = d.outputs[f] or source.stacked or empty_table(num_rows, d.formats[f])
    if output is source.stacked:
        return output
    assert output.raw is not None
    if source.stacked is not None:
        output.tensor[:num_rows] = source.stacked.tensor
    elif source.pool is None:
        _stack_rows(source, present, output, d.formats[f])
    elif num_rows * output.raw.itemsize <= _SMALL_GATHER_BYTES:
        assert source.pool.raw is not None
        output.raw[:num_rows] = source.pool.raw[slots]
    else:
        words = source.pool.words
        assert words is not None and d.slots is not None
        rows = output.tensor if num_rows == len(output.raw) else output.tensor[:num_rows]
        torch.index_select(words, 0, d.slots, out=rows.view(words.dtype))
    if present is not None:
        output.raw[:num_rows][present.numpy() == 0] = np.zeros((), output.raw.dtype)
    if num_rows < len(output.raw):
        output.raw[num_rows:] = np.zeros((), output.raw.dtype)
    return output


def _stack_rows(source: FieldSource, present: torch.Tensor | None, table: RowTable, row: RowFormat) -> None:
    """Write separate rows of one dtype, at least `row.width` wide, into the first rows of `table`."""
    rows: list[torch.Tensor] = [r for r in source.rows if r is not None]
    output = table.tensor
    if present is not None:
        if rows:
            assert table.raw is not None
            there = RowTable.over(_stacked(rows)[:, : row.width].to(row.dtype).contiguous())
            table.raw[: len(present)][present.numpy() != 0] = there.raw
    elif rows[0].shape[0] == row.width and source.dtype is row.dtype:
        _stacked(rows, output if len(rows) == len(output) else output[: len(rows)])
    else:
        output[: len(rows)] = _stacked(rows)[:, : row.width]


def _stacked(rows: list[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.stack without autograd."""
    try:
        return torch.stack(rows, out=out).detach()
    except RuntimeError:
        # Into `out` torch stacks neither rows that require grad nor such as lie in it; it says so before it writes.
        stacked = torch.stack([r.detach() for r in rows])
        return stacked if out is None else out.copy_(stacked)


def _relay_rows(d: LaunchDescriptor, relay: RelayTarget, gathered: list[np.ndarray[Any, Any]]) -> None:
    """Scatter what was gathered into the relay rows; rows with an index out of range are left out."""
    indices = relay.future_indices.numpy()
    presents = [None if present is None else present.numpy() != 0 for present in d.present]
    vectors = [(relay.bonus_tokens_buf, relay.bonus_tokens.numpy())]
    if relay.seq_lens is not None:
        vectors.append((relay.seq_lens_buf, relay.seq_lens.numpy()))
    assert relay.bonus_tokens_buf.raw is not None
    num_slots = len(relay.bonus_tokens_buf.raw)
    if not (relay.is_in_range or are_in_range(indices, num_slots)):
        keep = (indices >= 0) & (indices < num_slots)
        indices, gathered = indices[keep], [raw[keep] for raw in gathered]
        presents = [None if present is None else present[keep] for present in presents]
        vectors = [(table, numbers[keep]) for table, numbers in vectors]
    for table, numbers in vectors:
        assert table.raw is not None
        table.raw.view(_INT64)[indices] = numbers
    for raw, field_table, valid, present in zip(gathered, relay.fields, relay.valid, presents, strict=True):
        if field_table is None:
            continue
        assert field_table.raw is not None
        if present is None:
            field_table.raw[indices] = raw
        else:
            field_table.raw[indices[present]] = raw[present]
        if valid is not None:
            valid.numpy()[indices] = True if present is None else present


def are_in_range(indices: np.ndarray[Any, Any], end: int) -> bool:
    """Whether all of at least one integer, int64 or int32, lie in 0..end-1."""
    if len(indices) <= _FEW:
        values = indices.tolist()
        return bool(min(values) >= 0 and max(values) < end)
    # As unsigned numbers, negative ones are too large: one pass instead of two.
    return bool(indices.view(_UNSIGNED[indices.itemsize]).max() < end)


def are_distinct(indices: np.ndarray[Any, Any]) -> bool:
    """Whether no integer is there twice."""
    if len(indices) <= _FEW:
        return len(set(indices.tolist())) == len(indices)
    ordered = np.sort(indices)
    return not (ordered[1:] == ordered[:-1]).any()
