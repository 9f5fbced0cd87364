"""Step 3 of a row's path: all that the launch needs, in memory that the device can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draftgather.completion import DONE, CompletionMarker
from draftgather.fields import Field
from draftgather.kernels.gather_rows_torch import gather_rows_torch
from draftgather.kernels.row_tables import FEW_SLOTS, FieldSource, LaunchDescriptor, RelayTarget, RowFormat, RowTable
from draftgather.locate import Located
from draftgather.machine import Machine
from draftgather.mailbox import Int64Array
from draftgather.memory import allocate_slab
from draftgather.notices import WARNINGS
from draftgather.tallies import StagingCounts

_ALIGNMENT = 16

# A ring that grows beyond so many buffers is told.
_MANY_BUFFERS = 8


class StagingBuffer:
    """One pinned buffer in flight: filled from its start, then read by one launch.

    It may be filled again only once `marker` is done; `StagingRing.take` sees to that.
    """

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.slab = allocate_slab(num_bytes, pin)
        self._words = self.slab.view(torch.int64)
        self._host_words = self._words.numpy()
        self._used = 0
        self.marker: CompletionMarker = DONE

    @property
    def is_used(self) -> bool:
        return self._used > 0

    def rewind(self) -> None:
        self._used = 0

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_rows, width] of what is not used yet, every row at a multiple of 16 bytes."""
        start, stride = self._used, _aligned(width * dtype.itemsize)
        end = start + num_rows * stride
        assert end <= self.slab.numel()
        self._used = end
        return self.slab[start:end].view(dtype).view(num_rows, stride // dtype.itemsize)[:, :width]

    def put_flags(self, flags: np.ndarray[Any, np.dtype[np.bool_]] | np.bool_, num_rows: int) -> torch.Tensor:
        """Copy a host vector [num_rows] in, as bytes; one flag stands for all."""
        start, end = self._used, self._used + num_rows
        assert end <= self.slab.numel()
        self._used = _aligned(end)
        staged = self.slab[start:end]
        staged.numpy()[:] = flags
        return staged

    def put(self, numbers: Int64Array) -> torch.Tensor:
        """Copy a host vector [n] in."""
        start = self._used // 8
        end = start + len(numbers)
        assert end <= len(self._words)
        self._used = _aligned(end * 8)
        self._host_words[start:end] = numbers
        return self._words[start:end]

    def uploaded(self, machine: Machine, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `tensors` (taken from here) on the device: one upload for all of them."""
        there = machine.upload(self.slab[: self._used])
        moved = []
        for tensor in tensors:
            offset = (tensor.data_ptr() - self.slab.data_ptr()) // tensor.element_size()
            moved.append(there.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset))
        return moved


class StagingRing:
    """Staging buffers, reused only when their completion marker is done.

    Where all are in flight the ring grows: it neither overwrites nor waits. `num_buffers` tells
    how far it has grown.
    """

    def __init__(self, buffer_bytes: int, pin: bool) -> None:
        self._buffer_bytes = buffer_bytes
        self._pin = pin
        self._buffers: list[StagingBuffer] = []
        self._next = 0
        self.counts = StagingCounts()

    @property
    def num_buffers(self) -> int:
        return len(self._buffers)

    def take(self) -> StagingBuffer:
        """A buffer that no launch reads any more."""
        for _ in range(len(self._buffers)):
            self._next = (self._next + 1) % len(self._buffers)
            buffer = self._buffers[self._next]
            if buffer.marker.query():
                buffer.rewind()
                return buffer
            self.counts.busy += 1
        self.counts.made += 1
        if self.counts.made > _MANY_BUFFERS:
            WARNINGS.warn(
                "staging ring",
                "a staging ring grew to %d buffers of %d bytes, for as many launches are in flight. Remedy: prepare "
                "fewer batches ahead of the device, or look for a stream that waits for long",
                self.counts.made,
                self._buffer_bytes,
            )
        self._buffers.append(StagingBuffer(self._buffer_bytes, self._pin))
        self._next = len(self._buffers) - 1
        return self._buffers[-1]

    @staticmethod
    def bytes_for(fields: Sequence[Field], num_rows: int) -> int:
        """What the largest batch needs: its rows, an address and a presence byte a row and field, its slots."""
        rows = sum(num_rows * (_aligned(field.row_bytes) + 9) + 3 * _ALIGNMENT for field in fields)
        return _aligned(rows + num_rows * 8 + 2 * _ALIGNMENT)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def describe(
    formats: tuple[RowFormat, ...],
    optional: tuple[bool, ...],
    located: Located,
    outputs: Sequence[RowTable | None],
    num_padded: int,
    relay: RelayTarget | None,
    staging: StagingBuffer | None,
    machine: Machine,
) -> LaunchDescriptor:
    """The launch of one batch. `staging` is None where the twin runs: it reads the host's memory as it is."""
    sources, slots, few_slots = located.sources, located.slots, ()
    if staging is None:
        slots_tensor = None if slots is None else torch.from_numpy(slots)
        present = tuple([None if p is None else torch.from_numpy(p.view(np.uint8)) for p in located.present])
    else:
        if located.route == "staged":
            sources, slots = _staged(formats, located, staging), np.arange(located.num_rows)
        elif slots is None:
            written = _written(outputs, relay)
            sources = tuple([_addressed(source, written, staging, machine) for source in sources])
        slots_tensor = None
        if slots is not None:
            if located.num_rows <= FEW_SLOTS:
                few_slots = tuple(slots.tolist())
            else:
                slots_tensor = staging.put(slots)
        # Always flags for an optional field: one compiled variant, whoever has it.
        present = (None,) * len(optional)
        if True in optional:
            flags = [np.True_ if p is None and o else p for p, o in zip(located.present, optional, strict=True)]
            present = tuple([None if p is None else staging.put_flags(p, located.num_rows) for p in flags])
        if staging.is_used and (located.route.is_uploaded or not machine.can_read_staging(staging.slab)):
            sources, slots_tensor, present = _uploaded(located, sources, slots_tensor, present, staging, machine)
    return LaunchDescriptor(
        num_rows=located.num_rows,
        num_padded=num_padded,
        sources=sources,
        slots=slots_tensor,
        present=present,
        outputs=tuple(outputs),
        formats=formats,
        relay=relay,
        few_slots=few_slots,
    )


def _staged(formats: tuple[RowFormat, ...], located: Located, staging: StagingBuffer) -> tuple[FieldSource, ...]:
    """Gather the rows into the staging buffer with the twin: one host copy a field, whatever the batch size."""
    num_rows = located.num_rows
    tables = tuple(RowTable.over(staging.take(num_rows, row.width, row.dtype)) for row in formats)
    gather_rows_torch(
        LaunchDescriptor(
            num_rows=num_rows,
            num_padded=num_rows,
            sources=located.sources,
            slots=None if located.slots is None else torch.from_numpy(located.slots),
            present=tuple(None if p is None else torch.from_numpy(p.view(np.uint8)) for p in located.present),
            outputs=tables,
            formats=formats,
        )
    )
    return tuple(FieldSource(pool=table) for table in tables)


def _written(outputs: Sequence[RowTable | None], relay: RelayTarget | None) -> list[tuple[int, int]]:
    """(start, end) of everything that the launch writes to."""
    tables = outputs if relay is None else (*outputs, *relay.fields, relay.seq_lens_buf, relay.bonus_tokens_buf)
    tensors = [table.tensor for table in tables if table is not None]
    if relay is not None:
        tensors += [valid for valid in relay.valid if valid is not None]
    return [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]


def _addressed(
    source: FieldSource, written: Sequence[tuple[int, int]], staging: StagingBuffer, machine: Machine
) -> FieldSource:
    """The addresses of separate rows, in a vector that the device reads.

    Rows that lie in what the same launch writes (the future map, fixed outputs) are copied before: the
    kernel reads and writes in any order. So are rows inside of an element's bytes: a GPU reads none there.
    """
    assert source.dtype is not None
    addresses = _addresses(source)
    ends = addresses + max([0 if row is None else row.nbytes for row in source.rows])
    bits = int(np.bitwise_or.reduce(addresses))
    if bits % source.dtype.itemsize or any([((addresses < end) & (ends > start)).any() for start, end in written]):
        copies = [None if row is None else machine.upload(row) for row in source.rows]
        source = source._replace(rows=copies, originals=source.rows)
        addresses = _addresses(source._replace(addresses=None))
        bits = int(np.bitwise_or.reduce(addresses))
    return source._replace(addresses_ptr=staging.put(addresses), is_aligned=bits % _ALIGNMENT == 0)


def _addresses(source: FieldSource) -> Int64Array:
    return np.array(source.addresses or [0 if row is None else row.data_ptr() for row in source.rows], np.int64)


def _uploaded(
    located: Located,
    sources: tuple[FieldSource, ...],
    slots: torch.Tensor | None,
    present: tuple[torch.Tensor | None, ...],
    staging: StagingBuffer,
    machine: Machine,
) -> tuple[tuple[FieldSource, ...], torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
    """Everything that lies in the staging buffer, moved to the device in one upload."""
    staged: list[torch.Tensor] = [tensor for tensor in (slots, *present) if tensor is not None]
    for source in sources:
        if located.route == "staged":
            assert source.pool is not None
            staged.append(source.pool.tensor)
        elif source.addresses_ptr is not None:
            staged.append(source.addresses_ptr)
    moved = {id(old): new for old, new in zip(staged, staging.uploaded(machine, staged), strict=True)}

    def moved_source(source: FieldSource) -> FieldSource:
        if source.addresses_ptr is not None:
            return source._replace(addresses_ptr=moved[id(source.addresses_ptr)])
        assert source.pool is not None
        table = moved.get(id(source.pool.tensor))
        return source if table is None else FieldSource(pool=RowTable(table))

    return (
        tuple(moved_source(source) for source in sources),
        None if slots is None else moved[id(slots)],
        tuple(None if p is None else moved[id(p)] for p in present),
    )
