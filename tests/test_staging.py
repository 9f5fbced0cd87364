"""The library's own memory: no buffer is filled while a launch reads it, no block handed out while it is used."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

import draftgather as dg
import draftgather.draft_assembler as draft_assembler
from draftgather.completion import DONE
from draftgather.describe import StagingRing
from draftgather.fields import Field
from draftgather.kernels.row_tables import FEW_SLOTS
from draftgather.memory import HostBlockCache, allocate_slab, can_pin
from draftgather.notices import notice_once
from draftgather.outputs import FreshOutputs
from helpers import FIELD_LISTS, FakeMarker, assert_batch, random_rows, written_mailbox, zero_rows

WIDE = Field("wide", 4096, torch.float32)  # 16 KiB a row: blocks of eight rows are recycled


# -- the staging ring


def take(ring: StagingRing, marker) -> object:
    buffer = ring.take()
    buffer.marker = marker
    return buffer


def test_ring_reuses_what_is_done():
    """Guards against a ring that grows with every launch: a done buffer is taken again."""
    ring = StagingRing(1024, pin=False)
    buffers = {id(take(ring, DONE)) for _ in range(10)}
    assert (len(buffers), ring.num_buffers) == (1, 1)


def test_ring_never_reuses_what_is_read():
    """Guards the bytes that a launch in flight still reads: the ring grows, and neither overwrites nor waits."""
    ring = StagingRing(1024, pin=False)
    markers = [FakeMarker() for _ in range(5)]
    buffers = [take(ring, marker) for marker in markers]
    assert len({id(buffer) for buffer in buffers}) == ring.num_buffers == 5
    markers[3].is_done = True
    assert take(ring, FakeMarker()) is buffers[3]
    assert take(ring, FakeMarker()) not in buffers
    assert ring.num_buffers == 6


def test_ring_finds_any_done_buffer():
    """Guards launches that end out of order, on several streams."""
    ring = StagingRing(64, pin=False)
    markers = [FakeMarker() for _ in range(4)]
    buffers = [take(ring, marker) for marker in markers]
    for i in (2, 0, 3, 1):
        markers[i].is_done = True
        markers[i] = FakeMarker()
        assert take(ring, markers[i]) is buffers[i]
    assert ring.num_buffers == 4


def test_buffer_parts_do_not_overlap():
    """Guards slots, presence and rows of one launch from lying on each other; each at a multiple of 16."""
    buffer = StagingRing(1 << 12, pin=False).take()
    parts = [buffer.take(3, 5, torch.int8), buffer.take(2, 7, torch.float64), buffer.put(np.arange(3))]
    for i, part in enumerate(parts):
        assert part.data_ptr() % 16 == 0
        part.view(torch.uint8).fill_(i + 1)
    for i, part in enumerate(parts):
        assert (part.view(torch.uint8) == i + 1).all()


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("which", FIELD_LISTS)
def test_buffer_holds_the_largest_batch(machine, which, num_rows):
    """Guards the size of a buffer: the fullest batch, with absent rows, fits at any capacity."""
    fields = FIELD_LISTS[which]
    rows = random_rows(fields, num_rows)
    for field in fields:
        if field.optional:
            rows[field.name][-1] = None
    assembler = dg.DraftAssembler(
        fields, max_batch_size=num_rows, mailbox=written_mailbox(fields, rows, num_rows), machine=machine
    )
    assert_batch(assembler.assemble_rows(**rows), fields, rows)
    assert_batch(assembler.assemble_slots(range(num_rows)), fields, rows)


@pytest.fixture
def markers(monkeypatch) -> list[FakeMarker]:
    """Launches that are not done before the test says so: the marker of each, in order."""
    made: list[FakeMarker] = []
    real = draft_assembler.launch

    def launch(descriptor, machine, plan=None):
        real(descriptor, machine, plan)
        made.append(FakeMarker())
        return made[-1]

    monkeypatch.setattr(draft_assembler, "launch", launch)
    return made


@pytest.mark.parametrize("way", ["rows", "slots"])
def test_assembler_keeps_staging_until_the_launch_is_done(machine, fields, markers, way):
    """Guards the assembler's use of the ring: one buffer a launch in flight, taken again when it is done."""
    if not machine.has_kernel:
        pytest.skip("the twin stages nothing")
    num_rows = FEW_SLOTS + 1
    rows = random_rows(fields, num_rows)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, num_rows), machine=machine)

    def assemble() -> dg.DraftBatch:
        return assembler.assemble_rows(**rows) if way == "rows" else assembler.assemble_slots(range(num_rows))

    for _ in range(3):
        assert_batch(assemble(), fields, rows)
    assert assembler.num_staging_buffers == 3
    markers[1].is_done = True
    assemble()
    assert assembler.num_staging_buffers == 3
    assemble()
    assert assembler.num_staging_buffers == 4


def test_few_slots_keep_no_staging_buffer(machine, fields, markers):
    """Guards pinned memory: slots that travel as parameters of the kernel need no buffer, and so the ring stays."""
    rows = random_rows(fields, FEW_SLOTS)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, FEW_SLOTS), machine=machine)
    for _ in range(4):
        batch = assembler.assemble_slots(range(FEW_SLOTS))
        assert_batch(batch, fields, rows)
    expected = 0 if not machine.has_kernel else 1 if batch.route == "slots" else 4
    assert assembler.num_staging_buffers == expected


def test_sources_live_until_the_launch_is_done(machine, fields, markers):
    """Guards rows that the caller drops at once: the launch reads their addresses, and no allocator knows."""
    if not machine.has_kernel:
        pytest.skip("the twin is done when it returns")
    rows = random_rows(fields, 2)
    alive = [weakref.ref(row) for given in rows.values() for row in given]
    assembler = dg.DraftAssembler(fields, machine=machine)
    batch = assembler.assemble_rows(**rows)
    is_in_place = batch.route == "pointers"
    rows.clear()
    del batch
    gc.collect()
    if is_in_place:
        assert all(ref() is not None for ref in alive), "still read"
    markers[0].is_done = True
    assembler.assemble_rows(**zero_rows(fields, 1))
    gc.collect()
    assert all(ref() is None for ref in alive), "nobody reads them any more"


def test_slots_live_until_the_launch_is_done(machine, fields, markers):
    """Guards a slot that is released right after the call: it is free only when the launch is done."""
    rows = random_rows(fields, 2)
    mailbox = written_mailbox(fields, rows, 2)
    batch = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine).assemble_slots([1])
    mailbox.release([0, 1])
    assert mailbox.num_free == (1 if batch.route == "slots" else 2)
    markers[0].is_done = True
    assert mailbox.num_free == 2


def test_staged_slots_are_free_at_once(machine, fields, markers):
    """Guards throughput: records that were copied on the way are read by nobody after the call."""
    rows = random_rows(fields, 2)
    mailbox = written_mailbox(fields, rows, 2)
    batch = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine).assemble_slots([0, 1])
    if batch.route == "staged":
        mailbox.put(0, 100, **{name: given[0] for name, given in rows.items()})
    else:
        with pytest.raises(dg.SlotError, match="is read by a launch that is not done"):
            mailbox.put(0, 100, **{name: given[0] for name, given in rows.items()})


def test_lists_of_numbers_are_staged(machine):
    """Guards rows that are Python lists: copies of the library's own, and said to be."""
    fields = (Field("a", 3, torch.int64), Field("b", 2, torch.float32))
    rows = random_rows(fields, 3)
    rows["b"] = [torch.tensor([1.5, -0.0]), torch.tensor([2.0, 3.0]), torch.tensor([0.25, 7.0])]
    lists = {name: [row.tolist() for row in given] for name, given in rows.items()}
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(**lists)
    assert batch.route == "staged"
    assert_batch(batch, fields, rows)


# -- completion markers


def test_done_is_done():
    assert DONE.query()
    assert DONE.wait() is None


# -- recycled output blocks

# What of a table may live on when the tensor itself is dropped.
KEPT = {
    "tensor": lambda t: t,
    "row": lambda t: t[1],
    "slice": lambda t: t[:1, 3:9],
    "transposed": lambda t: t.T,
    "other dtype": lambda t: t.view(torch.int16),
    "detached": lambda t: t.detach(),
    "array": lambda t: t.numpy(),
    "view of an array": lambda t: t.numpy()[2:3, ::2],
    "view of a view": lambda t: t[1:].numpy().view(np.int32)[0],
    "memoryview": lambda t: memoryview(t.numpy()),
    "storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, tuple(t.shape), t.stride()),
    "dlpack": lambda t: np.from_dlpack(t),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


def content(kept: object) -> bytes:
    return np.ascontiguousarray(np.asarray(kept)).tobytes()


@pytest.mark.parametrize("keep", KEPT)
def test_blocks_in_use_are_not_handed_out(keep):
    """Guards a batch from later ones for as long as anything over its memory lives."""
    cache = HostBlockCache(max_free=2)
    table = cache.table(8, WIDE.format)
    address = table.tensor.data_ptr()
    table.tensor.copy_(torch.arange(8 * 4096).view(8, 4096))
    kept = KEPT[keep](table.tensor)
    before = content(kept)
    del table
    gc.collect()
    later = [cache.table(8, WIDE.format) for _ in range(4)]
    for other in later:
        assert other.tensor.data_ptr() != address
        other.tensor.fill_(-1)
    assert content(kept) == before


def test_blocks_are_recycled_when_nothing_is_left():
    """Guards the recycling itself: the same memory, again and again, once the last view is gone."""
    cache = HostBlockCache()
    addresses = set()
    for _ in range(5):
        table = cache.table(8, WIDE.format)
        addresses.add(table.tensor.data_ptr())
        view = table.tensor[2:].numpy()[0]
        del table, view
    assert len(addresses) == 1


def test_two_living_tables_of_one_cache():
    """Guards two tables at a time: each of its own memory, at a multiple of 16."""
    cache = HostBlockCache()
    tables = [
        cache.table(8, row.format) for row in (WIDE, WIDE, Field("b", 3, torch.int8), Field("c", 9000, torch.int16))
    ]
    for i, table in enumerate(tables):
        assert table.tensor.data_ptr() % 16 == 0
        table.tensor.fill_(i + 1)
    for i, table in enumerate(tables):
        assert (table.tensor == i + 1).all()


def test_unused_blocks_are_bounded():
    """Guards against memory that only grows: a peak of many batches is given back but for a few blocks."""
    cache = HostBlockCache(max_free=2)
    tables = [cache.table(8, WIDE.format) for _ in range(6)]
    addresses = {table.tensor.data_ptr() for table in tables}
    del tables
    gc.collect()
    again = [cache.table(8, WIDE.format) for _ in range(3)]
    assert len({table.tensor.data_ptr() for table in again}) == 3
    assert sum(len(free) for free in cache._free.values()) <= 2
    assert addresses & {table.tensor.data_ptr() for table in again}


def test_tables_outlive_their_cache():
    """Guards a batch that outlives its assembler."""
    cache = HostBlockCache()
    tensor = cache.table(8, WIDE.format).tensor
    tensor.fill_(3)
    del cache
    gc.collect()
    assert (tensor == 3).all()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), torch.clone])
def test_tables_are_ordinary_tensors(clone):
    """Guards what callers do with tensors: copy, send and grow them."""
    tensor = HostBlockCache().table(8, WIDE.format).tensor
    tensor.fill_(3)
    other = clone(tensor)
    tensor.fill_(4)
    assert (other == 3).all()
    assert tensor.is_contiguous()
    assert not tensor.requires_grad


def test_fresh_outputs_take_new_tables():
    """Guards "fresh": two takes never share memory, of any size."""
    outputs = FreshOutputs((WIDE, Field("small", 1, torch.bool)), torch.device("cpu"), has_kernel=False, pin=False)
    taken = [outputs.take(num_rows) for num_rows in (8, 8, 1, 1)]
    addresses = [table.tensor.data_ptr() for tables in taken for table in tables]
    assert len(set(addresses)) == 8
    assert [tuple(table.tensor.shape for table in tables) for tables in taken[1:3]] == [
        ((8, 4096), (8, 1)),
        ((1, 4096), (1, 1)),
    ]


# -- slabs and notices


@pytest.mark.parametrize("num_bytes", [1, 100, 4096, (2 << 20) + 1, 5 << 20])
def test_slab(num_bytes):
    """Guards the slab's promise: so many zero bytes, page-aligned, not torch's inference-mode kind."""
    with torch.inference_mode():
        slab = allocate_slab(num_bytes, pin=False)
    assert (slab.numel(), slab.dtype) == (num_bytes, torch.uint8)
    assert slab.data_ptr() % 4096 == 0
    assert not slab.any()
    assert not slab.is_inference()
    slab.fill_(7)
    assert (slab == 7).all()


def test_notice_once(caplog):
    """Guards against a log line a batch: each notice comes once a process."""
    for _ in range(3):
        notice_once("this is a test's notice")
    assert [record.getMessage() for record in caplog.records] == ["this is a test's notice"]


def test_nothing_is_pinned_without_a_gpu(monkeypatch):
    """Guards machines without pinned memory: everything works, and says that it is not pinned."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    can_pin.cache_clear()
    try:
        assert not can_pin()
        fields = (Field("a", 2, torch.int64),)
        mailbox = dg.DraftMailbox(fields, 2)
        mailbox.put(0, 1, a=[3, 4])
        assembler = dg.DraftAssembler(fields, mailbox=mailbox, outputs="fixed", output_memory="pinned")
        assert not mailbox.is_pinned
        assert assembler.assemble_slots([0]).tensors["a"].tolist() == [[3, 4]]
    finally:
        can_pin.cache_clear()
