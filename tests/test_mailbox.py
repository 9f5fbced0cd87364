"""The mailbox: who may write a record, when it may be read, and when it is another's."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

import draftgather as dg
from draftgather import mailbox as mailbox_module
from helpers import (
    FIELD_LISTS,
    FakeMarker,
    assert_bytes,
    note_readers,
    random_rows,
    raw,
    row_of,
    stacked,
    write_record,
    written_mailbox,
    zero_rows,
)

OPTIONAL = (*dg.eagle_fields(topk=2, hidden_size=6), dg.Field("seed", 3, torch.int32, optional=True))


@pytest.fixture
def mailbox(fields) -> dg.DraftMailbox:
    return dg.DraftMailbox(fields, num_slots=4, pin_memory=False)


@pytest.fixture
def row(fields) -> dict[str, torch.Tensor]:
    return row_of(random_rows(fields, 1), 0)


def slab_bytes(mailbox: dg.DraftMailbox) -> bytes:
    """Every byte of every record."""
    info = mailbox.buffer_info()
    return ctypes.string_at(info.address, info.num_bytes)


def gather(mailbox: dg.DraftMailbox, slots, owners=None) -> dg.DraftBatch:
    return dg.DraftAssembler(mailbox.fields, mailbox=mailbox).assemble_slots(slots, owners)


def problems_of(error: pytest.ExceptionInfo[dg.DraftRowError]) -> list[tuple[int, str]]:
    return [(problem.position, problem.got) for problem in error.value.problems]


# -- a slot's life


def test_life_of_a_slot(mailbox, row, fields):
    """Guards the whole cycle: hold, write, read, release, and the same number for the next tenant."""
    slots = [mailbox.acquire() for _ in range(4)]
    assert sorted(slots) == [0, 1, 2, 3]
    mailbox.put(slots[2], 77, **row)
    batch = gather(mailbox, [slots[2]], [77])
    assert batch.route == "slots"
    for field in fields:
        assert_bytes(batch.tensors[field.name], stacked(field, [row[field.name]], 1), field.name)
    assert mailbox.num_free == 0
    mailbox.release([slots[2]])
    assert mailbox.num_free == 1
    assert mailbox.acquire() == slots[2]


@pytest.mark.parametrize("owner", [0, -1, 2**63 - 1, -(2**63), np.int64(5)])
def test_any_integer_is_an_owner(mailbox, row, owner):
    """Guards against owner 0 meaning "not written": sglang's warm-up requests use room 0."""
    mailbox.put(0, owner, **row)
    assert gather(mailbox, [0], [owner]).num_rows == 1
    with pytest.raises(dg.SlotError, match="slot is 0, which is owned by"):
        gather(mailbox, [0], [3])


@pytest.mark.parametrize("owner", [2**63, -(2**63) - 1, 1.0, None, "7"])
def test_owner_of_more_than_64_bits(mailbox, row, owner):
    """Guards against an owner that is cut down to another's number."""
    before = slab_bytes(mailbox)
    with pytest.raises(ValueError, match="64-bit integer"):
        mailbox.put(0, owner, **row)
    assert slab_bytes(mailbox) == before


def test_full_mailbox_is_an_error_at_once(mailbox):
    """Guards against a wait: the thread that would wait is the one that frees slots."""
    for _ in range(4):
        mailbox.acquire()
    with pytest.raises(dg.MailboxFullError, match="all 4 slots"):
        mailbox.acquire()


def test_every_free_slot_is_handed_out(mailbox, row):
    """Guards against a slot lost on its way back: many tenancies later all four are there."""
    for turn in range(5):
        slots = [mailbox.acquire() for _ in range(4)]
        assert sorted(slots) == [0, 1, 2, 3]
        mailbox.put(slots[turn % 4], turn, **row)
        mailbox.release(slots)


def test_slots_of_the_callers_own_choosing(mailbox, row):
    """Guards against `acquire` handing out a slot that a caller took by its number."""
    mailbox.put(1, 5, **row)
    write_record(mailbox, 2, 6, row)
    mailbox.accept([2], [6])
    assert {mailbox.acquire(), mailbox.acquire()} == {0, 3}
    with pytest.raises(dg.MailboxFullError):
        mailbox.acquire()
    mailbox.release([1, 2])
    assert {mailbox.acquire(), mailbox.acquire()} == {1, 2}


@pytest.mark.parametrize("double", [[0], [0, 1], [1, 1]])
def test_double_release(mailbox, row, double):
    """Guards against a slot twice in the free list (two tenants): refused, and none of the list is released."""
    mailbox.put(0, 5, **row)
    mailbox.put(1, 5, **row)
    mailbox.release([0])
    with pytest.raises(dg.SlotError, match="expected a held slot") as error:
        mailbox.release(double)
    assert [problem.field for problem in error.value.problems] == [f"slot {double[0]}"]
    assert gather(mailbox, [1], [5]).num_rows == 1, "slot 1 is still its tenant's"


def test_release_before_anything_was_written(mailbox):
    """Guards the abort of a request whose transfer never finished: the slot comes back."""
    slot = mailbox.acquire()
    mailbox.release(slot)
    assert mailbox.num_free == 4


@pytest.mark.parametrize("slot", [-1, 4, 2**40, True, 1.0, None])
@pytest.mark.parametrize("call", ["put", "accept", "release", "generation"])
def test_slot_out_of_range(mailbox, row, slot, call):
    """Guards against slot -1 meaning the last one, and against writes outside the slab."""
    before = slab_bytes(mailbox)
    calls = {
        "put": lambda: mailbox.put(slot, 1, **row),
        "accept": lambda: mailbox.accept([slot], [1]),
        "release": lambda: mailbox.release([slot]),
        "generation": lambda: mailbox.generation(slot),
    }
    with pytest.raises(dg.SlotError, match=r"expected an integer from 0 to 3"):
        calls[call]()
    assert slab_bytes(mailbox) == before


# -- put


def test_put_of_anything_that_is_a_row(machine):
    """Guards against a row whose elements do not lie one after the other, or that is not a tensor at all."""
    fields = (dg.Field("a", 3, torch.float32), dg.Field("b", 2, torch.int64))
    mailbox = dg.DraftMailbox(fields, 6, pin_memory=False)
    ones = torch.tensor([1.0, -0.0, 2.5])
    strided = torch.tensor([1.0, 9, -0.0, 9, 2.5, 9])[::2]
    column = torch.tensor([[9.0, 1.0], [9.0, -0.0], [9.0, 2.5]])[:, 1]
    backward = np.array([2.5, -0.0, 1.0], np.float32)[::-1]
    cast = ones.to(torch.bfloat16)
    ids = torch.tensor([-1, 2**60])
    given = [ones, strided, column, backward, cast, [1.0, -0.0, 2.5]]
    ids_given = [
        ids,
        ids.expand(2),
        ids.flip(0).flip(0),
        ids.numpy(),
        torch.tensor([-1, 7], dtype=torch.int32),
        (-1, 7),
    ]
    for slot, (a, b) in enumerate(zip(given, ids_given, strict=True)):
        mailbox.put(slot, slot, a=a, b=b)
    batch = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine).assemble_slots(range(6), range(6))
    assert batch.tensors["a"].view(torch.int32).tolist() == [[0x3F800000, -(2**31), 0x40200000]] * 6
    assert batch.tensors["b"].tolist() == [[-1, 2**60]] * 4 + [[-1, 7]] * 2


BAD_ROWS = {
    "missing": (None, dg.MissingRowError, "is missing", "a row of 24 torch.bfloat16"),
    "wider": (torch.zeros(25, dtype=torch.bfloat16), dg.RowShapeError, r"has shape \(25,\)", r"\(24,\)"),
    "narrower": (torch.zeros(23, dtype=torch.bfloat16), dg.RowShapeError, r"has shape \(23,\)", r"\(24,\)"),
    "auxiliary": (
        torch.zeros(72, dtype=torch.bfloat16),
        dg.RowShapeError,
        r"has shape \(72,\)",
        "three times the width",
    ),
    "rank 2": (torch.zeros(1, 24, dtype=torch.bfloat16), dg.RowShapeError, r"has shape \(1, 24\)", r"\(24,\)"),
    "dtype": (torch.zeros(24), dg.RowDtypeError, "has dtype torch.float32", "torch.bfloat16"),
    "device": (torch.zeros(24, dtype=torch.bfloat16, device="meta"), dg.RowDeviceError, "is on meta", "cpu"),
    "other thing": ("text", dg.RowDtypeError, "is a str", "a tensor, array or list of 24"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("is_written", [False, True])
def test_put_refuses_bad_rows(mailbox, row, bad, is_written):
    """Guards against half a record: a refused put leaves every byte, and the former row stays readable."""
    value, error_class, got, expected = BAD_ROWS[bad]
    if is_written:
        mailbox.put(1, 5, **row)
    before = slab_bytes(mailbox)
    with pytest.raises(error_class, match=f"slot 1.*hidden_states {got}, expected .*{expected}") as error:
        mailbox.put(1, 5, **{**row, "hidden_states": value})
    assert [problem.field for problem in error.value.problems] == ["hidden_states"]
    assert slab_bytes(mailbox) == before
    problems = dg.DraftAssembler(mailbox.fields, mailbox=mailbox).check_slots([1], [5])
    assert len(problems) == (0 if is_written else 1)


def test_put_refuses_unknown_fields(mailbox, row):
    """Guards against a misspelt field that is dropped in silence."""
    before = slab_bytes(mailbox)
    with pytest.raises(ValueError, match=r"unknown fields \['topk'\]"):
        mailbox.put(0, 5, topk=[1], **row)
    assert slab_bytes(mailbox) == before


def test_put_into_another_owners_slot(mailbox, row):
    """Guards against two requests in one slot: the first owner's row stays."""
    mailbox.put(0, 5, **row)
    before = slab_bytes(mailbox)
    with pytest.raises(dg.SlotError, match="slot 0 holds the row of owner 5, expected a slot of owner 6"):
        mailbox.put(0, 6, **row)
    assert slab_bytes(mailbox) == before
    mailbox.put(0, 5, **row)


def test_presence_of_optional_fields(machine):
    """Guards against the former tenant's seed under a record that has none: absent, and left out of the batch."""
    mailbox = dg.DraftMailbox(OPTIONAL, 2, pin_memory=False)
    rows = random_rows(OPTIONAL, 2)
    assembler = dg.DraftAssembler(OPTIONAL, mailbox=mailbox, machine=machine)
    for slot in (0, 1):
        mailbox.put(slot, slot, **row_of(rows, slot))
    assert assembler.assemble_slots([0, 1]).present["seed"]
    mailbox.release([1])
    mailbox.put(1, 1, **{**row_of(rows, 1), "seed": None})
    batch = assembler.assemble_slots([0, 1])
    assert not batch.present["seed"]
    assert "seed" not in batch.tensors
    assert assembler.assemble_slots([0]).present["seed"]


# -- accept: records that a transfer engine wrote


def test_buffer_info(mailbox):
    """Guards the one packed entry: page aligned, and record i at address + i * record_bytes."""
    info = mailbox.buffer_info()
    assert info.address % mmap.PAGESIZE == 0
    assert (info.record_bytes, info.num_bytes) == (128, 4 * 128)
    assert tuple(info) == (info.address, info.num_bytes, info.record_bytes)


def test_record_layout_literal(mailbox, row):
    """Guards the format of a record: another process, of another version, writes it."""
    mailbox.put(2, 9, **row)
    record = np.frombuffer(slab_bytes(mailbox), np.uint8).reshape(4, 128)[2]
    assert record[0:16].tobytes() == raw(row["topk_p"]).tobytes()
    assert record[16:48].tobytes() == raw(row["topk_index"]).tobytes()
    assert record[48:96].tobytes() == raw(row["hidden_states"]).tobytes()
    assert record[104:].view(np.int64).tolist() == [9, 1, mailbox.layout.fingerprint << 8]


@pytest.mark.parametrize("which", FIELD_LISTS)
def test_accept_of_a_written_record(machine, which):
    """Guards against records that only `put` could write: raw bytes and the tag are all it takes."""
    fields = FIELD_LISTS[which]
    mailbox = dg.DraftMailbox(fields, 3, pin_memory=False)
    assert mailbox.buffer_info().record_bytes % 128 == 0
    rows = random_rows(fields, 2)
    write_record(mailbox, 2, 0, row_of(rows, 0))
    write_record(mailbox, 0, -4, row_of(rows, 1))
    mailbox.accept([2, 0], [0, -4])
    batch = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine).assemble_slots([2, 0], [0, -4])
    for field in fields:
        assert_bytes(batch.tensors[field.name], stacked(field, rows[field.name], 2), field.name)


def test_accept_tells_absent_fields():
    """Guards the presence bits of the layout word: an engine's record without a seed is one without a seed."""
    mailbox = dg.DraftMailbox(OPTIONAL, 2, pin_memory=False)
    rows = row_of(random_rows(OPTIONAL, 1), 0)
    write_record(mailbox, 0, 1, rows)
    write_record(mailbox, 1, 1, {**rows, "seed": None})
    mailbox.accept([0, 1], [1, 1])
    assert gather(mailbox, [0]).present["seed"]
    assert not gather(mailbox, [1]).present["seed"]


# How the record that is accepted for owner 5 was written, and the answer.
BAD_TAGS = {
    "not written": ({"owner": 0, "generation": 0, "layout_word": 0}, "is not written", "a record of owner 5"),
    "wrong owner": ({"owner": 6}, "is owned by 6", "owner 5"),
    "torn": ({"owner": 5, "layout_word": 0}, "is torn: its tag has no layout word", "a record of owner 5"),
    "torn early": (
        {"owner": 5, "generation": 0, "layout_word": 0},
        "is torn: its tag has no layout word",
        "a record of owner 5",
    ),
    "foreign": ({"owner": 5, "layout_word": 0x1234500}, "has the foreign layout 0x12345", "layout 0x"),
    "former": ({"owner": 5, "generation": 1}, "is of generation 1", "generation 2"),
}


@pytest.mark.parametrize("fault", BAD_TAGS)
def test_accept_tells_faults_apart(mailbox, row, fault):
    """Guards against a bad record taken for a good one, and against one answer for six different faults."""
    tag, got, expected = BAD_TAGS[fault]
    mailbox.release(mailbox.acquire())  # slot 0 is now at generation 2
    write_record(mailbox, 0, rows=row, **tag)
    write_record(mailbox, 1, 5, row)
    with pytest.raises(dg.SlotError, match=f"slot 0 {got}, expected {expected}") as error:
        mailbox.accept([1, 0], [5, 5])
    assert [(problem.position, problem.field) for problem in error.value.problems] == [(1, "slot 0")]
    with pytest.raises(dg.SlotError):
        gather(mailbox, [1])
    mailbox.accept([1], [5])


def test_accept_lists_all_bad_records(mailbox, row):
    """Guards against a scheduler that can abort only the first bad request of many."""
    write_record(mailbox, 0, 6, row)
    write_record(mailbox, 2, 5, row)
    with pytest.raises(dg.SlotError) as error:
        mailbox.accept([0, 1, 2, 3], [5, 5, 5, 5])
    assert problems_of(error) == [(0, "is owned by 6"), (1, "is not written"), (3, "is not written")]


def test_accept_lists_slots_out_of_range_too(mailbox, row):
    """Guards against a slot number that is reported as position 0, and hides the other bad rows."""
    write_record(mailbox, 2, 5, row)
    with pytest.raises(dg.SlotError) as error:
        mailbox.accept([2, 99, 3, -1], [5, 5, 5, 5])
    assert [problem.position for problem in error.value.problems] == [1, 2, 3]


@pytest.mark.parametrize(("slots", "owners"), [([0, 0], [5, 5]), ([0], [5, 5]), ([0, 1], [5])])
def test_accept_of_lists_that_do_not_fit(mailbox, row, slots, owners):
    """Guards against a slot accepted twice, and against owners that belong to other slots."""
    write_record(mailbox, 0, 5, row)
    with pytest.raises(ValueError, match=r"slots"):
        mailbox.accept(slots, owners)
    with pytest.raises(dg.SlotError):
        gather(mailbox, [0])


def test_accept_of_a_slot_that_another_owner_wrote(mailbox, row):
    """Guards against two stages that write one slot: the row that was accepted first keeps it."""
    mailbox.put(0, 5, **row)
    write_record(mailbox, 0, 6, row)
    with pytest.raises(dg.SlotError, match="slot 0 holds the row of owner 5, expected a slot of owner 6"):
        mailbox.accept([0], [6])


def test_late_write_of_a_former_tenant(mailbox, row):
    """Guards against the tenant that comes back from the dead: same owner, former generation."""
    generation = mailbox.generation(0)
    write_record(mailbox, 0, 5, row)
    mailbox.accept([0], [5])
    mailbox.release([0])
    assert mailbox.generation(0) == generation + 1
    with pytest.raises(dg.SlotError, match="not written"):
        mailbox.accept([0], [5])
    write_record(mailbox, 0, 5, row, generation=generation)
    with pytest.raises(dg.SlotError, match=f"is of generation {generation}, expected generation {generation + 1}"):
        mailbox.accept([0], [5])


# -- slots that a launch still reads


def test_slot_is_not_free_while_it_is_read(mailbox, row):
    """Guards against the next tenant writing under a launch that still reads."""
    slots = [mailbox.acquire() for _ in range(4)]
    for slot in slots:
        mailbox.put(slot, 5, **row)
    reader = FakeMarker()
    note_readers(mailbox, [1, 2, 2], reader)
    mailbox.release(slots)
    assert mailbox.num_free == 2
    assert {mailbox.acquire(), mailbox.acquire()} == {0, 3}
    with pytest.raises(dg.MailboxFullError, match=r"2 of them released but still read"):
        mailbox.acquire()
    before = slab_bytes(mailbox)
    with pytest.raises(dg.SlotError, match="slot 1 is released, with a launch that still reads it"):
        mailbox.put(1, 6, **row)
    assert slab_bytes(mailbox) == before
    reader.is_done = True
    assert {mailbox.acquire(), mailbox.acquire()} == {1, 2}


def test_released_slot_cannot_be_gathered_or_accepted(mailbox, row):
    """Guards against rows of a request that is gone, also while its slot still drains."""
    mailbox.put(0, 5, **row)
    note_readers(mailbox, [0], FakeMarker())
    mailbox.release([0])
    with pytest.raises(dg.SlotError, match="slot is 0, which is released"):
        gather(mailbox, [0], [5])
    with pytest.raises(dg.SlotError, match="slot 0 is released, with a launch that still reads it"):
        mailbox.accept([0], [5])
    with pytest.raises(dg.SlotError, match="expected a held slot"):
        mailbox.release([0])


def test_rewrite_under_a_reader(mailbox, row):
    """Guards against a put into a slot that a launch reads: refused until the launch is done."""
    reader = FakeMarker()
    mailbox.put(0, 5, **row)
    note_readers(mailbox, [0], reader)
    before = slab_bytes(mailbox)
    with pytest.raises(dg.SlotError, match="slot 0 is read by a launch that is not done"):
        mailbox.put(0, 5, **row)
    assert slab_bytes(mailbox) == before
    assert gather(mailbox, [0], [5]).num_rows == 1
    reader.is_done = True
    mailbox.put(0, 5, **row)


@pytest.mark.parametrize("first_done", [0, 1])
def test_two_readers_on_two_streams(mailbox, row, first_done):
    """Guards against the later reader hiding the earlier one: both must be done, in either order."""
    readers = FakeMarker(), FakeMarker()
    mailbox.put(0, 5, **row)
    for reader in readers:
        note_readers(mailbox, [0], reader)
    mailbox.release([0])
    readers[first_done].is_done = True
    assert mailbox.num_free == 3
    readers[1 - first_done].is_done = True
    assert mailbox.num_free == 4


def test_accept_after_the_last_reader_is_done(mailbox, row):
    """Guards a caller with slot numbers of its own: the next tenant's record is taken once the reader is done."""
    reader = FakeMarker()
    mailbox.put(0, 5, **row)
    note_readers(mailbox, [0], reader)
    mailbox.release([0])
    reader.is_done = True
    write_record(mailbox, 0, 6, row)
    mailbox.accept([0], [6])
    assert gather(mailbox, [0], [6]).num_rows == 1


def test_not_full_when_a_released_slot_is_done(mailbox, row):
    """Guards against a false "full": slots that were taken by number and freed since are handed out."""
    reader = FakeMarker()
    for slot in range(4):
        mailbox.put(slot, 5, **row)
    note_readers(mailbox, [3], reader)
    mailbox.release([3])
    reader.is_done = True
    assert mailbox.acquire() == 3


# -- views, memory, threads


def test_view(mailbox, row, fields):
    """Guards `view`: [num_slots, width] of one field, over the records themselves."""
    mailbox.put(3, 5, **row)
    for field in fields:
        view = mailbox.view(field.name)
        assert (view.shape, view.dtype) == ((4, field.width), field.dtype)
        assert view.stride() == (128 // field.dtype.itemsize, 1)
        assert_bytes(view[3], raw(row[field.name]))
        assert not raw(view[:3]).any()


def test_no_cuda_without_pinning(fields, monkeypatch):
    """Guards fork safety: a mailbox with pin_memory=False asks CUDA nothing."""

    def touched(*_args, **_kwargs):
        raise AssertionError("touched CUDA")

    for name in ("is_available", "device_count", "current_device", "init", "_lazy_init", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, touched)
    mailbox = dg.DraftMailbox(fields, 2, pin_memory=False)
    mailbox.put(mailbox.acquire(), 1, **row_of(zero_rows(fields, 1), 0))
    assert not mailbox.is_pinned
    mailbox.release([0])


def test_threads_put_different_slots(fields):
    """Guards against lost tags and mixed rows when transfer threads put at once."""
    num_slots, num_threads = 64, 4
    rows = random_rows(fields, num_slots, seed=3)
    mailbox = dg.DraftMailbox(fields, num_slots, pin_memory=False)
    slots: dict[int, int] = {}
    errors: list[Exception] = []

    def work(numbers: range) -> None:
        try:
            for i in numbers:
                slots[i] = mailbox.acquire()
                mailbox.put(slots[i], 1000 + i, **row_of(rows, i))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(range(t, num_slots, num_threads),)) for t in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(slots.values()) == list(range(num_slots))
    batch = gather(mailbox, [slots[i] for i in range(num_slots)], [1000 + i for i in range(num_slots)])
    for field in fields:
        assert_bytes(batch.tensors[field.name], stacked(field, rows[field.name], num_slots), field.name)


@pytest.mark.parametrize("num_slots", [0, -1, 1.5, True])
def test_number_of_slots(fields, num_slots):
    """Guards against a mailbox without slots."""
    with pytest.raises(ValueError, match="num_slots"):
        dg.DraftMailbox(fields, num_slots)


def test_fingerprint_tells_field_lists_apart():
    """Guards against prefill and decode with different fields: every difference changes the layout word."""
    a = dg.Field("a", 4, torch.int32)
    lists = [
        (a,),
        (dg.Field("b", 4, torch.int32),),
        (dg.Field("a", 5, torch.int32),),
        (dg.Field("a", 4, torch.float32),),
        (dg.Field("a", 4, torch.int32, optional=True),),
        (a, dg.Field("b", 1, torch.int32)),
        (dg.Field("b", 1, torch.int32), a),
    ]
    fingerprints = [dg.DraftMailbox(fields, 1, pin_memory=False).layout.fingerprint for fields in lists]
    assert len(set(fingerprints)) == len(lists)
    assert all(0 < fingerprint < 2**55 for fingerprint in fingerprints)
    assert dg.DraftMailbox(lists[0], 9, pin_memory=False).layout.fingerprint == fingerprints[0]


def test_errors_survive_a_process_boundary(fields):
    """Guards against an error that cannot be pickled: schedulers are processes."""
    mailbox = written_mailbox(fields, random_rows(fields, 1), 2)
    with pytest.raises(dg.SlotError) as error:
        gather(mailbox, [0, 1], [1, 2])
    copy = pickle.loads(pickle.dumps(error.value))
    assert type(copy) is dg.SlotError
    assert copy.problems == error.value.problems
    assert len(copy.problems) == 2
    assert str(copy) == str(error.value)


def test_the_callers_slots_may_change_after_the_call(mailbox, row):
    """Guards a slot that a launch reads against a caller who fills his index array anew for the next batch."""
    mailbox.put(0, 1, **row)
    mailbox.put(1, 1, **row)
    slots, reader = np.array([0]), FakeMarker()
    mailbox.end_read(mailbox.begin_read(slots), reader)
    slots[0] = 1
    mailbox.release([0, 1])
    assert mailbox.num_free == 3
    reader.is_done = True
    assert mailbox.num_free == 4


def test_readers_that_are_done_are_let_go_of(mailbox, row):
    """Guards memory, where one launch never ends: those behind it are dropped all the same."""
    mailbox.put(0, 1, **row)
    note_readers(mailbox, [0], FakeMarker())
    for _ in range(500):
        done = FakeMarker()
        done.is_done = True
        note_readers(mailbox, [0], done)
    assert len(mailbox._readers) < 100
    mailbox.release(0)
    assert mailbox.num_free == 3


class Reentrant(FakeMarker):
    """A marker in whose query a finalizer runs, once."""

    def __init__(self, finalize: Callable[[], None]) -> None:
        super().__init__()
        self._finalize = [finalize]

    def query(self) -> bool:
        if self._finalize:
            self._finalize.pop()()
        return self.is_done


def test_a_finalizer_inside_of_a_query_drops_no_reader(mailbox, row):
    """Guards a slot that a launch reads: the first reader is done, and let go of by the finalizer already."""
    for slot in range(3):
        mailbox.put(slot, slot, **row)
    done, running = Reentrant(lambda: mailbox.release(2)), FakeMarker()
    done.is_done = True
    mailbox._readers.append(mailbox_module._Reader(1, done, np.array([0])))
    mailbox._readers.append(mailbox_module._Reader(2, running, np.array([1])))
    mailbox._last_reader[:3] = [1, 2, 2]
    mailbox.release(0)
    mailbox.release(1)
    assert mailbox.states[1] == mailbox_module.DRAINING
    running.is_done = True
    assert mailbox.num_free == 4


def test_a_slot_released_inside_of_its_own_put(mailbox, row):
    """Guards a row that is put into a slot which a finalizer releases meanwhile: refused, not freed when written."""
    mailbox.put(0, 1, **row)

    def finalize() -> None:
        mailbox.release(0)
        reader.is_done = True

    reader = Reentrant(finalize)
    mailbox._readers.append(mailbox_module._Reader(1, reader, np.array([0])))
    mailbox._last_reader[0] = 1
    with pytest.raises(dg.SlotError, match="was released while its row was put"):
        mailbox.put(0, 1, **row)
    assert mailbox.num_free == 4
