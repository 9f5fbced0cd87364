"""One row's value: what is taken, what is converted exactly, and what is refused by name before any write."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import draftgather as dg
from helpers import (
    EXACT,
    FIELD_LISTS,
    FakeMarker,
    Poisoned,
    assert_batch,
    note_readers,
    random_rows,
    row_of,
    written_mailbox,
    zero_rows,
)

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
PAIRS = list(itertools.permutations(DTYPES, 2))
EXACT_PAIRS = [(source, target) for source, targets in EXACT.items() for target in sorted(targets, key=str)]


def values_of(dtype: torch.dtype) -> torch.Tensor:
    """The smallest, the largest and a few others, by hand for each dtype."""
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        numbers = [info.min, info.max, info.smallest_normal, info.smallest_normal * info.eps, -0.0, float("inf"), 1.5]
        return torch.tensor(numbers, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([info.min, info.max, 0, 1, info.max - 1, info.min + 1, 7], dtype=dtype)


# -- conversions


@pytest.mark.parametrize(("source", "target"), EXACT_PAIRS, ids=str)
def test_exact_conversions(machine, source, target):
    """Guards conversions that keep every value: the ends of the range, subnormals, -0.0, in every route."""
    values = values_of(source)
    if machine.has_kernel and source is torch.bfloat16:
        # Triton's interpreter, not the kernel, takes bfloat16's subnormals for zero.
        values[3] = -1.0
    expected = np.array(values.tolist(), dtype=np.dtype(str(target).removeprefix("torch.")))
    field = dg.Field("a", 7, target)
    mailbox = dg.DraftMailbox([field], 2, pin_memory=False)
    mailbox.put(0, 0, a=values)
    assembler = dg.DraftAssembler([field], mailbox=mailbox, machine=machine)
    future_map = dg.FutureMap([field], 4, machine=machine)
    relay = dg.Relay(future_map, torch.tensor([1, 2]), torch.tensor([1, 1]), torch.tensor([1, 1]))
    batch = assembler.assemble_rows(a=[values, values], relay=relay)
    for got in (batch.tensors["a"], future_map.buffers["a"][1:3], mailbox.view("a")[:1].expand(2, 7)):
        assert got.numpy().tobytes() == expected.tobytes() * 2


@pytest.mark.parametrize(
    ("source", "target"), [pair for pair in PAIRS if pair[1] not in EXACT.get(pair[0], ())], ids=str
)
def test_other_conversions_are_refused(source, target):
    """Guards against drift between prefill and decode that nobody sees."""
    field = dg.Field("a", 3, target)
    rig = Poisoned([field], None)
    rows = [torch.zeros(3, dtype=target), torch.zeros(3, dtype=source)]
    message = rf"request 'b': a has dtype {source}, expected {target} \(or Field"
    with pytest.raises(dg.RowDtypeError, match=message) as error:
        rig.assembler.assemble_rows(["a", "b"], a=rows, relay=rig.relay(2))
    assert [(p.position, p.request_id, p.field, p.error) for p in error.value.problems] == [
        (1, "b", "a", dg.RowDtypeError)
    ]
    rig.assert_untouched()
    with pytest.raises(dg.RowDtypeError, match=f"has dtype {source}"):
        dg.DraftMailbox([field], 1, pin_memory=False).put(0, 0, a=rows[1])


@pytest.mark.parametrize("row", [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float64)], ids=str)
def test_exact_fields_convert_nothing(row):
    """Guards what must be the engine's own bytes: not even a conversion that loses nothing."""
    field = dg.Field("a", 3, torch.float32, exact=True)
    problems = dg.DraftAssembler([field]).check_rows(a=[torch.zeros(3), row])
    assert [(p.position, p.error, p.expected) for p in problems] == [(1, dg.RowDtypeError, "torch.float32")]
    with pytest.raises(ValueError, match="exact and allow_cast exclude"):
        dg.Field("a", 3, torch.float32, exact=True, allow_cast=True)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_allow_cast(machine, source, target):
    """Guards the permission: with allow_cast any dtype is converted as torch converts it, wherever the rows are."""
    if machine.has_kernel and target is torch.bfloat16:
        pytest.skip("Triton's interpreter does not convert to bfloat16 as a device does")
    field = dg.Field("a", 6, target, allow_cast=True)
    row = torch.tensor([0, 1, 2, 3, 100, 1], dtype=torch.int64).to(source)
    if source.is_floating_point and target.is_floating_point:
        row = torch.tensor([0.1, -0.0, 60000, 1 / 3, 1e-4, 3.0], dtype=torch.float64).to(source)
    expected = row.to(target).view(torch.uint8).tolist()
    batch = dg.DraftAssembler([field], machine=machine).assemble_rows(a=[row, row])
    assert batch.tensors["a"].view(torch.uint8).tolist() == [expected] * 2


def test_rows_of_several_dtypes(machine):
    """Guards a batch whose prefill nodes send different dtypes: each row is converted from its own."""
    field = dg.Field("a", 2, torch.float32)
    rows = [torch.tensor([1.5, 2], dtype=dtype) for dtype in (torch.float16, torch.float32, torch.bfloat16)]
    batch = dg.DraftAssembler([field], machine=machine).assemble_rows(a=[*rows, [1.5, 2], np.array([1.5, 2], "f4")])
    assert batch.tensors["a"].view(torch.int32).tolist() == [[0x3FC00000, 0x40000000]] * 5


# -- rows that are not tensors


def test_lists_and_arrays(machine):
    """Guards numbers that pass through Python: ids above 2**53, -0.0, bools, NumPy scalars."""
    fields = (dg.Field("a", 2, torch.int64), dg.Field("b", 2, torch.float32), dg.Field("c", 1, torch.bool))
    big = 2**53 + 1
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(
        a=[[big, -1], (np.int64(big), np.int32(-1)), np.array([big, -1]), np.array([-1, big])[::-1]],
        b=[[-0.0, 1], [np.float64(-0.0), 1.0], np.array([-0.0, 1], np.float32), np.array([1, -0.0], np.float32)[::-1]],
        c=[[True], (np.bool_(True),), np.array([True]), torch.tensor([True])],
    )
    assert batch.tensors["a"].tolist() == [[big, -1]] * 4
    assert batch.tensors["b"].view(torch.int32).tolist() == [[-(2**31), 0x3F800000]] * 4
    assert batch.tensors["c"].view(torch.uint8).tolist() == [[1]] * 4
    assert batch.route == "staged"


def test_read_only_arrays(machine):
    """Guards rows straight out of a message's bytes: they are only read, without a word of warning."""
    row = np.frombuffer(np.array([5, -6]).tobytes(), np.int64)
    field = dg.Field("a", 2, torch.int64)
    mailbox = dg.DraftMailbox([field], 1, pin_memory=False)
    mailbox.put(0, 0, a=row)
    assembler = dg.DraftAssembler([field], mailbox=mailbox, machine=machine)
    assert assembler.assemble_rows(a=[row]).tensors["a"].tolist() == [[5, -6]]
    assert assembler.assemble_slots([0]).tensors["a"].tolist() == [[5, -6]]


NOT_ROWS = {
    "float for an id": ([1.5, 2], "holds 1.5", torch.int64),
    "bool for an id": ([True, 2], "holds True", torch.int64),
    "int for a mask": ([1, 0], "holds 1", torch.bool),
    "text": (["1", "2"], "holds '1'", torch.int64),
    "nested": ([[1], [2]], r"holds \[1\]", torch.int64),
    "none inside": ([1, None], "holds None", torch.int64),
    "too large": ([1, 2**63], r"does not fit", torch.int64),
    "too large for a byte": ([1, 300], r"does not fit", torch.uint8),
    "string": ("12", "is a str", torch.int64),
    "number": (3, "is a int", torch.int64),
    "object array": (np.array([1, None]), "has NumPy dtype object", torch.int64),
    "complex array": (np.array([1j, 2]), "complex128", torch.float64),
}


@pytest.mark.parametrize("kind", NOT_ROWS)
def test_things_that_are_no_rows(machine, kind):
    """Guards against numbers that are cut down in silence: 1.5 as an id, 300 in a byte, True as 1."""
    value, got, dtype = NOT_ROWS[kind]
    field = dg.Field("a", 2, dtype)
    rig = Poisoned([field], machine)
    with pytest.raises(dg.RowDtypeError, match=rf"request 'x': a .*{got}") as error:
        rig.assembler.assemble_rows(["w", "x"], a=[torch.zeros(2, dtype=dtype), value], relay=rig.relay(2))
    assert [problem.position for problem in error.value.problems] == [1]
    rig.assert_untouched()


# -- bad rows


def _other_width(field: dg.Field, width: int) -> torch.Tensor:
    return torch.zeros(width, dtype=field.dtype)


# field, row -> bad row; the error, what came and what was expected.
BAD_ROWS = {
    "missing": (lambda f: None, dg.MissingRowError, "is missing", "a row of 24 torch.bfloat16"),
    "narrower": (lambda f: _other_width(f, 23), dg.RowShapeError, r"has shape \(23,\)", r"\(24,\)"),
    "wider": (lambda f: _other_width(f, 25), dg.RowShapeError, r"has shape \(25,\)", r"\(24,\)"),
    "auxiliary": (lambda f: _other_width(f, 72), dg.RowShapeError, r"has shape \(72,\)", r"\(24,\) \(three times"),
    "empty": (lambda f: _other_width(f, 0), dg.RowShapeError, r"has shape \(0,\)", r"\(24,\)"),
    "rank 2": (lambda f: _other_width(f, 24)[None], dg.RowShapeError, r"has shape \(1, 24\)", r"\(24,\)"),
    "rank 0": (lambda f: _other_width(f, 1)[0], dg.RowShapeError, r"has shape \(\)", r"\(24,\)"),
    "short list": (lambda f: [1.0], dg.RowShapeError, r"has shape \(1,\)", r"\(24,\)"),
    "dtype": (lambda f: torch.zeros(24), dg.RowDtypeError, "has dtype torch.float32", "torch.bfloat16"),
    "device": (lambda f: _other_width(f, 24).to("meta"), dg.RowDeviceError, "is on meta", "a row on cpu"),
    "sparse": (lambda f: _other_width(f, 24).to_sparse(), dg.MissingRowError, "has no storage", "a row of 24"),
    "freed": (lambda f: _freed(f), dg.MissingRowError, "has no storage", "a row of 24"),
}


def _freed(field: dg.Field) -> torch.Tensor:
    """A tensor whose storage is gone: reading it would crash the process."""
    row = torch.zeros(field.width, dtype=field.dtype)
    row.untyped_storage().resize_(0)
    return row


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_bad_rows(machine, fields, bad):
    """Guards every kind of bad row: class, request, field, got and expected, all bad rows, and nothing written."""
    make, error_class, got, expected = BAD_ROWS[bad]
    rig = Poisoned(fields, machine)
    rows = random_rows(fields, 4)
    for i in (0, 2):
        rows["hidden_states"][i] = make(fields[2])
    ids = ["a0", "b1", "c2", "d3"]
    with pytest.raises(error_class, match=rf"request 'a0': hidden_states {got}.*, expected {expected}") as error:
        rig.assembler.assemble_rows(ids, relay=rig.relay(4), **rows)
    assert type(error.value) is error_class
    problems = [(p.position, p.request_id, p.field, p.error) for p in error.value.problems]
    assert problems == [(i, ids[i], "hidden_states", error_class) for i in (0, 2)]
    assert "request 'c2'" in str(error.value)
    rig.assert_untouched()
    assert tuple(rig.assembler.check_rows(ids, **rows)) == error.value.problems


def test_bad_rows_of_several_kinds(machine, fields):
    """Guards against the first kind of fault hiding the others: the root class, every problem, in batch order."""
    rig = Poisoned(fields, machine)
    rows = random_rows(fields, 4)
    rows["topk_p"][3] = None
    rows["topk_index"][1] = torch.zeros(5, dtype=torch.int64)
    rows["hidden_states"][1] = torch.zeros(24)
    with pytest.raises(dg.DraftRowError, match="row 1: topk_index has shape") as error:
        rig.assembler.assemble_rows(relay=rig.relay(4), **rows)
    assert type(error.value) is dg.DraftRowError
    assert [(p.position, p.field, p.error) for p in error.value.problems] == [
        (1, "topk_index", dg.RowShapeError),
        (1, "hidden_states", dg.RowDtypeError),
        (3, "topk_p", dg.MissingRowError),
    ]
    assert rig.assembler.check_rows(**random_rows(fields, 4)) == []
    rig.assert_untouched()


def test_many_bad_rows(fields):
    """Guards the message's length, and the list's completeness."""
    rows = {**random_rows(fields, 20), "topk_p": [None] * 20}
    with pytest.raises(dg.MissingRowError, match="; and 12 more") as error:
        dg.DraftAssembler(fields).assemble_rows(**rows)
    assert [problem.position for problem in error.value.problems] == list(range(20))


def test_missing_list_of_rows(machine, fields):
    """Guards a field that is left out: every request's row is missing, by name, and check_rows says the same."""
    rig = Poisoned(fields, machine)
    rows = random_rows(fields, 2)
    del rows["topk_index"]
    with pytest.raises(dg.MissingRowError, match="topk_index") as error:
        rig.assembler.assemble_rows(["a", "b"], relay=rig.relay(2), **rows)
    rig.assert_untouched()
    assert [(p.position, p.request_id) for p in error.value.problems] == [(0, "a"), (1, "b")]
    assert tuple(rig.assembler.check_rows(["a", "b"], **rows)) == error.value.problems


@pytest.mark.parametrize("change", [{"topk": [1, 2]}, {"topk_p": [torch.zeros(4)]}], ids=["unknown", "lengths"])
def test_lists_that_do_not_fit(machine, fields, change):
    """Guards a misspelt field, and lists of different lengths: rows would be another request's."""
    rig = Poisoned(fields, machine)
    rows = {**random_rows(fields, 2), **change}
    for call in (
        lambda: rig.assembler.assemble_rows(relay=rig.relay(2), **rows),
        lambda: rig.assembler.check_rows(**rows),
    ):
        with pytest.raises(ValueError, match=r"unknown fields|different numbers of rows"):
            call()
    rig.assert_untouched()


# -- bad slots


def slots_rig(fields, machine) -> Poisoned:
    """Slots 0, 1 and 7 written (owners 100, 101 and 107), 2 held, 3 and 5 released, 4 too, but it is still read."""
    rows = random_rows(fields, 8)
    mailbox = dg.DraftMailbox(fields, 8, pin_memory=False)
    for slot in (0, 1, 3, 4, 5, 7):
        mailbox.put(slot, 100 + slot, **row_of(rows, slot))
    assert mailbox.acquire() == 2
    note_readers(mailbox, [4], FakeMarker())
    mailbox.release([3, 4, 5])
    return Poisoned(fields, machine, mailbox)


BAD_SLOTS = {
    "below": (-1, 107, "is -1", "0 to 7"),
    "above": (8, 0, "is 8", "0 to 7"),
    "far above": (2**40, 0, "is 1099511627776", "0 to 7"),
    "held": (2, 7, "is 2, which is not written yet", "a written slot"),
    "free": (3, 103, "is 3, which is free", "a written slot"),
    "draining": (4, 104, "is 4, which is released", "a written slot"),
    "owner": (0, 999, "is 0, which is owned by 100", "owner 999"),
}


@pytest.mark.parametrize("bad", BAD_SLOTS)
def test_bad_slots(machine, fields, bad):
    """Guards against another request's record: each state has its own answer, all bad slots are listed."""
    slot, owner, got, expected = BAD_SLOTS[bad]
    rig = slots_rig(fields, machine)
    slots, owners, ids = [slot, 1, slot], [owner, 101, owner], ["x", "y", "z"]
    with pytest.raises(dg.SlotError, match=f"request 'x': slot {got}.*, expected {expected}") as error:
        rig.assembler.assemble_slots(slots, owners, ids, relay=rig.relay(3))
    problems = [(p.position, p.request_id, p.field, p.error) for p in error.value.problems]
    assert problems == [(i, ids[i], "slot", dg.SlotError) for i in (0, 2)]
    rig.assert_untouched()
    assert tuple(rig.assembler.check_slots(slots, owners, ids)) == error.value.problems
    assert rig.assembler.check_slots([0, 1], [100, 101]) == []


@pytest.mark.parametrize(
    ("slots", "owners"),
    [
        ([0, 1], [100]),
        ([0], [100, 101]),
        ([0.0], None),
        ([[0]], None),
        (["0"], None),
        ([True], None),
        ([0], [1.5]),
        ([2**64 - 1], None),
        (torch.zeros(1, dtype=torch.int64, device="meta"), None),
    ],
    ids=str,
)
def test_slot_lists_that_do_not_fit(machine, fields, slots, owners):
    """Guards slots and owners that are no integers, or not as many: check_slots refuses them just as well."""
    rig = slots_rig(fields, machine)
    with pytest.raises((ValueError, TypeError), match=r"owners|slots"):
        rig.assembler.assemble_slots(slots, owners, relay=rig.relay(1))
    with pytest.raises((ValueError, TypeError), match=r"owners|slots"):
        rig.assembler.check_slots(slots, owners)
    rig.assert_untouched()


@pytest.mark.parametrize(("slot", "owner"), [(1199, 7), (-1, 0), (1200, 0), (1198, 0)])
def test_bad_slot_in_a_large_batch(slot, owner):
    """Guards the same checks where the batch is large, and they go another way."""
    field = dg.Field("a", 1, torch.int64)
    mailbox = dg.DraftMailbox([field], 1200, pin_memory=False)
    for i in range(1200):
        mailbox.put(i, 0, a=[i])
    mailbox.release([1198])
    assembler = dg.DraftAssembler([field], max_batch_size=2048, mailbox=mailbox)
    slots = [*range(1100), slot]
    with pytest.raises(dg.SlotError, match=f"row 1100: slot is {slot}") as error:
        assembler.assemble_slots(slots, [0] * 1100 + [owner])
    assert len(error.value.problems) == 1
    batch = assembler.assemble_slots(slots[:-1], [0] * 1100)
    assert batch.tensors["a"][:, 0].tolist() == slots[:-1]


# -- wider rows, and debug mode


def test_leading_columns(machine):
    """Guards sglang's 16-wide metadata rows: the first columns count, and a narrower row is refused."""
    field = dg.Field("a", 3, torch.int64, leading=True)
    assembler = dg.DraftAssembler([field], machine=machine)
    wide = [torch.arange(16), torch.arange(100, 105), [7, 8, 9, 10], np.arange(3)]
    expected = [[0, 1, 2], [100, 101, 102], [7, 8, 9], [0, 1, 2]]
    assert assembler.assemble_rows(a=wide).tensors["a"].tolist() == expected
    assert assembler.assemble_rows(a=wide[:1] * 2).tensors["a"].tolist() == [[0, 1, 2]] * 2
    with pytest.raises(dg.RowShapeError, match=r"row 1: a has shape \(2,\), expected \(3,\) or wider"):
        assembler.assemble_rows(a=[wide[0], torch.arange(2)])
    mailbox = dg.DraftMailbox([field], 1, pin_memory=False)
    mailbox.put(0, 0, a=wide[0])
    assert mailbox.view("a").tolist() == [[0, 1, 2]]


def good_values(fields, num_rows: int) -> dict[str, list[torch.Tensor]]:
    return {f.name: [torch.full((f.width,), i + 1).to(f.dtype) for i in range(num_rows)] for f in fields}


BAD_VALUES = {
    "nan": ("topk_p", float("nan"), "topk_p holds nan, expected finite probabilities"),
    "infinite": ("topk_p", float("-inf"), "topk_p holds -inf, expected finite probabilities"),
    "too large": ("topk_index", 1000, "topk_index holds the id 1000, expected ids from 0 to 999"),
    "negative": ("topk_index", -1, "topk_index holds the id -1, expected ids from 0 to 999"),
}


@pytest.mark.parametrize("way", ["rows", "slots"])
@pytest.mark.parametrize("bad", BAD_VALUES)
def test_debug_looks_at_values(machine, fields, bad, way):
    """Guards the engine against device asserts: broken values are named before the launch, in debug mode only."""
    name, value, message = BAD_VALUES[bad]
    rows = good_values(fields, 3)
    rows[name][1][-1] = value
    rig = Poisoned(fields, machine, written_mailbox(fields, rows, 3))

    def assemble(**more):
        if way == "rows":
            return rig.assembler.assemble_rows(["a", "b", "c"], **more, **rows)
        return rig.assembler.assemble_slots([0, 1, 2], request_ids=["a", "b", "c"], **more)

    rig.assembler.debug = True
    with pytest.raises(dg.RowValueError, match=f"request 'b': {message}") as error:
        assemble(relay=rig.relay(3))
    assert len(error.value.problems) == 1
    rig.assert_untouched()
    rig.assembler.debug = False
    assert_batch(assemble(), fields, rows)


@pytest.mark.parametrize("way", ["rows", "slots"])
def test_debug_finds_rows_that_were_never_written(machine, fields, way):
    """Guards against a row of zeros: nobody wrote it."""
    rows = good_values(fields, 3)
    for name, of_field in zero_rows(fields, 1).items():
        rows[name][2] = of_field[0]
    rig = Poisoned(fields, machine, written_mailbox(fields, rows, 3))
    rig.assembler.debug = True
    assemble, what = {
        "rows": (rig.assembler.assemble_rows, rows),
        "slots": (rig.assembler.assemble_slots, {"slots": [0, 1, 2]}),
    }[way]
    with pytest.raises(dg.MissingRowError, match="row 2: row is zero in every field: never written"):
        assemble(relay=rig.relay(3), **what)
    rig.assert_untouched()


def test_debug_does_not_look_at_absent_fields(machine):
    """Guards against the former tenant's values held against a record that has none."""
    fields = (dg.Field("hidden_states", 2, torch.int32), dg.Field("topk_p", 2, torch.float32, optional=True))
    mailbox = dg.DraftMailbox(fields, 1, pin_memory=False)
    mailbox.put(0, 1, hidden_states=[1, 2], topk_p=[float("nan"), 1.0])
    mailbox.release([0])
    mailbox.put(0, 2, hidden_states=[3, 4])
    batch = dg.DraftAssembler(fields, mailbox=mailbox, debug=True, machine=machine).assemble_slots([0], [2])
    assert batch.tensors["hidden_states"].tolist() == [[3, 4]]


@pytest.mark.parametrize("which", FIELD_LISTS)
def test_debug_lets_good_rows_pass(machine, which):
    """Guards against a debug mode that refuses what is right, in any field list."""
    fields = FIELD_LISTS[which]
    rows = good_values(fields, 2)
    mailbox = written_mailbox(fields, rows, 2)
    assembler = dg.DraftAssembler(fields, mailbox=mailbox, debug=True, vocab_size=100, machine=machine)
    assert_batch(assembler.assemble_rows(**rows), fields, rows)
    assert_batch(assembler.assemble_slots([0, 1]), fields, rows)
