"""The batched tensors: fresh ones for each call, or one set at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from draftgather.fields import Field
from draftgather.kernels.row_tables import FieldSource, RowFormat, RowTable
from draftgather.machine import Machine
from draftgather.memory import HostBlockCache, allocate_table, try_pinned
from draftgather.notices import notice_once

OutputMode = Literal["fresh", "fixed"]
OutputMemory = Literal["device", "pinned"]


class FreshOutputs:
    """Every call gets tensors of its own; their memory comes back when the caller drops them."""

    def __init__(self, fields: Sequence[Field], device: torch.device, has_kernel: bool, pin: bool) -> None:
        self._formats = tuple(field.format for field in fields)
        self._device = device
        self._pin = pin
        self._table = self._torch_table if has_kernel else HostBlockCache().table

    def take(self, num_rows: int, sources: Sequence[FieldSource] = ()) -> tuple[RowTable, ...]:
        """[num_rows, width] a field, uninitialised; or the table into which just these rows were read already."""
        if not sources:
            return tuple([self._table(num_rows, row) for row in self._formats])
        return tuple(
            [
                source.stacked
                if source.stacked is not None and source.stacked.tensor.shape == (num_rows, row.width)
                else self._table(num_rows, row)
                for source, row in zip(sources, self._formats, strict=True)
            ]
        )

    def _torch_table(self, num_rows: int, row: RowFormat) -> RowTable:
        shape = (num_rows, row.width)
        pinned = try_pinned(shape, row.dtype) if self._pin else None
        self._pin = pinned is not None  # not asked again at each call
        return RowTable(torch.empty(shape, dtype=row.dtype, device=self._device) if pinned is None else pinned)


class FixedOutputs:
    """One set of tensors at the same addresses for the assembler's life: CUDA graphs read them.

    The next call overwrites them. The caller orders that, as with any static graph input.
    """

    def __init__(self, fields: Sequence[Field], max_rows: int, device: torch.device, pin: bool) -> None:
        self._tables = tuple(allocate_table(max_rows, field.format, device, pin) for field in fields)
        self._taken: dict[int, tuple[RowTable, ...]] = {}

    def take(self, num_rows: int, sources: Sequence[FieldSource] = ()) -> tuple[RowTable, ...]:
        """The first num_rows rows of each table."""
        taken = self._taken.get(num_rows)
        if taken is None:
            taken = tuple(RowTable.over(table.tensor[:num_rows]) for table in self._tables)
            self._taken[num_rows] = taken
        return taken


def make_outputs(
    fields: Sequence[Field],
    max_rows: int,
    device: torch.device,
    machine: Machine,
    mode: OutputMode,
    memory: OutputMemory,
) -> FreshOutputs | FixedOutputs:
    """The outputs of one assembler. "pinned" ones lie on the device, with one notice, where it cannot write theirs."""
    if mode not in ("fresh", "fixed"):
        raise ValueError(f'outputs is {mode!r}, expected "fresh" or "fixed"')
    if memory not in ("device", "pinned"):
        raise ValueError(f'output_memory is {memory!r}, expected "device" or "pinned"')
    pin = memory == "pinned" and device.type == "cuda" and machine.pins and machine.zero_copy
    if memory == "pinned" and not pin:
        notice_once("no pinned memory for the outputs here; they lie on the assembler's device instead")
    return (
        FreshOutputs(fields, device, machine.has_kernel, pin)
        if mode == "fresh"
        else FixedOutputs(fields, max_rows, device, pin)
    )
