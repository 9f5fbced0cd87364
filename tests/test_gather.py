"""The gather: row i of every output is row i, byte for byte, wherever the rows come from and go to."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draftgather as dg
from draftgather.machine import Machine
from helpers import (
    FIELD_LISTS,
    REAL_DTYPES,
    Poisoned,
    Rows,
    assert_batch,
    assert_bytes,
    assert_poisoned,
    assert_relayed,
    poison,
    poisoned_map,
    random_row,
    random_rows,
    raw,
    relay_tensors,
    relay_to,
    row_of,
    stacked,
    written_mailbox,
)

PLAIN_ROUTES = {"pointers", "staged"}


def as_property(machine: Machine, check, *strategies, twin: int, kernel: int) -> None:
    """Run `check` on drawn values: often on the twin, a few times on the interpreted kernel, which is slow."""
    num_examples = kernel if machine.has_kernel else twin
    settings(max_examples=num_examples, deadline=None)(given(*strategies)(check))()


# -- literal expectations


def test_literal_rows(machine):
    """Guards the gather of separate rows by hand-written numbers, without any other code of ours or torch's."""
    fields = dg.eagle_fields(topk=2, hidden_size=3, hidden_dtype=torch.float16)
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(
        topk_p=[torch.tensor([0.5, 2.0]), torch.tensor([-0.0, 1.0])],
        topk_index=[torch.tensor([-1, 2**53 + 1]), torch.tensor([3, 4])],
        hidden_states=[torch.tensor([1.0, 2, 3], dtype=torch.float16), torch.tensor([4.0, 5, -0.0]).half()],
        pad_to=3,
    )
    assert batch.tensors["topk_p"].view(torch.int32).tolist() == [
        [0x3F000000, 0x40000000],
        [-(2**31), 0x3F800000],
        [0, 0],
    ]
    assert batch.tensors["topk_index"].tolist() == [[-1, 2**53 + 1], [3, 4], [0, 0]]
    expected = [[0x3C00, 0x4000, 0x4200], [0x4400, 0x4500, -0x8000], [0, 0, 0]]
    assert batch.tensors["hidden_states"].view(torch.int16).tolist() == expected
    assert batch.route in PLAIN_ROUTES
    assert (batch.num_rows, batch.num_padded, dict(batch.present)) == (2, 3, dict.fromkeys(batch.tensors, True))
    assert batch.done.query()


def test_literal_slots(machine):
    """Guards the gather of records by hand-written numbers: order, repetition and padding."""
    fields = (dg.Field("a", 3, torch.int16), dg.Field("b", 1, torch.uint8))
    mailbox = dg.DraftMailbox(fields, 4, pin_memory=False)
    for slot in range(4):
        mailbox.put(slot, slot, a=[slot, -slot, 7], b=[200 + slot])
    batch = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine).assemble_slots([3, 0, 3], [3, 0, 3], pad_to=5)
    assert batch.tensors["a"].tolist() == [[3, -3, 7], [0, 0, 7], [3, -3, 7], [0, 0, 0], [0, 0, 0]]
    assert batch.tensors["b"].tolist() == [[203], [200], [203], [0], [0]]
    assert batch.route in {"slots", "staged"}


def test_literal_relay(machine):
    """Guards the fused scatter by hand-written numbers."""
    fields = (dg.Field("a", 2, torch.int32),)
    future_map = dg.FutureMap(fields, 4, machine=machine)
    relay = dg.Relay(future_map, torch.tensor([3, 1]), torch.tensor([30, 10]), torch.tensor([-3, -1]))
    rows = [torch.tensor([5, 6], dtype=torch.int32), torch.tensor([7, 8], dtype=torch.int32)]
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(a=rows, relay=relay, pad_to=4)
    assert batch.tensors["a"].tolist() == [[5, 6], [7, 8], [0, 0], [0, 0]]
    assert future_map.buffers["a"].tolist() == [[0, 0], [7, 8], [0, 0], [5, 6]]
    assert future_map.new_seq_lens_buf.tolist() == [0, 10, 0, 30]
    assert future_map.output_tokens_buf.tolist() == [0, -1, 0, -3]


# A row of every dtype that a conversion or a float comparison would change, as integers of its size.
SPECIAL_BITS = {
    torch.float32: [0x7FC01234, -0x3FFEDD, -(2**31), 0x7F800000, -0x800000, 1, 0x7F800001],
    torch.bfloat16: [0x7FC1, -0x3F, -(2**15), 0x7F80, -0x80, 1, 0x7F81],
    torch.float16: [0x7E01, -0x1FF, -(2**15), 0x7C00, -0x400, 1, 0x7C01],
    torch.float64: [0x7FF8000000001234, -0x7FFFFFFFFFEDD, -(2**63), 0x7FF0000000000000, 1, 0x7FF0000000000001, 0],
    torch.int64: [-1, 2**53 + 1, -(2**63), 2**63 - 1, 0, 1, -(2**53) - 1],
}
INTEGERS = {4: torch.int32, 2: torch.int16, 8: torch.int64}


@pytest.mark.parametrize("dtype", SPECIAL_BITS, ids=str)
def test_bits_survive(machine, dtype):
    """Guards NaN payloads (signalling ones too), -0.0, infinities, subnormals and ids above 2**53."""
    bits = torch.tensor(SPECIAL_BITS[dtype], dtype=INTEGERS[dtype.itemsize])
    field = dg.Field("a", 7, dtype)
    mailbox = dg.DraftMailbox([field], 2, pin_memory=False)
    mailbox.put(1, 0, a=bits.view(dtype))
    assembler = dg.DraftAssembler([field], mailbox=mailbox, machine=machine)
    future_map = dg.FutureMap([field], 4, machine=machine)
    by_rows = assembler.assemble_rows(a=[bits.view(dtype)], relay=relay_to(future_map, [1]))
    by_slots = assembler.assemble_slots([1], relay=relay_to(future_map, [2]))
    for got in (
        by_rows.tensors["a"],
        by_slots.tensors["a"],
        future_map.buffers["a"][1:2],
        future_map.buffers["a"][2:3],
    ):
        assert got.view(bits.dtype).tolist() == [SPECIAL_BITS[dtype]]


MORE_DTYPES = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", REAL_DTYPES + MORE_DTYPES, ids=str)
def test_every_dtype(machine, dtype):
    """Guards the field list's promise: any real dtype of 1, 2, 4 or 8 bytes, by rows, slots and relay."""
    fields = (dg.Field("a", 5, dtype), dg.Field("b", 2, torch.int16, optional=True))
    rows = random_rows(fields, 3)
    rows["b"][1] = None
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 3), machine=machine)
    by_rows, by_slots = poisoned_map(fields, machine=machine), poisoned_map(fields, machine=machine)
    assert_batch(assembler.assemble_rows(relay=relay_to(by_rows, [4, 6, 2]), pad_to=4, **rows), fields, rows, 4)
    assert_batch(assembler.assemble_slots(range(3), relay=relay_to(by_slots, [4, 6, 2]), pad_to=4), fields, rows, 4)
    for future_map in (by_rows, by_slots):
        assert_relayed(future_map, [4, 6, 2], [10, 11, 12], [500, 501, 502], rows)


# -- where rows lie


def _with_gradient(row: torch.Tensor) -> torch.Tensor:
    return row.clone().requires_grad_() if row.dtype.is_floating_point else row


def _negated(row: torch.Tensor) -> torch.Tensor:
    """The same values by way of torch's lazy negation."""
    if row.dtype not in (torch.float32, torch.float64):
        return row
    return torch.complex(torch.zeros_like(row), row).conj().imag


def _in_storage(row: torch.Tensor, start: int, step: int) -> torch.Tensor:
    storage = torch.zeros(start + step * len(row) + 2, dtype=row.dtype)
    placed = storage[start : start + step * len(row) : step]
    placed.copy_(row)
    return placed


PLACEMENTS = {
    "own": lambda row: row,
    "offset 1": lambda row: _in_storage(row, 1, 1),
    "offset 3": lambda row: _in_storage(row, 3, 1),
    "step 2": lambda row: _in_storage(row, 0, 2),
    "step 3 offset 1": lambda row: _in_storage(row, 1, 3),
    "transposed": lambda row: torch.stack([row.flip(0), row, row.flip(0)], 1)[:, 1],
    "expanded": lambda row: row[:1].expand(len(row)),
    "gradient": _with_gradient,
    "parameter": lambda row: torch.nn.Parameter(row, requires_grad=False),
    "negated": _negated,
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_at_any_address_and_stride(machine, placement):
    """Guards rows that are not aligned, not contiguous, zero-stride, lazily negated, or part of a graph."""
    fields = (
        dg.Field("a", 7, torch.float32),
        dg.Field("b", 2, torch.int64),
        dg.Field("c", 5, torch.bfloat16),
        dg.Field("d", 3, torch.int8),
        dg.Field("e", 1, torch.bool),
        dg.Field("f", 1, torch.float32),
    )
    rows = random_rows(fields, 3)
    rows = {name: [PLACEMENTS[placement](row) for row in given] for name, given in rows.items()}
    future_map = poisoned_map(fields, machine=machine)
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(relay=relay_to(future_map, [5, 1, 3]), **rows)
    assert_batch(batch, fields, rows)
    assert_relayed(future_map, [5, 1, 3], [10, 11, 12], [500, 501, 502], rows)
    assert_batch(
        dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 3), machine=machine).assemble_slots(range(3)),
        fields,
        rows,
    )


# -- properties


@dataclass(frozen=True)
class Case:
    """One batch: rows of any fields, at any place, in any order, with padding and a relay."""

    fields: tuple[dg.Field, ...]
    rows: Rows  # of distinct requests
    order: tuple[int, ...]  # which request each row of the batch is: may repeat
    indices: tuple[int, ...]  # future indices, distinct
    padding: int
    batch_outputs: bool

    @property
    def batch(self) -> Rows:
        return {name: [given[i] for i in self.order] for name, given in self.rows.items()}


@st.composite
def cases(draw, max_rows: int, any_place: bool = True) -> Case:
    fields = draw(st.sampled_from([*FIELD_LISTS.values(), None]))
    if fields is None:
        shapes = st.tuples(st.integers(1, 40), st.sampled_from(REAL_DTYPES), st.booleans())
        drawn = draw(st.lists(shapes, min_size=1, max_size=4))
        fields = tuple(dg.Field(f"f{i}", w, dtype, optional=opt) for i, (w, dtype, opt) in enumerate(drawn))
    num_requests = draw(st.integers(1, 5))
    rows = random_rows(fields, num_requests, draw(st.integers(0, 2**32)))
    for field in fields:
        for i, row in enumerate(rows[field.name]):
            if field.optional and draw(st.booleans()):
                rows[field.name][i] = None
            elif any_place:
                rows[field.name][i] = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))](row)
    # The size is drawn by itself, so that large batches come as often as small ones.
    num_rows = draw(st.integers(1, max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    order = tuple(rng.integers(0, num_requests, num_rows).tolist())
    indices = tuple((1 + rng.permutation(max_rows)[:num_rows]).tolist())
    return Case(fields, rows, order, indices, draw(st.integers(0, 3)), draw(st.booleans()))


def check_case(case: Case, assemble, future_map: dg.FutureMap) -> None:
    num_rows = len(case.order)
    batch = assemble(
        relay=relay_to(future_map, case.indices), pad_to=num_rows + case.padding, batch_outputs=case.batch_outputs
    )
    if case.batch_outputs:
        assert_batch(batch, case.fields, case.batch, num_rows + case.padding)
    else:
        assert not batch.tensors
    count = range(num_rows)
    assert_relayed(future_map, case.indices, [10 + i for i in count], [500 + i for i in count], case.batch)


def test_any_batch_of_rows(machine):
    """Guards separate rows in every combination of fields, dtypes, widths, places, orders, padding and relay."""
    max_rows = 9 if machine.has_kernel else 300

    def check(case: Case) -> None:
        assembler = dg.DraftAssembler(case.fields, machine=machine)
        future_map = poisoned_map(case.fields, max_rows + 1, machine=machine)
        check_case(case, lambda **call: assembler.assemble_rows(**call, **case.batch), future_map)

    as_property(machine, check, cases(max_rows), twin=120, kernel=20)


def test_any_batch_of_slots(machine):
    """Guards records in every combination of the same, repeated slots and absent fields among them."""
    max_rows = 9 if machine.has_kernel else 300

    def check(case: Case) -> None:
        num_requests = len(case.rows[case.fields[0].name])
        mailbox = dg.DraftMailbox(case.fields, 8, pin_memory=False)
        slots = [7 - i for i in range(num_requests)]
        for i, slot in enumerate(slots):
            mailbox.put(slot, i, **row_of(case.rows, i))
        assembler = dg.DraftAssembler(case.fields, mailbox=mailbox, machine=machine)
        future_map = poisoned_map(case.fields, max_rows + 1, machine=machine)
        where = [slots[i] for i in case.order]
        check_case(case, lambda **call: assembler.assemble_slots(where, case.order, **call), future_map)

    as_property(machine, check, cases(max_rows, any_place=False), twin=120, kernel=20)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 17, 64, 257])
@pytest.mark.parametrize("width", [1, 3, 7, 1024, 2100])
def test_sizes(machine, width, num_rows):
    """Guards batch sizes and widths around one tile, one row and one word."""
    if machine.has_kernel and num_rows * width > 8000:
        pytest.skip("too slow under the interpreter")
    fields = (dg.Field("a", width, torch.bfloat16), dg.Field("b", 1, torch.uint8))
    rows = random_rows(fields, num_rows)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, num_rows), machine=machine)
    assert_batch(assembler.assemble_rows(**rows), fields, rows)
    assert_batch(assembler.assemble_slots(range(num_rows)), fields, rows)


def test_hidden_width_of_a_real_model(machine):
    """Guards the row that the product is for: 7,168 wide, with the tail's bytes in their place."""
    fields = dg.eagle_fields(topk=4, hidden_size=7168)
    rows = random_rows(fields, 2)
    future_map = poisoned_map(fields, 4, machine=machine)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 2), machine=machine)
    assert_batch(assembler.assemble_rows(relay=relay_to(future_map, [3, 1]), **rows), fields, rows)
    assert_batch(assembler.assemble_slots([0, 1], pad_to=3), fields, rows, 3)
    assert_relayed(future_map, [3, 1], [10, 11], [500, 501], rows)


@pytest.mark.parametrize("make", [list, tuple, torch.stack, lambda rows: torch.stack(rows).numpy()])
def test_lists_of_rows(machine, make):
    """Guards a [b, width] tensor or array in the place of a list of rows."""
    fields = (dg.Field("a", 3, torch.int64), dg.Field("b", 2, torch.float32))
    rows = random_rows(fields, 4)
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(**{k: make(given) for k, given in rows.items()})
    assert_batch(batch, fields, rows)


class MadeOnAccess(Sequence):
    """Rows that are made anew whenever they are asked for, and that nobody else holds."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self._rows[i].clone()


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_rows_made_on_access(machine, fields, num_rows):
    """Guards against the address of a row that is gone before it is read."""
    rows = random_rows(fields, num_rows)
    made = {name: MadeOnAccess(given) for name, given in rows.items()}
    assert_batch(dg.DraftAssembler(fields, machine=machine).assemble_rows(**made), fields, rows)


SLOT_LISTS = {
    "list": [2, 0, 1],
    "tuple": (2, 0, 1),
    "tensor": torch.tensor([2, 0, 1]),
    "int32": torch.tensor([2, 0, 1], dtype=torch.int32),
    "strided tensor": torch.tensor([2, 9, 0, 9, 1, 9])[::2],
    "array": np.array([2, 0, 1]),
    "uint8 array": np.array([2, 0, 1], np.uint8),
    "strided array": np.array([2, 9, 0, 9, 1, 9])[::2],
    "backward array": np.array([1, 0, 2])[::-1],
    "read-only array": np.frombuffer(np.array([2, 0, 1]).tobytes(), np.int64),
}


@pytest.mark.parametrize("form", SLOT_LISTS)
def test_lists_of_slots(machine, fields, form):
    """Guards slots and owners in every form in which a scheduler has them."""
    rows = random_rows(fields, 3)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 3), machine=machine)
    owners = [100 + int(slot) for slot in SLOT_LISTS[form]]
    batch = assembler.assemble_slots(SLOT_LISTS[form], owners)
    assert_batch(batch, fields, {name: [given[i] for i in (2, 0, 1)] for name, given in rows.items()})
    assert assembler.check_slots(SLOT_LISTS[form], owners) == []


def test_owners_as_a_backward_array(machine, fields):
    """Guards owners that are a view: compared one by one with their slots'."""
    rows = random_rows(fields, 3)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 3), machine=machine)
    assert_batch(assembler.assemble_slots([2, 1, 0], np.array([100, 101, 102])[::-1]), fields, {
        name: given[::-1] for name, given in rows.items()
    })  # fmt: skip


# -- padding and the relay


@pytest.mark.parametrize("mode", ["fresh", "fixed"])
@pytest.mark.parametrize(("num_rows", "pad_to"), [(0, 0), (0, 1), (0, 5), (3, 3), (3, 4), (3, 8), (1, 2)])
def test_padding_is_zero_and_last(machine, fields, num_rows, pad_to, mode):
    """Guards against the former batch's rows below the new one's, also when the new one is empty."""
    assembler = dg.DraftAssembler(fields, max_batch_size=8, outputs=mode, machine=machine)
    rows = random_rows(fields, num_rows)
    poison(*assembler.assemble_rows(**random_rows(fields, 8)).tensors.values())
    gc.collect()
    future_map = poisoned_map(fields, machine=machine)
    batch = assembler.assemble_rows(relay=relay_to(future_map, range(1, num_rows + 1)), pad_to=pad_to, **rows)
    assert_batch(batch, fields, rows, pad_to)
    assert batch.route == "empty" if num_rows == 0 else batch.route in PLAIN_ROUTES
    count = range(num_rows)
    assert_relayed(future_map, [i + 1 for i in count], [10 + i for i in count], [500 + i for i in count], rows)


def test_padding_of_slots_when_there_are_none(machine, fields):
    """Guards the same for slots: zero rows, typed, and the relay untouched."""
    mailbox = dg.DraftMailbox(fields, 2, pin_memory=False)
    assembler = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine)
    future_map = poisoned_map(fields, machine=machine)
    nothing = {field.name: [] for field in fields}
    assert_batch(assembler.assemble_slots([], relay=relay_to(future_map, []), pad_to=2), fields, nothing, 2)
    assert_batch(assembler.assemble_slots([]), fields, nothing, 0)
    assert_poisoned(*relay_tensors(future_map).values())


def test_relay_only(machine, fields):
    """Guards batch_outputs=False: the relay is written, the fixed outputs are not touched."""
    rig = Poisoned(fields, machine)
    rows = random_rows(fields, 3)
    batch = rig.assembler.assemble_rows(
        relay=relay_to(rig.future_map, [4, 9, 2]), batch_outputs=False, pad_to=6, **rows
    )
    assert not batch.tensors
    assert (batch.num_rows, dict(batch.present)) == (3, dict.fromkeys(rows, True))
    assert_poisoned(*rig.outputs.values())
    assert_relayed(rig.future_map, [4, 9, 2], [10, 11, 12], [500, 501, 502], rows)
    with pytest.raises(ValueError, match="would write nothing"):
        rig.assembler.assemble_rows(batch_outputs=False, **rows)


# -- the outputs' memory


WIDE = (dg.Field("small", 3, torch.int32), dg.Field("wide", 2048, torch.float64))


def test_fresh_outputs_are_the_calls_own(machine):
    """Guards a batch that a later one overwrites: small ones, and large ones whose memory is recycled."""
    assembler = dg.DraftAssembler(WIDE, machine=machine)
    given = [random_rows(WIDE, 5, seed) for seed in range(12)]
    kept: list[tuple[torch.Tensor | np.ndarray, bytes]] = []
    for turn, rows in enumerate(given):
        batch = assembler.assemble_rows(**rows)
        assert_batch(batch, WIDE, rows)
        # Of every batch one tensor stays, a view, or nothing: the rest of its memory is free again.
        wide, small = batch.tensors["wide"], batch.tensors["small"]
        keep = (wide, wide[1:2, 5:9], small, wide.numpy()[3:4], wide.view(torch.int32).T, None)[turn % 6]
        del batch, wide, small
        if keep is not None:
            kept.append((keep, np.asarray(keep).tobytes()))
        for kept_tensor, expected in kept:
            assert np.asarray(kept_tensor).tobytes() == expected


def test_fresh_outputs_do_not_alias(machine, fields):
    """Guards two living batches at one address."""
    assembler = dg.DraftAssembler(fields, machine=machine)
    batches = [assembler.assemble_rows(**random_rows(fields, 2, seed)) for seed in range(4)]
    addresses = [tensor.data_ptr() for batch in batches for tensor in batch.tensors.values()]
    assert len(set(addresses)) == len(addresses)


def test_fixed_outputs_keep_their_addresses(machine, fields):
    """Guards CUDA graphs that captured the addresses: the same at every batch size, by either way in."""
    rows = random_rows(fields, 8)
    mailbox = written_mailbox(fields, rows, 8)
    assembler = dg.DraftAssembler(fields, max_batch_size=8, mailbox=mailbox, outputs="fixed", machine=machine)
    seen = set()
    for num_rows in (1, 8, 3, 7, 1):
        few = {name: given[:num_rows] for name, given in rows.items()}
        for batch in (assembler.assemble_rows(**few), assembler.assemble_slots(range(num_rows))):
            assert_batch(batch, fields, few)
            seen.add(tuple(tensor.data_ptr() for tensor in batch.tensors.values()))
    assert len(seen) == 1


def test_fixed_outputs_beyond_the_batch_are_untouched(machine, fields):
    """Guards against writes past the padded batch."""
    rig = Poisoned(fields, machine)
    rows = random_rows(fields, 2)
    assert_batch(rig.assembler.assemble_rows(pad_to=3, **rows), fields, rows, 3)
    assert_poisoned(*(tensor[3:] for tensor in rig.outputs.values()))


@pytest.mark.parametrize("mode", ["fresh", "fixed"])
def test_inference_mode_and_back(machine, fields, mode):
    """Guards against tensors that are born in inference mode and then cannot be written outside it."""
    rows = random_rows(fields, 3)
    mailbox = written_mailbox(fields, rows, 3)
    future_map = poisoned_map(fields, machine=machine)
    assembler = dg.DraftAssembler(fields, mailbox=mailbox, outputs=mode, machine=machine)
    for is_inference in (True, False, True):
        with torch.inference_mode(is_inference):
            given = {name: [row.clone() for row in of_field] for name, of_field in rows.items()}
            assert_batch(assembler.assemble_rows(relay=relay_to(future_map, [5, 2, 9]), **given), fields, rows)
            assert_batch(assembler.assemble_slots(range(3), relay=relay_to(future_map, [2, 5, 9])), fields, rows)


def test_default_device_and_dtype(machine, fields):
    """Guards against torch's ambient defaults, which serving engines change: outputs lie where the assembler is."""
    rows = random_rows(fields, 2)
    assembler = dg.DraftAssembler(fields, machine=machine)
    future_map = poisoned_map(fields, machine=machine)
    relay = relay_to(future_map, [4, 2])
    former = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        with torch.device("meta"):
            batch = assembler.assemble_rows(relay=relay, **rows)
    finally:
        torch.set_default_dtype(former)
    assert_batch(batch, fields, rows)
    assert_relayed(future_map, [4, 2], [10, 11], [500, 501], rows)


# -- refusals of whole calls


REFUSED_CALLS = {
    "too many": ({"count": 9}, dg.CapacityError, "a batch of 9 rows, but the assembler has max_batch_size=8"),
    "too much padding": ({"pad_to": 9}, dg.CapacityError, "a batch of 9 rows"),
    "too little padding": ({"pad_to": 1}, ValueError, "pad_to is 1, expected an integer of at least the 2 rows"),
    "odd padding": ({"pad_to": 2.0}, ValueError, "pad_to is 2.0"),
    "request ids": ({"request_ids": ["a"]}, ValueError, "1 request ids for 2 rows"),
    "relay length": ({"relay_rows": 3}, dg.RelayError, r"future_indices has shape \(3,\), expected \(2,\)"),
}


@pytest.mark.parametrize("way", ["rows", "slots"])
@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_refused_calls_write_nothing(machine, fields, call, way):
    """Guards against a write before the last check: over capacity, padding, ids and relay of another length."""
    arguments, error_class, message = REFUSED_CALLS[call]
    count = arguments.get("count", 2)
    rows = random_rows(fields, count)
    rig = Poisoned(fields, machine, written_mailbox(fields, rows, count))
    relay = rig.relay(arguments.get("relay_rows", count))
    more = {key: value for key, value in arguments.items() if key in ("pad_to", "request_ids")}
    assemble, what = {
        "rows": (rig.assembler.assemble_rows, rows),
        "slots": (rig.assembler.assemble_slots, {"slots": list(range(count))}),
    }[way]
    with pytest.raises(error_class, match=message):
        assemble(relay=relay, **more, **what)
    rig.assert_untouched()


def test_capture_is_refused(fields, monkeypatch):
    """Guards a graph into which the slots of one batch would be frozen: refused before anything is written."""
    machine = Machine(torch.device("cuda", 0), has_kernel=True, pins=False, zero_copy=True)
    rows = random_rows(fields, 2)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 2), machine=machine)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(dg.CaptureError, match="a CUDA graph is being captured"):
        assembler.assemble_slots([0, 1])
    with pytest.raises(dg.CaptureError, match="a CUDA graph is being captured"):
        assembler.assemble_rows(**rows)


@pytest.mark.parametrize("call", ["publish", "stash", "resolve"])
def test_capture_is_refused_before_the_fence(fields, monkeypatch, call):
    """Guards a capture that the refusal itself would end: no event is waited for or recorded, nothing allocated."""

    def touched(*_arguments: object, **_named: object) -> None:
        raise AssertionError("work was queued under capture")

    machine = Machine(torch.device("cuda", 0), has_kernel=True, pins=False, zero_copy=True)
    future_map = poisoned_map(fields, machine=machine)
    indices = torch.tensor([1, 2])
    rows = {name: torch.stack(given) for name, given in random_rows(fields, 2).items()}
    draft_input = dg.EagleDraftInput(**rows, bonus_tokens=indices, future_indices=indices)
    future_map.publish_ready = SimpleNamespace(wait=touched, record=touched)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", touched)
    monkeypatch.setattr(future_map, "_output", touched)
    calls = {
        "publish": lambda: future_map.publish(indices, indices),
        "stash": lambda: future_map.stash(indices, draft_input),
        "resolve": lambda: future_map.resolve(SimpleNamespace(spec_info=draft_input)),
    }
    with pytest.raises(dg.CaptureError, match="a CUDA graph is being captured"):
        calls[call]()
    assert_poisoned(*relay_tensors(future_map).values())


def test_without_a_mailbox(machine, fields):
    """Guards slots of a mailbox that was never given."""
    with pytest.raises(ValueError, match="made without a mailbox"):
        dg.DraftAssembler(fields, machine=machine).assemble_slots([0])


def test_mailbox_of_other_fields(machine, fields):
    """Guards records read by another layout."""
    mailbox = dg.DraftMailbox(fields[:2], 2, pin_memory=False)
    with pytest.raises(ValueError, match="the mailbox has the fields"):
        dg.DraftAssembler(fields, mailbox=mailbox, machine=machine)


BAD_SETTINGS = {
    "outputs": ({"outputs": "pinned"}, 'outputs is \'pinned\', expected "fresh" or "fixed"'),
    "output_memory": ({"output_memory": "host"}, "output_memory is 'host'"),
    "size": ({"max_batch_size": 0}, "max_batch_size is 0"),
    "device": ({"device": "meta"}, "device is meta, expected cpu or cuda"),
}


@pytest.mark.parametrize("setting", BAD_SETTINGS)
def test_bad_settings(fields, setting):
    """Guards the constructor: a wrong word is named at once."""
    arguments, message = BAD_SETTINGS[setting]
    with pytest.raises(ValueError, match=message):
        dg.DraftAssembler(fields, **arguments)


BAD_FIELDS = {
    "no fields": lambda: dg.DraftAssembler([]),
    "same names": lambda: dg.DraftAssembler([dg.Field("a", 1, torch.int8)] * 2),
    "width": lambda: dg.Field("a", 0, torch.int8),
    "width bool": lambda: dg.Field("a", True, torch.int8),
    "name": lambda: dg.Field("a b", 1, torch.int8),
    "reserved": lambda: dg.Field("bonus_tokens", 1, torch.int64),
    "complex": lambda: dg.Field("a", 1, torch.complex64),
    "no dtype": lambda: dg.Field("a", 1, float),
    "topk": lambda: dg.eagle_fields(0, 8),
    "steps": lambda: dg.eagle_fields(1, 8, num_steps=0),
    "optional": lambda: dg.DraftMailbox([dg.Field(f"f{i}", 1, torch.int8, optional=True) for i in range(9)], 1),
}


@pytest.mark.parametrize("bad", BAD_FIELDS)
def test_bad_fields(bad):
    """Guards the field list: what no row can have is refused when it is written down."""
    with pytest.raises(ValueError, match=r"(?i)field|topk|num_steps|width|dtype"):
        BAD_FIELDS[bad]()


def test_eagle_fields():
    """Guards the three fields' names, widths and dtypes."""
    assert dg.eagle_fields(4, 24) == (
        dg.Field("topk_p", 4, torch.float32),
        dg.Field("topk_index", 4, torch.int64),
        dg.Field("hidden_states", 24, torch.bfloat16),
    )
    assert [field.width for field in dg.eagle_fields(2, 5, torch.float16, num_steps=3)] == [6, 6, 5]


# -- warm-up and optional fields


@pytest.mark.parametrize("which", FIELD_LISTS)
def test_warmup_touches_only_its_own_memory(machine, which):
    """Guards a warm-up during serving: nobody's outputs, slots or relay rows change."""
    fields = FIELD_LISTS[which]
    rows = random_rows(fields, 2)
    rig = Poisoned(fields, machine, written_mailbox(fields, rows, 3))
    before = raw(rig.assembler.mailbox.view(fields[0].name))
    rig.assembler.warmup()
    rig.assert_untouched()
    np.testing.assert_array_equal(raw(rig.assembler.mailbox.view(fields[0].name)), before)
    assert_batch(rig.assembler.assemble_slots([0, 1]), fields, rows)


def test_optional_field_left_out(machine):
    """Guards an optional field whose list is left out: absent in the batch, the others complete."""
    fields = FIELD_LISTS["eagle+seed"]
    rows = random_rows(fields, 2)
    rows["seed"] = [None, None]
    future_map = poisoned_map(fields, machine=machine)
    given = {name: of_field for name, of_field in rows.items() if name != "seed"}
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(relay=relay_to(future_map, [1, 2]), **given)
    assert_batch(batch, fields, rows)
    assert_relayed(future_map, [1, 2], [10, 11], [500, 501], rows)


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_rows_of_the_mailboxs_views(machine, dtype):
    """Guards rows that lie in another table, at a stride: a record's own view is a row like any other."""
    field = dg.Field("a", 3, dtype)
    rng = np.random.default_rng(1)
    rows = [random_row(field, rng) for _ in range(4)]
    view = written_mailbox([field], {"a": rows}, 4).view("a")
    batch = dg.DraftAssembler([field], machine=machine).assemble_rows(a=[view[i] for i in (3, 1)])
    assert_bytes(batch.tensors["a"], stacked(field, [rows[3], rows[1]], 2))
