"""One draft row's values: which tensors are taken as they are, which are converted, and where they go in a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draftgather.errors import (
    DraftRowError,
    MissingRowError,
    Problem,
    RowDeviceError,
    RowDtypeError,
    RowShapeError,
    raise_problems,
    shown,
)
from draftgather.fields import Field, RecordLayout
from draftgather.kernels.gather_rows import CASTABLE

# Conversions that keep every value. Anything else must be allowed by the field.
_EXACT_CASTS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.uint8: (torch.int16, torch.int32, torch.int64),
    torch.int8: (torch.int16, torch.int32, torch.int64),
    torch.int16: (torch.int32, torch.int64),
    torch.int32: (torch.int64,),
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def is_convertible(source: torch.dtype, field: Field) -> bool:
    """Whether rows of dtype `source` may be converted to the field's."""
    if source is field.dtype:
        return True
    if field.dtype in _EXACT_CASTS.get(source, ()):
        return not field.exact
    return field.allow_cast and source in CASTABLE and field.dtype in CASTABLE


# How a Problem says so.
NO_STORAGE = "has no storage"


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements of `tensor` are all inside its storage, which may have been freed or shrunk.

    Hot paths look at dense rows by `storage_offset() * itemsize + row_bytes` alone.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if tensor.untyped_storage().device.type != tensor.device.type:
        return False  # a fake tensor: it says it is elsewhere than its memory, which is nowhere
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return True
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + extent) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def row_problem(field: Field, row: object, position: int, request_id: object, device: torch.device) -> Problem | None:
    """What is wrong with a request's row for `field`, or None.

    `row` is a tensor or NumPy array [width], a list or tuple of `width` numbers, or None.
    Tensors may lie on the CPU or on `device`.
    """

    def problem(error: type[DraftRowError], got: str, expected: str) -> Problem:
        return Problem(position, request_id, field.name, got, expected, error)

    if row is None:
        return None if field.optional else problem(MissingRowError, "is missing", _describe(field))
    if isinstance(row, torch.Tensor):
        if row.device.type != "cpu" and row.device != device:
            readable = "cpu" if device.type == "cpu" else f"cpu or {device}"
            return problem(RowDeviceError, f"is on {row.device}", f"a row on {readable}")
        if not has_memory(row):
            return problem(MissingRowError, f"{NO_STORAGE} ({row.layout})", _describe(field))
        shape, dtype = tuple(row.shape), row.dtype
    elif isinstance(row, np.ma.MaskedArray):
        return problem(MissingRowError, "is a masked array", _describe(field))
    elif isinstance(row, np.ndarray):
        try:
            shape, dtype = row.shape, torch.from_numpy(np.empty(0, row.dtype)).dtype
        except (TypeError, ValueError):
            return problem(RowDtypeError, f"has NumPy dtype {row.dtype}", _describe(field))
    elif isinstance(row, (list, tuple)):
        return _list_problem(field, row, problem)
    else:
        return problem(RowDtypeError, f"is a {type(row).__name__}", f"a tensor, array or list of {field.width}")
    is_wide_enough = len(shape) == 1 and shape[0] >= field.width and (field.leading or shape[0] == field.width)
    if not is_wide_enough:
        return problem(RowShapeError, f"has shape {shape}", _describe_shape(field, shape))
    if not is_convertible(dtype, field):
        remedy = "" if field.exact else " (or Field(..., allow_cast=True))"
        return problem(RowDtypeError, f"has dtype {dtype}", f"{field.dtype}{remedy}")
    return None


# Where a record has one field's row: the field, its shape, dtype and bytes, and the byte where it starts.
RowPlace = tuple[Field, tuple[int], torch.dtype, int, int]
# Destination, source, bytes, and what keeps the source alive.
RowMove = tuple[int, int, int, object]

_CPU = torch.device("cpu")


def places_of(layout: RecordLayout) -> tuple[RowPlace, ...]:
    return tuple(
        (field, (field.width,), field.dtype, field.row_bytes, offset)
        for field, offset in zip(layout.fields, layout.offsets, strict=True)
    )


def row_moves(
    places: Sequence[RowPlace], record: int, rows: dict[str, object], kind: str, number: int
) -> tuple[list[RowMove], list[bool]]:
    """How the rows of one request come into the record at address `record`; and of each optional field, if it is there.

    rows: a value a field, taken out of it. An error names `kind` and `number` ("slot", 3): MissingRowError,
    RowShapeError, RowDtypeError or RowDeviceError; ValueError for a name that is no field's.
    """
    moves: list[RowMove] = []
    present = []
    for field, shape, dtype, num_bytes, offset in places:
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
            row = _converted(field, row, kind, number)
        if field.optional:
            present.append(row is not None)
        if row is not None:
            # `row` rides along so that a converted copy lives until it is moved.
            moves.append((record + offset, row.data_ptr(), num_bytes, row))
    if rows:
        raise ValueError(f"unknown fields {sorted(rows)}; a record has {[field.name for field, *_ in places]}")
    return moves, present


def _converted(field: Field, row: object, kind: str, number: int) -> torch.Tensor | None:
    """The row as a contiguous tensor of exactly the field's width and dtype."""
    problem = row_problem(field, row, number, f"{kind} {number}", _CPU)
    if problem is not None:
        raise_problems([problem])
    tensor = to_row(field, row)
    return None if tensor is None else tensor.detach()[: field.width].to(field.dtype).resolve_neg().contiguous()


def to_row(field: Field, row: object) -> torch.Tensor | None:
    """A row that `row_problem` found good, as a tensor with values of the field's dtype or convertible to it."""
    if row is None:
        return None
    if isinstance(row, torch.Tensor):
        return row.as_subclass(torch.Tensor)
    if isinstance(row, np.ndarray):
        # A copy: torch takes neither read-only arrays nor negative strides.
        return torch.from_numpy(np.array(row))
    assert isinstance(row, (list, tuple))
    return _as_tensor(row, field.dtype)


def _list_problem(field: Field, row: Sequence[Any], problem: Any) -> Problem | None:
    if len(row) < field.width or (len(row) > field.width and not field.leading):
        return problem(RowShapeError, f"has shape ({len(row)},)", _describe_shape(field, (len(row),)))  # type: ignore[no-any-return]
    # torch.tensor([1.5], dtype=int64) truncates silently, and so a list's numbers are looked at first.
    if field.dtype is torch.bool:
        kinds: tuple[type, ...] = (bool, np.bool_)
    elif field.dtype.is_floating_point:
        kinds = (float, int, np.floating, np.integer)
    else:
        kinds = (int, np.integer)
    for item in row:
        if not isinstance(item, kinds) or (isinstance(item, bool) and field.dtype is not torch.bool):
            return problem(RowDtypeError, f"holds {shown(item)}", f"numbers of {field.dtype}")  # type: ignore[no-any-return]
    try:
        converted = _as_tensor(row, field.dtype).tolist()
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        return problem(RowDtypeError, f"does not fit ({error})", f"numbers of {field.dtype}")  # type: ignore[no-any-return]
    for item, value in zip(row, converted, strict=True):
        if _is_lost(item, value, field.dtype):
            return problem(RowDtypeError, f"holds {shown(item)}", f"numbers that {field.dtype} can hold")  # type: ignore[no-any-return]
    return None


def _as_tensor(row: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    # torch takes no unsigned number of NumPy's beyond int64.
    return torch.tensor([int(n) if isinstance(n, np.integer) else n for n in row], dtype=dtype, device="cpu")


def _is_lost(item: Any, value: Any, dtype: torch.dtype) -> bool:
    """Whether `item` became another number. Floating point rounds, as it must; integers stay exact."""
    if isinstance(item, (int, np.integer)):
        return bool(value != item)
    if not math.isfinite(item):
        return not (value == item or (math.isnan(item) and math.isnan(value)))
    if (item == 0 and value != 0) or item * value < 0:
        return True
    # Nothing finite becomes infinite; dtypes without an infinity stop at their largest.
    return not math.isfinite(value) or (
        dtype.itemsize == 1 and dtype.is_floating_point and abs(item) > torch.finfo(dtype).max
    )


def _describe(field: Field) -> str:
    return f"a row of {field.width} {field.dtype}"


def _describe_shape(field: Field, shape: tuple[int, ...]) -> str:
    expected = f"({field.width},)" + (" or wider" if field.leading else "")
    if len(shape) == 1 and shape[0] == 3 * field.width:
        return expected + " (three times the width: the target's auxiliary states instead of the draft's own?)"
    if len(shape) == 1 and field.dtype.is_floating_point and field.width >= 64:
        return expected + " (the target model's width instead of the draft's?)"
    return expected
