"""Step 1 of a row's path: every row against the field list, before anything is written.

The quick checks here accept what is plainly right. Whatever they do not accept goes to the
thorough ones, which either find it right after all or name every problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from draftgather.errors import (
    CapacityError,
    MissingRowError,
    Problem,
    RelayError,
    RowValueError,
    SlotError,
    shown,
)
from draftgather.fields import Field
from draftgather.kernels.row_tables import FieldSource, RowTable
from draftgather.mailbox import DRAINING, FREE, HELD, WRITTEN, DraftMailbox, Int64Array
from draftgather.memory import CACHED_FROM_BYTES, HostBlockCache
from draftgather.rows import has_memory, row_problem, to_row
from draftgather.slot_numbers import SlotNumbers

if TYPE_CHECKING:
    from draftgather.future_map import Relay

_CPU = torch.device("cpu")
_BOOLS = frozenset({bool, np.bool_})
_INT = {int}


def as_int64(values: object, what: str) -> Int64Array:
    """[n] int64 host array of a list, tuple, NumPy array or CPU tensor of integers."""
    if type(values) is np.ndarray and values.dtype == np.int64 and values.strides == (8,) and values.flags.carray:
        return values
    if type(values) is list and set(map(type, values)) == _INT:
        with suppress(OverflowError):  # told below
            return np.array(values, np.int64)
    if isinstance(values, torch.Tensor):
        if not values.is_cpu:
            raise TypeError(f"{what} are on {values.device}, expected host values: reading them would stall the host")
        if not has_memory(values):
            raise TypeError(f"{what} have no storage ({values.layout})")
        values = values.detach().resolve_conj().resolve_neg().numpy()
    elif isinstance(values, (list, tuple)) and any([_is_bool(value) for value in values]):
        raise TypeError(f"{what} hold a bool, expected integers")
    elif isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{what} are a masked array, expected integers")
    try:
        array = np.asarray(values)
    except RuntimeError as error:  # a list of tensors that have no plain values
        raise TypeError(f"{what} hold tensors without values on the host, expected integers") from error
    if array.size == 0 and array.ndim <= 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{what} have shape {array.shape} and dtype {array.dtype}, expected one integer a row")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise TypeError(f"{what} hold {array.max()}, expected 64-bit signed integers")
    return np.array(array, np.int64)


def _is_bool(value: object) -> bool:
    return type(value) in _BOOLS or getattr(value, "dtype", None) in (torch.bool, np.bool_)


def check_batch_size(num_rows: int, pad_to: int | None, max_batch_size: int) -> int:
    """The number of rows of the outputs."""
    if pad_to is not None and (not isinstance(pad_to, int) or isinstance(pad_to, bool) or pad_to < num_rows):
        raise ValueError(f"pad_to is {pad_to!r}, expected an integer of at least the {num_rows} rows")
    num_padded = num_rows if pad_to is None else pad_to
    if num_padded > max_batch_size:
        raise CapacityError(f"a batch of {num_padded} rows, but the assembler has max_batch_size={max_batch_size}")
    return num_padded


def check_request_ids(request_ids: Sequence[object] | None, num_rows: int) -> None:
    if request_ids is None:
        return
    if isinstance(request_ids, (Mapping, Set)):
        raise TypeError(f"request_ids are a {type(request_ids).__name__}, expected a sequence")
    if len(request_ids) != num_rows:
        raise ValueError(f"{len(request_ids)} request ids for {num_rows} rows")


# -- rows in the mailbox


def as_owners(owners: object, num_rows: int) -> Int64Array | None:
    """The expected owners [num_rows], or None."""
    if owners is None:
        return None
    tags = as_int64(owners, "owners")
    if len(tags) != num_rows:
        raise ValueError(f"{num_rows} slots but {len(tags)} owners")
    return tags


def are_slots_good(mailbox: DraftMailbox, slots: Int64Array, owners: Int64Array | None) -> bool:
    """Whether every slot is in range, written and of its owner."""
    if len(slots) == 0:
        return True
    if not mailbox.slot_numbers.holds(slots):
        return False
    if mailbox.states[slots].tobytes() != _ALL_WRITTEN[: len(slots)] and (mailbox.states[slots] != WRITTEN).any():
        return False
    return owners is None or mailbox.owners[slots].tobytes() == owners.tobytes()


_ALL_WRITTEN = bytes([WRITTEN]) * 1024


def slot_problems(
    mailbox: DraftMailbox, slots: Int64Array, owners: Int64Array | None, request_ids: Sequence[object] | None
) -> list[Problem]:
    """Every slot that is out of range, not written or of another owner."""
    problems = []
    for i, slot in enumerate(slots.tolist()):
        fault = _slot_fault(mailbox, slot, None if owners is None else int(owners[i]))
        if fault is not None:
            request_id = None if request_ids is None else request_ids[i]
            problems.append(Problem(i, request_id, "slot" if fault[0].startswith("is ") else "", *fault, SlotError))
    return problems


def _slot_fault(mailbox: DraftMailbox, slot: int, owner: int | None) -> tuple[str, str] | None:
    if not 0 <= slot < mailbox.num_slots:
        return f"is {slot}", f"0 to {mailbox.num_slots - 1}"
    state = mailbox.states[slot]
    if state == FREE:
        return f"is {slot}, which is free: nothing was written since it was released", "a written slot"
    if state == DRAINING:
        return f"is {slot}, which is released", "a written slot"
    if state == HELD:
        return f"is {slot}, which is not written yet", "a written slot"
    if owner is not None and mailbox.owners[slot] != owner:
        return f"is {slot}, which is owned by {mailbox.owners[slot]}", f"owner {owner}"
    return None


# -- separate rows


def as_row_lists(rows: Mapping[str, Iterable[object] | None]) -> dict[str, Sequence[object] | None]:
    """Each field's rows as a list: a sequence may make its rows at each access, and is asked for them once."""
    lists: dict[str, Sequence[object] | None] = {}
    for name, given in rows.items():
        is_list = given is None or type(given) is list or type(given) is tuple
        if not is_list and not isinstance(given, Iterable):
            raise TypeError(f"{name} is a {type(given).__name__}, expected a list of rows")
        try:
            lists[name] = given if is_list else list(given)  # type: ignore[arg-type,assignment]
        except RuntimeError as error:  # a tensor without rows on the host
            raise TypeError(f"{name} is {shown(given)} that cannot be taken apart into rows") from error
    return lists


def check_row_lists(fields: Sequence[Field], rows: Mapping[str, Sequence[object] | None]) -> int:
    """The number of rows b, the same in every field's list. A list that is left out is one of missing rows."""
    if len(rows) == len(fields) and all([field.name in rows for field in fields]):
        lengths = {-1 if given is None else len(given) for given in rows.values()}
        if len(lengths) == 1 and -1 not in lengths:
            return lengths.pop()
    counts = {}
    for field in fields:
        given = rows.get(field.name)
        if given is not None:
            counts[field.name] = len(given)
    unknown = rows.keys() - {field.name for field in fields}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}; the assembler has {[field.name for field in fields]}")
    if not counts:
        required = [field.name for field in fields if not field.optional]
        if not required:
            raise ValueError("no field was given a list of rows: how many rows are there?")
        raise MissingRowError([Problem(0, None, n, "has no list of rows", "one", MissingRowError) for n in required])
    if len(set(counts.values())) > 1:
        raise ValueError(f"fields have different numbers of rows: {counts}")
    return next(iter(counts.values()), 0)


def plain_rows(field: Field, given: Sequence[object] | None, device: torch.device) -> FieldSource | None:
    """The rows of one field where they are plainly right; None where that takes a closer look.

    Plain are tensors of the field's dtype on the CPU or `device`, dense, all of one good shape, and within
    their storage.
    """
    if given is None:
        return None
    first = given[0]
    if type(first) is not torch.Tensor or first.ndim != 1:
        return None
    shape, dtype, addresses = first.shape, field.dtype, []
    item_bytes, row_bytes = dtype.itemsize, shape[0] * dtype.itemsize
    if shape[0] != field.width and not (field.leading and shape[0] > field.width):
        return None
    try:
        for row in given:
            if type(row) is not torch.Tensor or row.dtype is not dtype or row.shape != shape:
                return None
            if not row.is_contiguous() or not (row.is_cpu or row.device == device):
                return None
            if row.is_neg():  # lazily: the bytes have the other sign
                return None
            if row.untyped_storage().nbytes() < row.storage_offset() * item_bytes + row_bytes:
                return None
            addresses.append(row.data_ptr())
    except RuntimeError:  # a sparse or otherwise address-less tensor
        return None
    return FieldSource(None, given, dtype, addresses)  # type: ignore[arg-type]


def stacked_rows(field: Field, given: Sequence[object] | None, blocks: HostBlockCache) -> FieldSource | None:
    """The rows of one field, read into a table of their own where they are plainly right; else None.

    For the twin: torch.stack compares all shapes and devices before it writes, faster than Python
    can. What it does not look at is looked at before: it would convert another dtype, and read
    beyond a storage that was freed or shrunk.
    """
    if given is None:
        return None
    first, dtype = given[0], field.dtype
    if type(first) is not torch.Tensor or first.ndim != 1:
        return None
    width = first.shape[0]
    if width != field.width and not (field.leading and width > field.width):
        return None
    item_bytes, row_bytes = dtype.itemsize, width * dtype.itemsize
    try:
        for row in given:
            if type(row) is not torch.Tensor or row.dtype is not dtype or not row.is_contiguous():
                return None
            if row.untyped_storage().nbytes() < row.storage_offset() * item_bytes + row_bytes:
                return None
        if width == field.width and len(given) * width * dtype.itemsize >= CACHED_FROM_BYTES:
            table = blocks.table(len(given), field.format)
            torch.stack(given, out=table.tensor)  # type: ignore[arg-type]
        else:
            stacked = torch.stack(given)  # type: ignore[arg-type]
            if not stacked.is_cpu or stacked.requires_grad:
                return None
            table = RowTable(stacked if width == field.width else stacked[:, : field.width].contiguous())
    except RuntimeError:  # another shape or device, no address, or a row that requires grad
        return None
    return FieldSource(None, given, dtype, stacked=table)  # type: ignore[arg-type]


def row_problems(
    fields: Sequence[Field],
    rows: Mapping[str, Sequence[object] | None],
    request_ids: Sequence[object] | None,
    device: torch.device,
) -> list[Problem]:
    """Every row that its field refuses, in the order of the batch."""
    num_rows = check_row_lists(fields, rows)
    problems = []
    for field in fields:
        given = rows.get(field.name)
        for i, row in enumerate([None] * num_rows if given is None else given):
            request_id = None if request_ids is None else request_ids[i]
            problem = row_problem(field, row, i, request_id, device)
            if problem is not None:
                problems.append(problem)
    return sorted(problems, key=lambda problem: problem.position)


def converted_rows(field: Field, given: Sequence[object] | None, num_rows: int) -> tuple[FieldSource, bool]:
    """The rows of one field that `row_problems` found good, and whether some are copies of the library's now."""
    if given is None:
        return FieldSource(None, (None,) * num_rows, field.dtype), False
    tensors = [to_row(field, row) for row in given]
    is_copied = any(not isinstance(row, (torch.Tensor, type(None))) for row in given)
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    shapes = {tensor.shape for tensor in tensors if tensor is not None}
    if len(dtypes) <= 1 and len(shapes) <= 1:
        return FieldSource(None, tensors, next(iter(dtypes), field.dtype)), is_copied
    # Rows of several dtypes or widths: each is brought to the field's own.
    rows = [None if t is None else t.detach()[: field.width].to(field.dtype) for t in tensors]
    return FieldSource(None, rows, field.dtype), True


# -- debug mode


def value_problems(
    fields: Sequence[Field],
    rows: Sequence[Sequence[torch.Tensor | None]],
    request_ids: Sequence[object] | None,
    vocab_size: int | None,
) -> list[Problem]:
    """Rows that cannot be right by their values: never written, ids no vocabulary has, broken probabilities.

    Reads the rows on the host, so this is for debug mode only. rows: a field, [b] tensors.
    """
    problems = []
    for i in range(len(rows[0])):
        request_id = None if request_ids is None else request_ids[i]
        present = [
            (field, row.detach()[: field.width].cpu())
            for field, row in zip(fields, [of_field[i] for of_field in rows], strict=True)
            if row is not None
        ]
        if all(not row.count_nonzero() for _, row in present):
            got, expected = "is zero in every field: never written?", "a row that prefill wrote"
            problems.append(Problem(i, request_id, "row", got, expected, MissingRowError))
        for field, row in present:
            fault = _value_fault(field, row, vocab_size)
            if fault is not None:
                problems.append(Problem(i, request_id, field.name, *fault, RowValueError))
    return problems


def _value_fault(field: Field, row: torch.Tensor, vocab_size: int | None) -> tuple[str, str] | None:
    if field.name == "topk_p" and not row.isfinite().all():
        return f"holds {row[~row.isfinite()][0].item()}", "finite probabilities"
    if field.name == "topk_index" and vocab_size is not None:
        outside = row[(row < 0) | (row >= vocab_size)]
        if len(outside):
            return f"holds the id {outside[0].item()}", f"ids from 0 to {vocab_size - 1}"
    return None


# -- the relay


def check_relay(relay: Relay, num_rows: int, device: torch.device) -> None:
    """Future indices, lengths and tokens: one a row, integers, on `device`; on the host also in range and distinct."""
    check_relay_vector(relay.future_indices, "future_indices", num_rows, device)
    check_relay_vector(relay.seq_lens, "seq_lens", num_rows, device)
    check_relay_vector(relay.bonus_tokens, "bonus_tokens", num_rows, device)
    if num_rows == 0:
        return
    if relay.future_indices_cpu is not None:
        check_relay_vector(relay.future_indices_cpu, "future_indices_cpu", num_rows, _CPU)
        check_future_indices(relay.future_indices_cpu, relay.future_map.slot_numbers)
    if relay.future_indices.is_cpu:
        check_future_indices(relay.future_indices, relay.future_map.slot_numbers)


def check_relay_vector(values: object, name: str, num_rows: int, device: torch.device) -> None:
    """[num_rows] integers on `device`."""
    if (
        type(values) is torch.Tensor
        and (values.dtype is torch.int64 or values.dtype is torch.int32)
        and values.layout is torch.strided
        and not values.is_nested
        and values.dim() == 1
        and values.numel() == num_rows
        and values.device == device
        and not values.is_neg()
        and values.is_contiguous()
        and values.untyped_storage().nbytes() >= (values.storage_offset() + num_rows) * values.dtype.itemsize
    ):
        return
    if not isinstance(values, torch.Tensor):
        raise RelayError(f"{name} is a {type(values).__name__}, expected a tensor [{num_rows}] on {device}")
    if values.layout is not torch.strided or values.is_nested or values.is_neg():
        raise RelayError(f"{name} is {shown(values)} without plain values, expected one [{num_rows}]")
    if values.device != device:
        raise RelayError(f"{name} is on {values.device}, expected {device}")
    if values.shape != (num_rows,):
        raise RelayError(f"{name} has shape {tuple(values.shape)}, expected ({num_rows},)")
    if num_rows and not has_memory(values):
        raise RelayError(f"{name} has no storage any more")
    if values.dtype is not torch.int64 and values.dtype is not torch.int32:
        raise RelayError(f"{name} has dtype {values.dtype}, expected int64 or int32")


def check_future_indices(future_indices: torch.Tensor, slot_numbers: SlotNumbers, may_repeat: bool = False) -> None:
    """A host copy of at least one index: in range and distinct. Slot 0 is the padding sink: it may repeat."""
    indices = future_indices.numpy()
    if not slot_numbers.holds(indices):
        num_slots = len(slot_numbers)
        outside = indices[(indices < 0) | (indices >= num_slots)][0]
        raise RelayError(f"future index {outside} is out of range, expected 0 to {num_slots - 1}")
    if not may_repeat and not slot_numbers.are_distinct(indices):
        repeated = [i for i, count in Counter(indices.tolist()).items() if count > 1 and i != 0]
        if repeated:
            rows = np.flatnonzero(indices == repeated[0]).tolist()
            raise RelayError(f"future index {repeated[0]} is given for rows {rows}: one would overwrite the other")
