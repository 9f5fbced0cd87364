"""Memory that the library owns: slabs, output tables, and what the machine can pin."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from contextlib import suppress
from functools import cache

import torch

from draftgather.kernels.gather_rows import gather_rows
from draftgather.kernels.row_tables import FieldSource, LaunchDescriptor, RowFormat, RowTable, empty_table
from draftgather.notices import notice_once

_HUGE_PAGE = 2 << 20


@cache
def can_pin() -> bool:
    """Whether this machine gives page-locked memory. Touches CUDA where there is a GPU."""
    if not torch.cuda.is_available():
        return False
    return try_pinned((1,), torch.uint8) is not None


def try_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Uninitialised page-locked memory; None, with one notice, where there is none (WSL2, containers, `ulimit -l`)."""
    try:
        tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        notice_once("this machine pins no memory, or no more of it; transfers will be slower", error)
        return None
    if not tensor.is_pinned():
        notice_once("memory asked for as pinned is not; transfers will be slower")
        return None
    return tensor


def _check_size(num_bytes: int) -> None:
    if num_bytes >= 1 << 48:
        raise MemoryError(f"{num_bytes} bytes are more than a process can address")


def allocate_slab(num_bytes: int, pin: bool) -> torch.Tensor:
    """`num_bytes` zero bytes, page-aligned, pinned if asked for and possible, else untouched until written.

    Pageable slabs ask for huge pages: rows of a large pool are read at random, and a row then
    costs one TLB miss instead of four (gather and scatter each about 12 % faster at N=64).
    """
    _check_size(num_bytes)
    with torch.inference_mode(False):
        pinned = try_pinned((num_bytes,), torch.uint8) if pin else None
        if pinned is not None:
            return pinned.zero_()
        # A whole huge page of slack, so that the slab can start on a huge page's boundary.
        mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= _HUGE_PAGE:
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE_PAGE
        return whole[start : start + num_bytes]


def allocate_table(num_rows: int, row: RowFormat, device: torch.device, pin: bool) -> RowTable:
    """A zeroed table [num_rows, row.width] for the library's life: fixed outputs, relay buffers."""
    shape = (num_rows, row.width)
    _check_size(num_rows * row.item.itemsize)
    with torch.inference_mode(False):
        pinned = try_pinned(shape, row.dtype) if pin else None
        if pinned is not None:
            return RowTable.over(pinned.zero_())
        if device.type != "cpu":
            return RowTable.over(torch.zeros(shape, dtype=row.dtype, device=device))
        slab = allocate_slab(num_rows * row.item.itemsize, pin=False)
        return RowTable.over(slab.view(row.dtype).view(shape))


class HostBlockCache:
    """Fresh host tables from recycled blocks: for the CPU what torch's caching allocator is for CUDA.

    A block is used again once no tensor or array over it is left (the end of the last one returns
    it), so every call gets memory of its own without the page faults of a new mapping: measured
    150 us a batch of 64 rows of 14 KB. At most `max_free` unused blocks of a size are kept.
    """

    def __init__(self, max_free: int = 4) -> None:
        self._max_free = max_free
        self._free: dict[int, deque[torch.Tensor]] = {}
        # ctypes forgets an array type with its last instance, and making one takes longer than all else here.
        self._lease_types: dict[int, type[ctypes.Array[ctypes.c_ubyte]]] = {}

    def table(self, num_rows: int, row: RowFormat) -> RowTable:
        """An uninitialised table [num_rows, row.width] that nothing else uses."""
        num_bytes = num_rows * row.item.itemsize
        return empty_table(num_rows, row, None if num_bytes < CACHED_FROM_BYTES else self._lease(num_bytes))

    def _lease(self, num_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """One use of a block: an object that ends with the last array and tensor over it."""
        block_bytes = 1 << (num_bytes - 1).bit_length()
        free = self._free.get(block_bytes)
        if free is None:
            free = self._free.setdefault(block_bytes, deque(maxlen=self._max_free))
            self._lease_types[block_bytes] = ctypes.c_ubyte * block_bytes
        try:
            block = free.pop()
        except IndexError:
            block = allocate_slab(block_bytes, pin=False)
        # Not an array: NumPy shortens chains of views, and would hold the block past the lease.
        lease = self._lease_types[block_bytes].from_address(block.data_ptr())
        # The lease holds its block, and a weak reference to itself whose callback gives the block
        # back: it ends with the lease, to this cache if that is still there.
        of_cache = weakref.ref(free)

        def give_back(_: object) -> None:
            unused = of_cache()
            if unused is not None:
                unused.append(block)

        lease.block = block  # type: ignore[attr-defined]
        lease.on_end = weakref.ref(lease, give_back)  # type: ignore[attr-defined]
        return lease


CACHED_FROM_BYTES = 64 * 1024


@cache
def zero_copy_works(device: torch.device) -> bool:
    """Whether `device` sees host writes to pinned memory that it has already read, and the host what it writes there.

    Under confidential computing, in some containers and under WSL2 a mapping can be a dead
    copy: the device goes on seeing what was there when it was mapped. So the probe reads once,
    writes, and reads again. It waits for the device: for start-up, not for the hot path.
    """
    if device.type != "cuda" or not can_pin():
        return False
    try:
        try:
            seen = _probe_zero_copy(device)
        except FileNotFoundError:  # as in `warmup`: another process tidied the compiler's cache
            seen = _probe_zero_copy(device)
    except RuntimeError as error:
        notice_once("the device cannot use pinned memory in place; rows are copied instead", error)
        return False
    if not all(seen):
        notice_once("the device's view of pinned memory is not live; rows are copied instead")
    return all(seen)


def _probe_zero_copy(device: torch.device) -> list[bool]:
    """What was as it should be."""
    with torch.cuda.device(device):
        pinned, written = (torch.zeros((1, 64), dtype=torch.int64, pin_memory=True) for _ in range(2))
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        seen = []
        for value in (1, 2):
            pinned.fill_(value)
            written.fill_(0)
            output = torch.zeros((1, 64), dtype=torch.int64, device=device)
            source, row = FieldSource(pool=RowTable(pinned)), RowFormat.of(64, torch.int64)
            for table in (output, written):
                gather_rows(LaunchDescriptor(1, 1, (source,), slots, (None,), (RowTable(table),), (row,)))
            # The copy back waits for both launches.
            seen += [bool(output.cpu().eq(value).all()), bool(written.eq(value).all())]
    return seen
