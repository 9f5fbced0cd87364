"""The kernel's twin on the CPU: the same descriptor, the same bytes written, in PyTorch and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from draftgather.kernels.row_tables import (
    FieldSource,
    LaunchDescriptor,
    RelayTarget,
    RowFormat,
    RowTable,
    empty_table,
)

# Below this size of a field's rows NumPy's fancy indexing (a temporary, but no
# dispatcher) beats torch.index_select; measured equal at about 8 rows of 14 KB.
_SMALL_GATHER_BYTES = 96 * 1024

_INT64 = np.dtype("i8")
_MOVE_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows_torch(descriptor: LaunchDescriptor) -> None:
    """The kernel's twin on the CPU: the same descriptor, the same bytes written."""
    d = descriptor
    if d.num_padded == 0:
        return
    if d.few_slots:
        d = d._replace(slots=torch.tensor(d.few_slots))
    slots = None if d.slots is None else d.slots.numpy()
    d = d._replace(sources=_apart(d))
    # Every source is read before anything is relayed: source and relay may share memory.
    gathered = [_gather_field(d, f, slots) for f in range(len(d.sources))]
    if d.relay is not None:
        _relay_rows(
            d, d.relay, [_bytes_of(table, row)[: d.num_rows] for table, row in zip(gathered, d.formats, strict=True)]
        )


def _apart(d: LaunchDescriptor) -> tuple[FieldSource, ...]:
    """The sources, without separate rows that lie in another field's output, which may be written before."""
    outputs = [table.tensor for table in d.outputs if table is not None]
    if len(outputs) < 2 or all([source.pool is not None or source.stacked is not None for source in d.sources]):
        return d.sources
    written = {output.untyped_storage().data_ptr() for output in outputs}

    def apart(row: torch.Tensor | None) -> torch.Tensor | None:
        return row if row is None or row.untyped_storage().data_ptr() not in written else row.detach().clone()

    return tuple([s if s.stacked is not None else s._replace(rows=[apart(row) for row in s.rows]) for s in d.sources])


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
    if output.raw is None:
        output = RowTable.over(output.tensor)
    assert output.raw is not None
    if source.stacked is not None:
        output.tensor[:num_rows] = source.stacked.tensor
    elif source.pool is None:
        _stack_rows(source, present, output, d.formats[f])
    elif slots is None or num_rows * output.raw.itemsize <= _SMALL_GATHER_BYTES:
        assert source.pool.raw is not None
        output.raw[:num_rows] = source.pool.raw[:num_rows] if slots is None else source.pool.raw[slots]
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
    if not relay.is_in_range:
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
