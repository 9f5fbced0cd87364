"""What attempts to break the package found: each is kept here, with the fault that it guards against."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch

import draftgather as dg
from draftgather import mailbox as mailbox_module
from helpers import write_record

FIELDS = dg.eagle_fields(4, 64, torch.bfloat16)


def a_row(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "topk_p": torch.full((4,), value),
        "topk_index": torch.full((4,), int(value)),
        "hidden_states": torch.full((64,), value, dtype=torch.bfloat16),
    }


def a_view(shrink_to: int) -> torch.Tensor:
    base = torch.zeros(10, 64, dtype=torch.bfloat16)
    view = base[3]
    base.untyped_storage().resize_(shrink_to)
    return view


def test_view_of_freed_storage(machine):
    """Guards against a crash: such a view has its offset as its address, not zero."""
    row = a_row() | {"hidden_states": a_view(0)}
    with pytest.raises(dg.MissingRowError, match="has no storage"):
        dg.DraftAssembler(FIELDS, machine=machine).assemble_rows(**{name: [value] for name, value in row.items()})
    with pytest.raises(dg.MissingRowError, match="has no storage"):
        dg.DraftMailbox(FIELDS, 1).put(0, 1, **row)


def test_freed_vectors_are_not_relayed(machine):
    """Guards against lengths out of memory that is somebody else's by now."""
    future_map = dg.FutureMap(FIELDS, 8, machine=machine)
    freed = torch.arange(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(dg.RelayError, match="seq_lens has no storage"):
        future_map.publish(torch.arange(1, 4), freed)
    hidden = torch.zeros(3, 64, dtype=torch.bfloat16)
    hidden.untyped_storage().resize_(0)
    given = dg.EagleDraftInput(torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64), hidden, torch.arange(3))
    with pytest.raises(dg.RelayError, match="hidden_states has no storage"):
        future_map.stash(torch.arange(1, 4), given)


def test_lists_under_a_default_device():
    """Guards against a list's tensor on a device that the program made its default."""
    mailbox = dg.DraftMailbox(FIELDS, 1)
    torch.set_default_device("meta")
    try:
        mailbox.put(0, 1, topk_p=[0.5] * 4, topk_index=[1, 2, 3, 4], hidden_states=[2.0] * 64)
    finally:
        torch.set_default_device(None)
    assert mailbox.view("topk_index")[0].tolist() == [1, 2, 3, 4]


def test_invalid_rows_stay_invalid_when_stashed_again(machine):
    """Guards against a missing seed that becomes a real one: resolve, then stash the same draft input."""
    fields = (*FIELDS, dg.Field("seed", 2, torch.int32, optional=True))
    future_map = dg.FutureMap(fields, 8, machine=machine)
    rows = {name: [value, value] for name, value in a_row().items()} | {
        "seed": [torch.ones(2, dtype=torch.int32), None]
    }
    indices = torch.tensor([3, 5])
    relay = dg.Relay(future_map, indices, indices, indices)
    dg.DraftAssembler(fields, machine=machine).assemble_rows(relay=relay, **rows)
    batch = dg.ScheduleBatch([], "cpu", indices, indices, spec_info=dg.EagleDraftInput(future_indices=indices))
    future_map.resolve(batch)
    future_map.stash(indices, batch.spec_info)
    assert future_map.valid["seed"][indices].tolist() == [True, False]


def test_merge_keeps_validity():
    """Guards against a merge outside overlap that forgets which rows are real."""
    inputs = [dg.EagleDraftInput(bonus_tokens=torch.arange(2), extras={"seed": torch.ones(2, 2)}) for _ in range(2)]
    inputs[1].valid["seed"] = torch.tensor([True, False])
    inputs[0].merge_batch(inputs[1])
    assert inputs[0].valid["seed"].tolist() == [True, True, True, False]


@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps])
def test_future_map_is_not_copied(make):
    """Guards against a copy whose tensors and bytes are two memories."""
    with pytest.raises(TypeError, match="fixed addresses"):
        make(dg.FutureMap(FIELDS, 4))


@pytest.mark.parametrize("num_rows", [2, 8, 20])
def test_rows_of_the_previous_batch(machine, num_rows):
    """Guards against rows that are overwritten before they are read: fixed outputs, fed back reversed."""
    assembler = dg.DraftAssembler(FIELDS, max_batch_size=32, outputs="fixed", machine=machine)
    rows = [a_row(float(i)) for i in range(num_rows)]
    first = assembler.assemble_rows(**{name: [row[name] for row in rows] for name in rows[0]})
    second = assembler.assemble_rows(**{name: list(tensor.flip(0)) for name, tensor in first.tensors.items()})
    third = assembler.assemble_rows(
        **{name: [tensor[i] for i in reversed(range(num_rows))] for name, tensor in second.tensors.items()}
    )
    assert third.tensors["topk_index"][:, 0].tolist() == list(range(num_rows))


def test_absent_rows_of_any_dtype(machine):
    """Guards dtypes for which torch has no masked fill."""
    fields = (dg.Field("ids", 2, torch.int64), dg.Field("wide", 3, torch.uint64, optional=True))
    rows = {"ids": [torch.ones(2, dtype=torch.int64)] * 2, "wide": [None, torch.ones(3, dtype=torch.uint64)]}
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(pad_to=3, **rows)
    assert batch.present == {"ids": True, "wide": False}


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        (torch.uint8, [-1, 0]),
        (torch.uint8, [256, 0]),
        (torch.float32, [2**24 + 1, 0]),
        (torch.float16, [1e10, 0.0]),
        (torch.float32, [1e300, 0.0]),
    ],
)
def test_lists_that_a_dtype_cannot_hold(dtype, row):
    """Guards against numbers that wrap around, lose bits or become infinite in silence."""
    problems = dg.DraftAssembler((dg.Field("x", 2, dtype),)).check_rows(x=[row])
    assert [problem.error for problem in problems] == [dg.RowDtypeError]


@pytest.mark.parametrize("source", [torch.complex64, torch.float8_e4m3fn, torch.uint32])
def test_casts_that_the_kernel_lacks_are_refused(source, machine):
    """Guards against an imaginary part that is dropped, and a cast that only the twin can do."""
    fields = (dg.Field("x", 2, torch.float32, allow_cast=True),)
    with pytest.raises(dg.RowDtypeError, match="has dtype"):
        dg.DraftAssembler(fields, machine=machine).assemble_rows(x=[torch.zeros(2, dtype=source)])


def test_unknown_presence_bits():
    """Guards against a layout word with bits for fields that this list does not have."""
    mailbox = dg.DraftMailbox(FIELDS, 1)
    mailbox.put(0, 7, **a_row())
    mailbox._tags[0, 2] |= 1
    with pytest.raises(dg.SlotError, match="foreign layout"):
        mailbox.accept([0], [7])


@pytest.mark.parametrize("name", ["relay", "pad_to", "batch_outputs", "request_ids", "slot", "owner", "self"])
def test_names_that_cannot_be_passed(name):
    """Guards against a field that no call could be given."""
    with pytest.raises(ValueError, match="not a free identifier"):
        dg.Field(name, 1, torch.int64)


def test_release_during_put(monkeypatch):
    """Guards against a slot of the next tenant that the former one's put calls written."""
    mailbox = dg.DraftMailbox(FIELDS, 1)
    slot = mailbox.acquire()
    real_move, moving, go_on = mailbox_module._memmove, threading.Event(), threading.Event()

    def slow_move(*arguments: int) -> None:
        moving.set()
        assert go_on.wait(10)
        real_move(*arguments)

    monkeypatch.setattr(mailbox_module, "_memmove", slow_move)
    caught: list[BaseException] = []

    def put() -> None:
        try:
            mailbox.put(slot, 7, **a_row())
        except dg.SlotError as error:
            caught.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    assert moving.wait(10)
    mailbox.release(slot)
    with pytest.raises(dg.MailboxFullError):
        mailbox.acquire()
    go_on.set()
    thread.join(10)
    assert mailbox.acquire() == slot
    assert "released while its row was put" in str(caught[0])
    with pytest.raises(dg.SlotError, match="not written yet"):
        dg.DraftAssembler(FIELDS, mailbox=mailbox).assemble_slots([slot])


@pytest.mark.parametrize("by", ["late write", "torn", "put"])
def test_debug_mode_finds_late_writes(machine, by):
    """Guards a row that an engine overwrote after it was accepted: an aborted request's transfer that goes on."""
    mailbox = dg.DraftMailbox(FIELDS, 1)
    former = mailbox.generation(0)
    mailbox.put(0, 6, **a_row())
    mailbox.release(0)
    write_record(mailbox, 0, 7, a_row())
    mailbox.accept([0], [7])
    assembler = dg.DraftAssembler(FIELDS, mailbox=mailbox, machine=machine, debug=True)
    assert assembler.assemble_slots([0], [7]).num_rows == 1
    if by == "put":  # its owner's own
        mailbox.put(0, 7, **a_row(2.0))
        assert assembler.assemble_slots([0], [7]).tensors["topk_index"].tolist() == [[2] * 4]
        return
    expected = "is of generation 1, expected generation 2"
    if by == "torn":
        write_record(mailbox, 0, 7, a_row(), layout_word=0)
        expected = "is torn"
    else:
        write_record(mailbox, 0, 6, a_row(3.0), generation=former)
    with pytest.raises(dg.SlotError, match=f"request 'a7': the record of slot 0 {expected}"):
        assembler.assemble_slots([0], [7], ["a7"])


def test_peers_of_another_layout_are_told_before_the_first_byte():
    """Guards a transfer between two field lists; what only the reader decides is not part of a layout."""
    layout = dg.RecordLayout.of(FIELDS)
    layout.check_peer(dg.DraftMailbox(FIELDS, 1).layout.fingerprint)
    layout.check_peer(
        dg.RecordLayout.of([dg.Field(f.name, f.width, f.dtype, allow_cast=True) for f in FIELDS]).fingerprint
    )
    for other in (dg.eagle_fields(4, 128), dg.eagle_fields(4, 64, torch.float16), FIELDS[:2], FIELDS[::-1]):
        with pytest.raises(dg.LayoutError, match=r"the peer's records have the layout 0x\w+, these 0x\w+ \(256 bytes"):
            layout.check_peer(dg.RecordLayout.of(other).fingerprint)


@pytest.mark.parametrize("values", [[True, 1], (0, False), [True]])
def test_bools_are_no_slots(values):
    """Guards against a flag that is taken for slot 1."""
    mailbox = dg.DraftMailbox(FIELDS, 2)
    for slot in range(2):
        mailbox.put(slot, slot, **a_row())
    with pytest.raises(TypeError, match="slots"):
        dg.DraftAssembler(FIELDS, mailbox=mailbox).assemble_slots(values)


@pytest.mark.parametrize("shrink_to", [0, 64, 500])
@pytest.mark.parametrize("width", [64, 4096])
def test_rows_of_shrunk_storage(machine, width, shrink_to):
    """Guards against bytes beyond the end of a storage that was made smaller: a whole row, and a view of a pool."""
    fields = (dg.Field("a", width, torch.float64),)
    whole, pool = torch.zeros(width, dtype=torch.float64), torch.zeros(3, width, dtype=torch.float64)
    for row in (whole, pool[2]):
        row.untyped_storage().resize_(shrink_to)
        with pytest.raises(dg.MissingRowError, match="has no storage"):
            dg.DraftAssembler(fields, machine=machine).assemble_rows(a=[torch.zeros(width, dtype=torch.float64), row])
        with pytest.raises(dg.MissingRowError, match="has no storage"):
            dg.DraftMailbox(fields, 1).put(0, 1, a=row)


def test_rows_of_the_future_map_itself(machine):
    """Guards rows that are views of what the same launch relays into: the kernel keeps no order among rows."""
    rows = [a_row(float(i)) for i in range(1, 7)]
    future_map = dg.FutureMap(FIELDS, 8, machine=machine)
    assembler = dg.DraftAssembler(FIELDS, machine=machine)
    count = torch.arange(1, 7)
    relay = dg.Relay(future_map, count, count, count)
    assembler.assemble_rows(relay=relay, **{name: [row[name] for row in rows] for name in rows[0]})
    for _ in range(2):
        views = {name: [buffer[i] for i in reversed(range(1, 7))] for name, buffer in future_map.buffers.items()}
        assembler.assemble_rows(relay=relay, batch_outputs=False, **views)
    assert future_map.buffers["topk_index"][1:7, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert future_map.buffers["hidden_states"][1:7, 63].tolist() == [1, 2, 3, 4, 5, 6]


def test_rows_of_the_future_maps_vectors(machine):
    """Guards rows that are views of the very lengths and tokens which the same launch writes."""
    fields = (dg.Field("ids", 1, torch.int64),)
    for name in ("output_tokens_buf", "new_seq_lens_buf"):
        future_map = dg.FutureMap(fields, 8, machine=machine)
        vector = getattr(future_map, name)
        vector[:] = torch.arange(8) * 100
        relay = dg.Relay(future_map, torch.tensor([2, 1]), torch.tensor([7, 8]), torch.tensor([5, 6]))
        assembler = dg.DraftAssembler(fields, machine=machine)
        batch = assembler.assemble_rows(ids=[vector[1:2], vector[2:3]], relay=relay)
        assert batch.tensors["ids"][:, 0].tolist() == [100, 200]


STRIDED = (dg.Field("a", 4, torch.float32), dg.Field("b", 4, torch.float32, optional=True))


@pytest.mark.parametrize("kind", ["strided", "beside an absent one", "a parameter"])
def test_rows_of_another_fields_fixed_output(machine, kind):
    """Guards rows that lie in an output which is written before they are read."""
    assembler = dg.DraftAssembler(STRIDED, outputs="fixed", max_batch_size=4, machine=machine)
    first = {"a": [torch.arange(4.0), torch.full((4,), 2.0)], "b": [torch.ones(4)] * 2}
    output = assembler.assemble_rows(**first).tensors["a"]
    strided = output.view(-1)[::2]
    rows = {
        "strided": [strided, strided],
        "beside an absent one": [None, output[0]],
        "a parameter": [torch.nn.Parameter(torch.zeros(4)), output[0]],
    }[kind]
    expected = rows[1].tolist()
    future_map = dg.FutureMap(STRIDED, 3, machine=machine)
    vectors = [torch.tensor([1, 2])] * 3
    new = [torch.full((4,), 8.0), torch.full((4,), 9.0)]
    assembler.assemble_rows(a=new, b=rows, relay=dg.Relay(future_map, *vectors))
    assert future_map.buffers["b"][2].tolist() == expected


@pytest.mark.parametrize("slots", [[1, torch.tensor(True)], [1, np.array(True)], (np.True_, 1)])
def test_bools_among_slots(slots):
    mailbox = dg.DraftMailbox(STRIDED, 2, pin_memory=False)
    with pytest.raises(TypeError, match="hold a bool"):
        dg.DraftAssembler(STRIDED, mailbox=mailbox).assemble_slots(slots)


@pytest.mark.parametrize("slots", [[[1]], np.array([[0]]), [{}]])
def test_release_of_what_is_no_slot(slots):
    with pytest.raises(dg.SlotError, match="expected an integer from 0 to 1"):
        dg.DraftMailbox(STRIDED, 2, pin_memory=False).release(slots)
