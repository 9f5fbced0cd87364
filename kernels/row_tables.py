"""What passes to the kernel and to its twin: tables of rows, and the descriptor of one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_NUMPY_INTEGERS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("i2"), 4: np.dtype("i4"), 8: np.dtype("i8")}
_NUMPY_NUMBERS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("f4"),
    torch.int32: np.dtype("i4"),
    torch.int64: np.dtype("i8"),
}

# So many slots travel as parameters of the kernel.
FEW_SLOTS = 8


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
    originals: Sequence[torch.Tensor | None] = ()  # what `rows` are copies of: alive until the launch is done


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
    slots: torch.Tensor | None  # [b] int64 or int32, of the pools; None: `few_slots`, or row i is row i of the pool
    present: tuple[torch.Tensor | None, ...]  # [b] uint8 a field: 0 where the row is absent; None: all there
    outputs: tuple[RowTable | None, ...]  # [num_padded, width] a field; None: relay only
    formats: tuple[RowFormat, ...]  # of outputs and relay, a field
    relay: RelayTarget | None = None
    few_slots: tuple[int, ...] = ()  # [b] instead of `slots`, for the kernel's own parameters: at most FEW_SLOTS

    @property
    def by_address(self) -> bool:
        """Whether the rows are separate ones."""
        return bool(self.sources) and self.sources[0].pool is None
