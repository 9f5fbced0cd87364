"""Big and odd: pools beyond 2**31 bytes and elements, rows at every address, rows as wide as a vocabulary."""

from __future__ import annotations

import array
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import draftgather as dg
from draftgather.machine import Machine
from helpers import (
    Poisoned,
    Rows,
    assert_batch,
    assert_bytes,
    assert_relayed,
    poisoned_map,
    random_row,
    random_rows,
    raw,
    relay_to,
    row_of,
    stacked,
    write_record,
    written_mailbox,
)

# -- pools beyond 2**31


NUM_SLOTS = 320_000
BIG = dg.eagle_fields(topk=4, hidden_size=7168)
RECORD_BYTES = 14_464
# The first slot, the last before and the first behind 2**31 bytes and 2**31 elements, and the last of all.
BYTES, ELEMENTS, LAST = 2**31 // RECORD_BYTES, 2**31 // (RECORD_BYTES // 2), NUM_SLOTS - 1
SLOTS = (LAST, 0, BYTES, BYTES + 1, ELEMENTS, ELEMENTS + 1, LAST - 1)
# The same of the future map, whose rows have no records around them.
INDICES = (2**31 // 7168 + 1, 1, 2**31 // 14_336, 2**31 // 14_336 + 1, 2**31 // 7168, LAST, LAST - 1)


# Where the kernel has one way only, and its interpreter is slow.
TWIN = pytest.mark.parametrize("machine", ["twin"], indirect=True)


def resident_mb() -> float:
    """Memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class BigPool:
    """A mailbox of 4.6 GB of address space, of which a few records are written."""

    mailbox: dg.DraftMailbox
    rows: Rows  # of SLOTS; owner 7 + i
    resident_before: float

    def assert_small(self) -> None:
        grown = resident_mb() - self.resident_before
        assert grown < 200, f"{grown:.0f} MB of memory for a few rows"


@pytest.fixture(scope="module")
def big() -> BigPool:
    before = resident_mb()
    try:
        mailbox = dg.DraftMailbox(BIG, NUM_SLOTS, pin_memory=False)
    except OSError:  # of mmap; a MemoryError of ours is a failure
        pytest.skip("this machine has no 4.6 GB of address space to lend")
    rows = random_rows(BIG, len(SLOTS), seed=320)
    for i, slot in enumerate(SLOTS):
        mailbox.put(slot, 7 + i, **row_of(rows, i))
    return BigPool(mailbox, rows, before)


def big_map(machine: Machine) -> dg.FutureMap:
    """Not poisoned: that would touch all of it. Every row that nothing was written to is zero."""
    try:
        return dg.FutureMap(BIG, NUM_SLOTS, machine=machine)
    except OSError:  # of mmap; a MemoryError of ours is a failure
        pytest.skip("this machine has no 4.6 GB of address space to lend")


def assert_holds(future_map: dg.FutureMap, indices: Sequence[int], rows: Rows) -> None:
    """The rows, lengths 10, 11, ... and tokens 500, 501, ... at `indices`, and zeros beside each."""
    count, where = len(indices), list(indices)
    beside = sorted({i + d for i in indices for d in (-1, 1)} - set(indices) - {NUM_SLOTS})
    for field in BIG:
        table = future_map.buffers[field.name]
        assert_bytes(table[where], stacked(field, rows[field.name], count), field.name)
        assert not raw(table[beside]).any(), f"{field.name} is written beside its rows"
    assert future_map.new_seq_lens_buf[where].tolist() == list(range(10, 10 + count))
    assert future_map.output_tokens_buf[where].tolist() == list(range(500, 500 + count))
    assert not future_map.new_seq_lens_buf[beside].any() and not future_map.output_tokens_buf[beside].any()


def test_the_pool_is_as_large_as_it_says(big: BigPool) -> None:
    """Guards the tests below: their slots lie on both sides of 2**31 bytes and elements."""
    info = big.mailbox.buffer_info()
    assert (info.num_bytes, info.record_bytes) == (4_628_480_000, 14_464)
    assert BYTES * RECORD_BYTES < 2**31 <= (BYTES + 1) * RECORD_BYTES
    assert ELEMENTS * RECORD_BYTES // 2 < 2**31 <= (ELEMENTS + 1) * RECORD_BYTES // 2
    assert INDICES[4] * 7168 <= 2**31 < INDICES[0] * 7168
    assert big.mailbox.view("hidden_states")[LAST].storage_offset() > 2**31
    big.assert_small()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_slots_and_relay_of_a_big_pool(machine: Machine, big: BigPool, dtype: torch.dtype) -> None:
    """Guards against a slot or an index that is multiplied in 32 bits: another row, or none of ours."""
    future_map = big_map(machine)
    relay = relay_to(future_map, INDICES)
    relay = dg.Relay(future_map, relay.future_indices.to(dtype), relay.seq_lens.to(dtype), relay.bonus_tokens.to(dtype))
    assembler = dg.DraftAssembler(BIG, mailbox=big.mailbox, max_batch_size=16, machine=machine)
    owners = [7 + i for i in range(len(SLOTS))]
    batch = assembler.assemble_slots(torch.tensor(SLOTS, dtype=dtype), owners, relay=relay, pad_to=8)
    assert_batch(batch, BIG, big.rows, 8)
    assert_holds(future_map, INDICES, big.rows)
    big.assert_small()


@TWIN
def test_large_gather_of_a_big_pool(machine: Machine, big: BigPool) -> None:
    """Guards the same where a batch is so large that it is gathered in another way: repeated and in reverse."""
    order = [6, 5, 4, 3, 2, 1, 0, 0, 3] * 4
    rows = {name: [given[i] for i in order] for name, given in big.rows.items()}
    assembler = dg.DraftAssembler(BIG, mailbox=big.mailbox, machine=machine)
    batch = assembler.assemble_slots([SLOTS[i] for i in order], [7 + i for i in order])
    assert_batch(batch, BIG, rows)
    big.assert_small()


def test_resolve_out_of_a_big_map(machine: Machine, big: BigPool) -> None:
    """Guards publish, stash and resolve at the far end of a map, the former two without the assembler."""
    future_map = big_map(machine)
    where, count = torch.tensor(INDICES), torch.arange(len(INDICES))
    given = dg.EagleDraftInput(*[torch.stack(big.rows[field.name]) for field in BIG], bonus_tokens=500 + count)
    future_map.publish(where, 10 + count)
    future_map.stash(where, given)
    assert_holds(future_map, INDICES, big.rows)
    batch = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=where.flip(0).int()), seq_lens=None)
    future_map.resolve(batch)
    assert batch.seq_lens.tolist() == [16, 15, 14, 13, 12, 11, 10]
    assert batch.spec_info.bonus_tokens.tolist() == [506, 505, 504, 503, 502, 501, 500]
    for field in BIG:
        expected = stacked(field, big.rows[field.name][::-1], len(INDICES))
        assert_bytes(batch.spec_info.rows(field.name), expected, field.name)
    big.assert_small()


def test_records_of_a_big_pool_as_rows(machine: Machine, big: BigPool) -> None:
    """Guards views whose storage offset is beyond 2**31 elements: in their storage, and read where they are."""
    rows: Any = {field.name: [big.mailbox.row(field.name, slot) for slot in SLOTS] for field in BIG}
    batch = dg.DraftAssembler(BIG, machine=machine).assemble_rows(**rows)
    assert_batch(batch, BIG, big.rows)
    small = dg.DraftMailbox(BIG, 1, pin_memory=False)
    small.put(0, 1, **row_of(rows, 0))
    assert_bytes(small.view("hidden_states"), stacked(BIG[2], big.rows["hidden_states"][:1], 1))
    big.assert_small()


def test_a_slots_life_at_the_far_end(big: BigPool) -> None:
    """Guards an engine's record, its acceptance and release where the record lies beyond 2**31 bytes."""
    slot, rows = LAST - 2, random_rows(BIG, 1, seed=5)
    write_record(big.mailbox, slot, 9, row_of(rows, 0))
    big.mailbox.accept([slot], [9])
    assembler = dg.DraftAssembler(BIG, mailbox=big.mailbox)
    assert_batch(assembler.assemble_slots([slot], [9]), BIG, rows)
    big.mailbox.release(slot)
    assert [problem.got for problem in assembler.check_slots([slot])] == [
        f"is {slot}, which is free: nothing was written since it was released"
    ]
    assert big.mailbox.generation(slot) == 2
    big.assert_small()


def test_release_by_a_number_of_32_bits(big: BigPool) -> None:
    """Guards another tenant's record against the release of one beyond 2**31 bytes, whose number is NumPy's int32."""
    slot = LAST - 3
    big.mailbox.put(slot, 9, **row_of(big.rows, 0))
    with np.errstate(over="ignore"):
        big.mailbox.release([np.int32(slot)])
    with pytest.raises(dg.SlotError, match="is not written"):
        big.mailbox.accept([slot], [9])


@pytest.mark.parametrize("slot", [NUM_SLOTS, -1, LAST + 2**32, 2**31, 2**32, -(2**63), 2**63 - 1])
def test_slots_that_would_wrap_around(machine: Machine, big: BigPool, slot: int) -> None:
    """Guards against a slot that is in range once it is cut down to 32 bits."""
    future_map = big_map(machine)
    assembler = dg.DraftAssembler(BIG, mailbox=big.mailbox, machine=machine)
    relay = relay_to(future_map, INDICES[:2])
    with pytest.raises(dg.SlotError, match=rf"row 1: slot is {slot}, expected 0 to {LAST}") as caught:
        assembler.assemble_slots([LAST, slot], relay=relay)
    assert len(caught.value.problems) == 1
    with pytest.raises(dg.RelayError, match=f"future index {slot} is out of range"):
        assembler.assemble_slots([LAST, 0], relay=relay_to(future_map, [INDICES[0], slot]))
    assert not raw(future_map.buffers["hidden_states"][list(INDICES)]).any()
    big.assert_small()


# -- rows at every address


def at_byte(row: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of `row` whose address is `offset` modulo 64, also where that is no multiple of its element's size."""
    memory = np.full(row.nbytes + 128, 0xEE, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    memory[start : start + row.nbytes] = raw(row)
    return torch.frombuffer(memory, dtype=row.dtype, count=len(row), offset=start)


@pytest.mark.parametrize("width", [1, 5, 67])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_rows_at_every_byte(machine: Machine, dtype: torch.dtype, width: int) -> None:
    """Guards against an access that takes an address for aligned: each of 16 alignments, in one batch and alone."""
    field = dg.Field("a", width, dtype)
    rng = np.random.default_rng(width)
    rows = [random_row(field, rng) for _ in range(16)]
    placed = [at_byte(row, i) for i, row in enumerate(rows)]
    assert [row.data_ptr() % 16 for row in placed] == list(range(16))
    future_map = poisoned_map([field], machine=machine)
    assembler = dg.DraftAssembler([field], mailbox=written_mailbox([field], {"a": [*placed]}, 16), machine=machine)
    batch = assembler.assemble_rows(a=placed, relay=relay_to(future_map, range(1, 17)))
    assert_batch(batch, [field], {"a": [*rows]})
    indices, lengths, tokens = ([first + i for i in range(16)] for first in (1, 10, 500))
    assert_relayed(future_map, indices, lengths, tokens, {"a": [*rows]})
    assert_batch(assembler.assemble_slots(range(16)), [field], {"a": [*rows]})
    if width == 67:
        for i in (1, 7, 8, 15):
            assert_batch(assembler.assemble_rows(a=placed[i : i + 1]), [field], {"a": [rows[i]]})


def test_hidden_rows_at_every_byte(machine: Machine) -> None:
    """Guards the same for rows that are moved in many tiles, and stacked into recycled memory: 7,168 wide."""
    field = dg.Field("hidden_states", 7168, torch.bfloat16)
    rng = np.random.default_rng(2)
    which = (0, 1, 2, 8, 15) if machine.has_kernel else range(16)
    rows = [random_row(field, rng) for _ in which]
    placed = [at_byte(row, offset) for row, offset in zip(rows, which, strict=True)]
    mailbox = written_mailbox([field], {"hidden_states": [*placed]}, 16)
    assembler = dg.DraftAssembler([field], mailbox=mailbox, machine=machine)
    assert_batch(assembler.assemble_rows(hidden_states=placed), [field], {"hidden_states": [*rows]})
    assert_batch(assembler.assemble_slots(range(len(rows))), [field], {"hidden_states": [*rows]})


# -- rows that lie oddly


class Traced(torch.Tensor):
    """A subclass, as tracing and distributed code hand them over."""


def windows(base: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Rows that overlap: each begins one element after the last one."""
    return list(base.unfold(0, width, 1)[:4])


def in_inference_mode(base: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return base.clone()


# 103 numbers 1..103, and a width -> four rows; the last of them is never like the first.
LAYOUTS: dict[str, Callable[[torch.Tensor, int], list[torch.Tensor]]] = {
    "overlapping": windows,
    "columns": lambda base, width: list(base[: 4 * width].view(width, 4).T),
    "every third": lambda base, width: [base[i : i + 3 * width - 2 : 3] for i in range(4)],
    "one number each": lambda base, width: [base[i : i + 1].expand(width) for i in range(4)],
    "one number each, by stride": lambda base, width: [base.as_strided((width,), (0,), 7 * i) for i in range(4)],
    "planes": lambda base, width: [base[: 4 * width].view(2, width, 2)[i // 2, :, i % 2] for i in range(4)],
    "subclass": lambda base, width: [row.as_subclass(Traced) for row in windows(base, width)],
    "inference": lambda base, width: windows(in_inference_mode(base), width),
    "leaves of a graph": lambda base, width: [row.clone().requires_grad_() for row in windows(base, width)],
    "inside of a graph": lambda base, width: list((base.clone().requires_grad_() * 1).unfold(0, width, 1)[:4]),
    "one of a graph": lambda base, width: [*windows(base, width)[:3], windows(base, width)[3].clone().requires_grad_()],
    "parameters": lambda base, width: [torch.nn.Parameter(row) for row in windows(base, width)],
    "imaginary parts": lambda base, width: list(torch.complex(base, -base).conj().imag.unfold(0, width, 1)[:4]),
    "mixed": lambda base, width: [
        base[:width], base[: 2 * width : 2], base[:1].expand(width), base[3 : 3 + width].clone().requires_grad_()
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_lie_oddly(machine: Machine, layout: str) -> None:
    """Guards rows that share elements, lie apart, or belong to a graph."""
    check_layout(machine, layout, 1)


@TWIN
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wide_rows_that_lie_oddly(machine: Machine, layout: str) -> None:
    """Guards the same for rows of 80 KB together, which go another way, into recycled memory."""
    check_layout(machine, layout, 250)


def check_layout(machine: Machine, layout: str, times: int) -> None:
    width = 20 * times
    rows = LAYOUTS[layout](torch.arange(1.0, 103.0 * times + 1), width)
    literal = [[float(number) for number in row.detach().tolist()] for row in rows]
    assert literal[0] != literal[3] and not rows[0].is_meta and len(literal[0]) == width
    before = [raw(row) for row in rows]
    field = dg.Field("a", width, torch.float32)
    future_map = poisoned_map([field], machine=machine)
    mailbox = written_mailbox([field], {"a": [*rows]}, 4)
    assembler = dg.DraftAssembler([field], mailbox=mailbox, machine=machine)
    by_rows = assembler.assemble_rows(a=rows, relay=relay_to(future_map, [9, 3, 5, 1]))
    by_slots = assembler.assemble_slots([0, 1, 2, 3])
    for got in (by_rows.tensors["a"], by_slots.tensors["a"], future_map.buffers["a"][[9, 3, 5, 1]]):
        assert type(got) is torch.Tensor and not got.requires_grad
        assert got.tolist() == literal
    assert all((raw(row) == bits).all() for row, bits in zip(rows, before, strict=True)), "the caller's rows changed"


def freed(row: torch.Tensor, num_bytes: int = 0) -> torch.Tensor:
    row.untyped_storage().resize_(num_bytes)
    return row


UNREADABLE: dict[str, tuple[Callable[[int], torch.Tensor], type[dg.DraftRowError], str]] = {
    "meta": (lambda width: torch.zeros(width, device="meta"), dg.RowDeviceError, "is on meta"),
    "meta, strided": (lambda width: torch.zeros(2 * width, device="meta")[::2], dg.RowDeviceError, "is on meta"),
    "freed": (lambda width: freed(torch.zeros(width)), dg.MissingRowError, "has no storage"),
    "freed, strided": (lambda width: freed(torch.zeros(2 * width)[::2]), dg.MissingRowError, "has no storage"),
    "freed, expanded": (lambda width: freed(torch.zeros(1).expand(width)), dg.MissingRowError, "has no storage"),
    "one byte short": (lambda width: freed(torch.zeros(width), 4 * width - 1), dg.MissingRowError, "has no storage"),
    "short, strided": (lambda width: freed(torch.zeros(2 * width)[::2], 8 * width - 8), dg.MissingRowError, "has no"),
    "freed parameter": (lambda width: freed(torch.nn.Parameter(torch.zeros(width))), dg.MissingRowError, "has no"),
    "freed subclass": (lambda width: freed(torch.zeros(width).as_subclass(Traced)), dg.MissingRowError, "has no"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_rows_that_cannot_be_read(machine: Machine, kind: str) -> None:
    """Guards against a crash, and against rows of whatever lies there now."""
    check_unreadable(machine, kind, 3)


@TWIN
@pytest.mark.parametrize("kind", UNREADABLE)
def test_wide_rows_that_cannot_be_read(machine: Machine, kind: str) -> None:
    """Guards the same for rows of 80 KB, which are stacked into memory that holds an earlier batch."""
    check_unreadable(machine, kind, 20_000)


def check_unreadable(machine: Machine, kind: str, width: int) -> None:
    make, error_class, got = UNREADABLE[kind]
    field = dg.Field("a", width, torch.float32)
    rig = Poisoned([field], machine)
    good = torch.ones(width)
    for rows, positions in (([good, make(width)], [1]), ([make(width), good], [0]), ([make(width)] * 2, [0, 1])):
        with pytest.raises(error_class, match=f"a {got}") as caught:
            rig.assembler.assemble_rows(a=rows, relay=rig.relay(2))
        assert [problem.position for problem in caught.value.problems] == positions
        assert tuple(rig.assembler.check_rows(a=rows)) == caught.value.problems
    rig.assert_untouched()
    mailbox = dg.DraftMailbox([field], 1, pin_memory=False)
    with pytest.raises(error_class, match=f"a {got}"):
        mailbox.put(0, 1, a=make(width))
    assert not raw(mailbox.view("a")).any()


def test_strided_row_within_a_shrunk_storage(machine: Machine) -> None:
    """Guards against a refusal of what can be read: the storage ends right behind the row's last element."""
    row = freed(torch.arange(6.0)[::2], 4 * 5)
    assert dg.DraftAssembler([dg.Field("a", 3, torch.float32)], machine=machine).assemble_rows(a=[row]).tensors[
        "a"
    ].tolist() == [[0.0, 2.0, 4.0]]


# -- many slots, in every form


MANY = 700  # beyond what Python itself looks through
ORDER = [(37 * i) % 50 for i in range(MANY)]  # each of 50 slots fourteen times
MANY_FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int64": torch.tensor,
    "int32": lambda slots: torch.tensor(slots, dtype=torch.int32),
    "int8": lambda slots: torch.tensor(slots, dtype=torch.int8),
    "every other of a tensor": lambda slots: torch.tensor(slots).repeat_interleave(2)[::2],
    "column of a tensor": lambda slots: torch.tensor([slots, slots]).T.contiguous()[:, 1],
    "subclass": lambda slots: torch.tensor(slots).as_subclass(Traced),
    "list of NumPy numbers": lambda slots: [np.int32(slot) for slot in slots],
    "list of both": lambda slots: [np.int64(slot) if slot % 2 else slot for slot in slots],
    "list of tensors": lambda slots: [torch.tensor(slot) for slot in slots],
    "buffer": lambda slots: array.array("i", slots),
    "big-endian array": lambda slots: np.array(slots, ">i8"),
    "unsigned array": lambda slots: np.array(slots, np.uint64),
    "backward array": lambda slots: np.array(slots[::-1])[::-1],
    "unaligned array": lambda slots: np.frombuffer(b"\xee" + np.array(slots).tobytes(), np.int64, offset=1),
}


def many_slots(machine: Machine) -> tuple[dg.DraftAssembler, torch.Tensor]:
    """An assembler over 50 slots, slot i of owner -i and the row [i, -i]; what ORDER gives of them."""
    field = dg.Field("a", 2, torch.int16)
    mailbox = dg.DraftMailbox([field], 51, pin_memory=False)
    for slot in range(50):
        mailbox.put(slot, -slot, a=[slot, -slot])
    assembler = dg.DraftAssembler([field], max_batch_size=MANY, mailbox=mailbox, machine=machine)
    return assembler, torch.tensor([[slot, -slot] for slot in ORDER], dtype=torch.int16)


@TWIN
@pytest.mark.parametrize("form", MANY_FORMS)
def test_many_slots_in_every_form(machine: Machine, form: str) -> None:
    """Guards slots and owners in any form where the batch is large, and repeats each slot many times."""
    assembler, expected = many_slots(machine)
    slots = MANY_FORMS[form](ORDER)
    if form != "unsigned array":
        batch = assembler.assemble_slots(slots, MANY_FORMS[form]([-slot for slot in ORDER]))
        assert torch.equal(batch.tensors["a"], expected)
    assert torch.equal(assembler.assemble_slots(slots, [-slot for slot in ORDER]).tensors["a"], expected)
    assert assembler.check_slots(slots, [-slot for slot in ORDER]) == []


@pytest.mark.parametrize("slots", [range(50), range(49, -1, -1), range(0, 50, 7), range(0), range(7, 8)], ids=str)
def test_ranges_of_slots(machine: Machine, slots: range) -> None:
    """Guards a range, forward and backward, also as owners."""
    assembler, _ = many_slots(machine)
    batch = assembler.assemble_slots(slots, range(-slots.start, -slots.stop, -slots.step))
    assert batch.tensors["a"].tolist() == [[slot, -slot] for slot in slots]


@pytest.mark.parametrize("form", ["list", "int64", "int32", "list of both", "big-endian array", "backward array"])
def test_bad_slots_among_many(form: str) -> None:
    """Guards every bad slot of a large batch in any form: below, beyond, not written, or of another owner."""
    assembler, _ = many_slots(Machine(torch.device("cpu"), has_kernel=False, pins=False, zero_copy=False))
    slots, owners = list(ORDER), [-slot for slot in ORDER]
    slots[3], slots[600], slots[699], slots[4] = -1, 51, 2**31 - 1, 50
    owners[5], owners[650] = 1, 2
    expected = [
        (3, "is -1"),
        (4, "is 50, which is free: nothing was written since it was released"),
        (5, f"is {ORDER[5]}, which is owned by {-ORDER[5]}"),
        (600, "is 51"),
        (650, f"is {ORDER[650]}, which is owned by {-ORDER[650]}"),
        (699, "is 2147483647"),
    ]
    with pytest.raises(dg.SlotError) as caught:
        assembler.assemble_slots(MANY_FORMS[form](slots), MANY_FORMS[form](owners))
    assert [(problem.position, problem.got) for problem in caught.value.problems] == expected


# -- rows as wide as a vocabulary


VOCABULARY = (dg.Field("probabilities", 151_936, torch.float32), dg.Field("token", 1, torch.int64))


def test_rows_as_wide_as_a_vocabulary(machine: Machine) -> None:
    """Guards rows of 600 KB, for sampling on the decode node: by rows, by slots, through the relay and back."""
    rows = random_rows(VOCABULARY, 2, seed=9)
    probabilities = rows["probabilities"][1]
    assert probabilities is not None
    probabilities.view(torch.int32)[[0, 75_967, 151_935]] = torch.tensor([1, 2, 3], dtype=torch.int32)
    future_map = poisoned_map(VOCABULARY, 4, machine=machine)
    assembler = dg.DraftAssembler(VOCABULARY, mailbox=written_mailbox(VOCABULARY, rows, 2), machine=machine)
    batch = assembler.assemble_rows(relay=relay_to(future_map, [3, 1]), **rows)
    assert batch.tensors["probabilities"].view(torch.int32)[1, [0, 75_967, 151_935]].tolist() == [1, 2, 3]
    assert_batch(batch, VOCABULARY, rows)
    assert_relayed(future_map, [3, 1], [10, 11], [500, 501], rows)
    second = {name: given[1:] for name, given in rows.items()}
    assert_batch(assembler.assemble_slots([1], [101]), VOCABULARY, second)
    running = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=torch.tensor([1])), seq_lens=None)
    future_map.resolve(running)
    assert_bytes(running.spec_info.rows("probabilities"), stacked(VOCABULARY[0], [probabilities], 1))


@pytest.mark.parametrize("width", [151_935, 151_937, 129_280])
def test_vocabulary_of_another_model(width: int) -> None:
    """Guards against another tokenizer's probabilities: refused by their width, in each way in."""
    rig = Poisoned(VOCABULARY, None)
    rows: Any = {"probabilities": [torch.zeros(width)], "token": [[1]]}
    with pytest.raises(dg.RowShapeError, match=rf"probabilities has shape \({width},\), expected \(151936,\)"):
        rig.assembler.assemble_rows(relay=rig.relay(1), **rows)
    rig.assert_untouched()
    with pytest.raises(dg.RowShapeError, match=rf"probabilities has shape \({width},\)"):
        dg.DraftMailbox(VOCABULARY, 1, pin_memory=False).put(0, 1, **row_of(rows, 0))
