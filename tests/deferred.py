"""A device for tests: what is queued on its streams runs later, when the test says so, in any order that is legal.

It stands for a GPU in all that lifetimes depend on. Launches and uploads read the host's memory only when they
run, by which time it may have been filled again; a completion marker is done only after that. Memory of the host
that a launch reads is held weakly: if the library lets go of it too early, the launch says so. Memory of the
device (outputs, future map, uploads) is held, as its allocator is ordered by stream.

What the test itself writes to device memory, `FutureMap.publish` among it, it does on a drained device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from draftgather.completion import CompletionMarker
from draftgather.kernels.gather_rows_torch import gather_rows_torch
from draftgather.kernels.row_tables import FieldSource, LaunchDescriptor, RowTable
from draftgather.machine import Machine

CPU = torch.device("cpu")


class DeferredDevice:
    """Streams of work. Within one the order is kept; which stream goes on is the test's choice."""

    def __init__(self, num_streams: int = 2) -> None:
        self.current = 0  # the caller's current stream
        self.num_launches = 0
        self.uploads: dict[int, torch.Tensor] = {}  # by the address of their storage
        self._queues: list[deque[Callable[[], None]]] = [deque() for _ in range(num_streams)]
        self._num_queued = [0] * num_streams
        self._num_done = [0] * num_streams

    def submit(self, work: Callable[[], None]) -> None:
        self._queues[self.current].append(work)
        self._num_queued[self.current] += 1

    def mark(self) -> Marker:
        return Marker(self, self.current, self._num_queued[self.current])

    def num_pending(self, stream: int) -> int:
        return len(self._queues[stream])

    def step(self, stream: int) -> None:
        """Run the next piece of work of one stream."""
        if self._queues[stream]:
            self._queues[stream].popleft()()
            self._num_done[stream] += 1

    def drain(self) -> None:
        for stream, queue in enumerate(self._queues):
            while queue:
                self.step(stream)

    def is_done(self, stream: int, position: int) -> bool:
        return self._num_done[stream] >= position


@dataclass(frozen=True)
class Marker:
    """A completion marker of a deferred device: everything up to `position` of one stream."""

    device: DeferredDevice
    stream: int
    position: int

    def query(self) -> bool:
        return self.device.is_done(self.stream, self.position)

    def wait(self, stream: object = None) -> None:
        raise AssertionError("waited for a launch")


class DeferredMachine(Machine):
    """The queue's side of a Machine. Its device is called "cpu", so that a test can read what was written."""

    queue: DeferredDevice
    execute: Callable[[LaunchDescriptor], None]
    reads_host_rows: bool
    holds_sources: bool

    @classmethod
    def of(
        cls,
        queue: DeferredDevice,
        *,
        zero_copy: bool = True,
        reads_host_rows: bool = True,
        holds_sources: bool = False,
        execute: Callable[[LaunchDescriptor], None] = gather_rows_torch,
    ) -> DeferredMachine:
        """holds_sources: they lie on the device, as a future map's do."""
        machine = cls(CPU, has_kernel=True, pins=False, zero_copy=zero_copy)
        for name, value in (
            ("queue", queue),
            ("execute", execute),
            ("reads_host_rows", reads_host_rows),
            ("holds_sources", holds_sources),
        ):
            object.__setattr__(machine, name, value)
        return machine

    def can_read(self, tensor: torch.Tensor) -> bool:
        return self.reads_host_rows

    def run(self, descriptor: LaunchDescriptor, plan: object = None) -> CompletionMarker:
        self.queue.num_launches += 1
        restore = (lambda: descriptor) if self.holds_sources else _weak(descriptor, self.queue)
        self.queue.submit(lambda: self.execute(restore()))
        return self.queue.mark()

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        there, source = torch.empty_like(tensor), _Weak(tensor, self.queue)
        self.queue.uploads[there.untyped_storage().data_ptr()] = there
        self.queue.submit(lambda: _copy(there, source.get()))
        return there

    def zero(self, tensors: Sequence[torch.Tensor]) -> CompletionMarker:
        self.queue.submit(lambda: [tensor.zero_() for tensor in tensors] and None)
        return self.queue.mark()


def _copy(there: torch.Tensor, tensor: torch.Tensor) -> None:
    there.copy_(tensor)


class _Weak:
    """A tensor of the host as a launch knows it: by its address. Whoever owns the memory must keep its storage."""

    def __init__(self, tensor: torch.Tensor, queue: DeferredDevice) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype
        self._own = queue.uploads.get(tensor.untyped_storage().data_ptr())

    def get(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise AssertionError("a launch reads memory that was let go of")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


def _weak(d: LaunchDescriptor, queue: DeferredDevice) -> Callable[[], LaunchDescriptor]:
    """The descriptor anew, when its launch runs, out of weak references to what it reads of the host."""

    def weak(tensor: torch.Tensor | None) -> _Weak | None:
        return None if tensor is None else _Weak(tensor, queue)

    slots, present = weak(d.slots), [weak(p) for p in d.present]
    pools = [weak(None if source.pool is None else source.pool.tensor) for source in d.sources]
    # By address tables: the rows' own, and the table of addresses, which the twin does not read.
    tables = [weak(source.addresses_ptr) for source in d.sources]
    rows = [[weak(row) for row in source.rows] for source in d.sources]
    dtypes = [source.dtype for source in d.sources]
    without_sources = d._replace(sources=(), slots=None, present=())

    def get(reference: _Weak | None) -> Any:
        return None if reference is None else reference.get()

    def restored() -> LaunchDescriptor:
        sources = []
        for pool, table, of_field, dtype in zip(pools, tables, rows, dtypes, strict=True):
            if pool is not None:
                sources.append(FieldSource(pool=RowTable.over(pool.get())))
            else:
                addresses = get(table)
                given = [get(row) for row in of_field]
                expected = [0 if row is None else row.data_ptr() for row in given]
                assert addresses.tolist() == expected, "the table of addresses was written over"
                sources.append(FieldSource(None, given, dtype, addresses_ptr=addresses))
        return without_sources._replace(sources=tuple(sources), slots=get(slots), present=tuple(map(get, present)))

    return restored
