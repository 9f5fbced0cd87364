"""Fuzzing: whatever comes in, the bytes are right, or a documented error is raised and nothing has been written.

By hand, far more examples: `pytest tests/test_fuzz.py --hypothesis-profile=long`. What they found stands by name at
the end.
"""

from __future__ import annotations

import array
import collections
import ctypes
import json
import math
import struct
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from torch._subclasses.fake_tensor import FakeTensorMode

import draftgather as dg
from draftgather.bench.arrivals import Arrival, TraceError, read_trace
from draftgather.machine import Machine
from helpers import (
    EXACT,
    REAL_DTYPES,
    Rows,
    assert_batch,
    assert_poisoned,
    assert_relayed,
    poison,
    poisoned_map,
    random_row,
    random_rows,
    raw,
    relay_tensors,
    relay_to,
    write_record,
    written_mailbox,
)

TWIN_AND_KERNEL = pytest.mark.parametrize("machine", ["twin", "kernel"], indirect=True)
MALFORMED = (ValueError, TypeError)  # of which all of draftgather's own errors on bad input are
MAX_ROWS, MAP_SLOTS = 6, 10


def plainly(check: Callable[..., None]) -> Callable[..., None]:
    """`check`, whose failures are text only.

    pytest prints the arguments of every frame, and printing a tensor whose storage is gone ends the process.
    """

    @wraps(check)
    def checked(*arguments: Any, **named: Any) -> None:
        try:
            check(*arguments, **named)
        except HypothesisException:
            raise
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError("".join(traceback.format_exception(error))) from None

    return checked


def fuzz(check: Callable[..., None], *strategies: st.SearchStrategy[Any], share: float) -> None:
    """Run `check` on drawn values, `share` times the loaded profile's number of examples."""
    suppressed = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    num_examples = max(1, round(settings().max_examples * share))
    run = given(*strategies)(plainly(check))
    settings(max_examples=num_examples, deadline=None, suppress_health_check=suppressed, report_multiple_bugs=False)(
        run
    )()


def share_of(machine: Machine, twin: float, kernel: float) -> float:
    """The interpreted kernel takes fifty times as long."""
    return kernel if machine.has_kernel else twin


# -- the dull model of one row: written from the rules, without the package's code


MORE_DTYPES = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
_PACKED = {torch.float16: "<e", torch.float32: "<f", torch.float64: "<d"}
_NAMES = ("topk_p", "hidden_states", "seed", "é", "class_", "rows", "fields", "tensors", "device", "name", "valid")


def encode(numbers: Sequence[float], dtype: torch.dtype) -> bytes:
    """Numbers that `dtype` can hold, as its bytes; fractions are cut off where it has none."""
    if dtype is torch.bool:
        return bytes(number != 0 for number in numbers)
    if dtype is torch.bfloat16:
        return b"".join(struct.pack("<f", number)[2:] for number in numbers)
    if dtype in _PACKED:
        return struct.pack(f"<{len(numbers)}{_PACKED[dtype][1]}", *numbers)
    signed = not str(dtype).startswith("torch.uint")
    return b"".join(int(number).to_bytes(dtype.itemsize, "little", signed=signed) for number in numbers)


def tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


@dataclass(frozen=True)
class Drawn:
    """One request's value for one field, and what the rules make of it."""

    kind: str
    row: Any
    want: torch.Tensor | None  # [width] the field's own bytes; None where the row is refused, or rightly absent
    errors: tuple[type[dg.DraftRowError], ...] = ()  # one of these is its problem's; none: the row is good

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """As Hypothesis shows it: a tensor whose storage is gone cannot be printed."""
        printer.text(f"Drawn({self.kind})")


class Traced(torch.Tensor):
    """A subclass, as tracing and distributed code hand them over."""


class OwnArray(np.ndarray):
    """A subclass of NumPy's array."""


def in_storage(row: torch.Tensor, start: int, step: int) -> torch.Tensor:
    storage = torch.zeros(start + step * len(row) + 2, dtype=row.dtype)
    placed = storage[start : start + step * len(row) : step]
    placed.copy_(row)
    return placed


def unaligned(row: torch.Tensor, offset: int) -> torch.Tensor:
    """At an address that is no multiple of the element's size."""
    buffer = bytearray(b"\xee" * offset + raw(row).tobytes() + b"\xee" * 8)
    return torch.frombuffer(buffer, dtype=row.dtype, count=len(row), offset=offset)


def negated(row: torch.Tensor) -> torch.Tensor:
    """The same values, lazily negated."""
    return torch.complex(torch.zeros_like(row), row.neg()).conj().imag


def in_inference_mode(row: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return row.clone()


PLACEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "own": lambda row: row,
    "offset 1": lambda row: in_storage(row, 1, 1),
    "offset 5": lambda row: in_storage(row, 5, 1),
    "odd byte": lambda row: unaligned(row, 1),
    "byte 6": lambda row: unaligned(row, 6),
    "step 2": lambda row: in_storage(row, 0, 2),
    "step 3, offset 1": lambda row: in_storage(row, 1, 3),
    "column": lambda row: torch.stack([torch.zeros_like(row), row, row]).T.contiguous()[:, 1],
    "transposed": lambda row: torch.stack([torch.zeros_like(row), row], 1)[:, 1],
    "zero stride": lambda row: row[:1].expand(len(row)),
    "overlapping": lambda row: row.as_strided((len(row),), (0,)),
    "detached graph": lambda row: row.clone().requires_grad_() if row.dtype.is_floating_point else row,
    "part of a graph": lambda row: (
        row.clone().requires_grad_()[None].expand(2, -1)[1] if row.dtype.is_floating_point else row
    ),
    "parameter": lambda row: torch.nn.Parameter(row, requires_grad=row.dtype.is_floating_point),
    "subclass": lambda row: row.as_subclass(Traced),
    "negated": lambda row: negated(row) if row.dtype in (torch.float32, torch.float64) else row,
    "inference": in_inference_mode,
    "flipped twice": lambda row: row.flip(0).flip(0) if row.dtype in REAL_DTYPES else row,
}
ARRAYS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "array": lambda row: row,
    "array of step 2": lambda row: np.repeat(row, 2)[::2],
    "backward array": lambda row: row[::-1].copy()[::-1],
    "column of an array": lambda row: np.stack([row, row[::-1]], 1)[:, 0],
    "read-only array": lambda row: np.frombuffer(row.tobytes(), row.dtype),
    "unaligned array": lambda row: np.frombuffer(bytearray(b"\xee" + row.tobytes()), row.dtype, offset=1),
    "array subclass": lambda row: row.view(OwnArray),
    "broadcast array": lambda row: np.broadcast_to(row[:1], row.shape),
}
_ONE_VALUE = {"zero stride", "overlapping", "broadcast array"}


def numbers_for(source: torch.dtype, target: torch.dtype, rng: np.random.Generator, width: int) -> list[float]:
    """Numbers that both can hold: the ends of the range where the conversion is exact, else halves up to 100."""
    halves: list[float] = (rng.integers(0, 201, width) / 2).tolist()
    if source is torch.bool:
        return [float(half > 50) for half in halves]
    if target in EXACT.get(source, ()) and source.is_floating_point:
        ends = [torch.finfo(source).max, torch.finfo(source).min, -0.0, math.inf, -math.inf, -1.5]
    elif target in EXACT.get(source, ()):
        ends = [torch.iinfo(source).max, torch.iinfo(source).min, 0, 1]
    else:
        ends = [0, 1, 100]
    chosen = [ends[i % len(ends)] if i % 3 == 0 else half for i, half in enumerate(halves)]
    return chosen if source.is_floating_point else [int(number) for number in chosen]


def draw_good(draw: Any, field: dg.Field, has_kernel: bool, is_plain: bool = False) -> Drawn:
    """A row that is right. is_plain: a dense tensor of the field's own dtype and width."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    if is_plain:
        bits = random_row(field, rng)
        placement = draw(st.sampled_from(["own", "offset 1", "odd byte", "byte 6"]))
        return Drawn(placement, PLACEMENTS[placement](bits), bits.clone())
    is_float8 = field.dtype.is_floating_point and field.dtype.itemsize == 1
    kinds = ["tensor", "tensor", "array"] + ([] if is_float8 else ["list"]) + ["none"] * field.optional
    if field.dtype in REAL_DTYPES and not field.exact:
        kinds.append("converted")
    kind = draw(st.sampled_from(kinds))
    if kind == "none":
        return Drawn("absent", None, None)
    width = field.width + (draw(st.integers(0, 3)) if field.leading else 0)
    if kind == "list":
        numbers = numbers_for(field.dtype, field.dtype, rng, width)
        values = [bool(n) for n in numbers] if field.dtype is torch.bool else numbers
        row = draw(st.sampled_from([list, tuple]))(values)
        return Drawn(kind, row, tensor_of(encode(numbers, field.dtype)[: field.row_bytes], field.dtype))
    if kind == "converted":
        # Triton's interpreter, not the kernel, rounds to bfloat16 in another way.
        sources = [
            source
            for source in REAL_DTYPES
            if field.dtype in EXACT.get(source, ())
            or (field.allow_cast and not (has_kernel and field.dtype is torch.bfloat16))
        ]
        if sources:
            source = draw(st.sampled_from(sources))
            numbers = numbers_for(source, field.dtype, rng, width)
            placement = draw(st.sampled_from(sorted(PLACEMENTS)))
            if placement in _ONE_VALUE:
                numbers = numbers[:1] * width
            row = PLACEMENTS[placement](tensor_of(encode(numbers, source), source))
            want = tensor_of(encode(numbers[: field.width], field.dtype), field.dtype)
            return Drawn(f"{source}, {placement}", row, want)
    bits = random_row(dg.Field("a", width, field.dtype), rng)
    if kind == "array" and field.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        form = draw(st.sampled_from(sorted(ARRAYS)))
        bits = bits[:1].expand(width).contiguous() if form in _ONE_VALUE else bits
        return Drawn(form, ARRAYS[form](bits.numpy()), bits[: field.width].clone())
    placement = draw(st.sampled_from(sorted(PLACEMENTS)))
    bits = bits[:1].expand(width).contiguous() if placement in _ONE_VALUE else bits
    return Drawn(placement, PLACEMENTS[placement](bits), bits[: field.width].clone())


# -- rows that must be refused: a field -> the row and its error


def zeros(field: dg.Field, *shape: int) -> torch.Tensor:
    *outer, width = shape or (field.width,)
    return torch.zeros((*outer, width * field.dtype.itemsize), dtype=torch.uint8).view(field.dtype)


def freed(row: torch.Tensor) -> torch.Tensor:
    row.untyped_storage().resize_(0)
    return row


def freed_view(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A view far into a storage that is gone: its address is its offset."""
    base = torch.zeros(100_000, dtype=dtype)
    view = base[50_000 : 50_000 + math.prod(shape)].view(shape)
    base.untyped_storage().resize_(0)
    return view


def shrunk(row: torch.Tensor) -> torch.Tensor:
    row.untyped_storage().resize_(row.nbytes - 1)
    return row


@contextmanager
def quiet() -> Iterator[None]:
    """Of tensors that torch calls deprecated or a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def quantized(values: torch.Tensor, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    with quiet():
        return torch.quantize_per_tensor(values.float(), 1.0, 0, dtype)


def jagged(*widths: int) -> torch.Tensor:
    with quiet():
        return torch.nested.nested_tensor([torch.zeros(width) for width in widths])


def sparse_rows(*shape: int) -> torch.Tensor:
    with quiet():
        return torch.zeros(shape).to_sparse_csr()


def cut_off(row: torch.Tensor) -> torch.Tensor:
    """A view of a storage that has enough bytes, but ends within the view."""
    base = torch.zeros(100 + len(row), dtype=row.dtype)
    view = base[100:]
    base.untyped_storage().resize_(base.nbytes - 1)
    return view


def fake(field: dg.Field) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(field.width, dtype=field.dtype)


def other_dtype(field: dg.Field, i: int) -> torch.dtype:
    """A dtype that may not be converted to the field's."""
    refused = [
        dtype
        for dtype in (*REAL_DTYPES, *MORE_DTYPES, torch.complex64, torch.complex128)
        if dtype is not field.dtype
        and (field.exact or field.dtype not in EXACT.get(dtype, ()))
        and not (field.allow_cast and dtype in REAL_DTYPES and field.dtype in REAL_DTYPES)
    ]
    return refused[i % len(refused)]


def wrong_number(field: dg.Field, i: int) -> Any:
    """What is no number of the field's dtype."""
    anywhere: list[Any] = [None, "1", b"1", [1], (), {}, object(), 1j, math, np.datetime64(0, "s"), torch.tensor(1)]
    if field.dtype is torch.bool:
        anywhere += [0, 1.0, np.int64(1)]
    else:
        anywhere += [True, np.bool_(True)]
        if not field.dtype.is_floating_point:
            largest = torch.iinfo(field.dtype).max
            anywhere += [1.0, 1.5, math.nan, math.inf, np.float32(1), largest + 1, -(2**70), 10**400, 10**5000]
        elif field.dtype.itemsize > 1:
            anywhere += [10**400, 10**5000, 2**60 + 1]
            anywhere += [] if field.dtype is torch.float64 else [1e300, -1e300]
    return anywhere[i % len(anywhere)]


MISSING, SHAPE, DTYPE = (dg.MissingRowError,), (dg.RowShapeError,), (dg.RowDtypeError,)
BAD_ROWS: dict[str, Callable[[dg.Field, int], tuple[Any, tuple[type[dg.DraftRowError], ...]]]] = {
    "none": lambda f, i: (None, () if f.optional else MISSING),
    "narrower": lambda f, i: (zeros(f, f.width - 1), SHAPE),
    "wider": lambda f, i: (zeros(f, f.width + 1 + i), () if f.leading else SHAPE),
    "empty": lambda f, i: (zeros(f, 0), SHAPE),
    "rank 0": lambda f, i: (zeros(f)[0], SHAPE),
    "rank 2": lambda f, i: (zeros(f, 1, f.width), SHAPE),
    "rank 9": lambda f, i: (zeros(f)[(None,) * 8], SHAPE),
    "dtype": lambda f, i: (torch.zeros(f.width).to(other_dtype(f, i)), DTYPE),
    "conjugate": lambda f, i: (torch.zeros(f.width, dtype=torch.complex64).conj(), DTYPE),
    "meta": lambda f, i: (zeros(f).to("meta"), (dg.RowDeviceError,)),
    "sparse": lambda f, i: (torch.zeros(f.width).to_sparse(), MISSING),
    "sparse rows": lambda f, i: (sparse_rows(1, f.width), MISSING),
    "quantized": lambda f, i: (quantized(torch.zeros(f.width)), DTYPE),
    "opaque": lambda f, i: (torch.zeros(f.width).to_mkldnn(), MISSING),
    "jagged": lambda f, i: (jagged(2, 3), MISSING),
    "freed": lambda f, i: (freed(zeros(f)), MISSING),
    "freed view": lambda f, i: (freed_view(f.dtype, f.width), MISSING),
    "shrunk": lambda f, i: (shrunk(zeros(f)), MISSING),
    "cut off": lambda f, i: (cut_off(zeros(f)), MISSING),
    "fake": lambda f, i: (fake(f), (dg.MissingRowError, dg.RowDeviceError, dg.RowDtypeError)),
    "list of other length": lambda f, i: (([0] * f.width)[1:], SHAPE),
    "endless list": lambda f, i: ([0] * 1000, () if f.leading else SHAPE),
    "list with what is no number": lambda f, i: ([wrong_number(f, i)] * f.width, DTYPE),
    "list of freed tensors": lambda f, i: ([freed(torch.zeros(()))] * f.width, DTYPE),
    "list of a huge number": lambda f, i: ([10**5000] * f.width, DTYPE),
    "object": lambda f, i: (
        ["text", b"bytes", 5, 1.5, math.nan, object(), {}, {1}, ..., math, float, f, np.float32(1), memoryview(b"1")][
            i % 14
        ],
        DTYPE,
    ),
    "range": lambda f, i: (range(f.width), DTYPE),
    "generator": lambda f, i: ((n for n in range(f.width)), DTYPE),
    "buffer": lambda f, i: (array.array("b", bytes(f.width)), DTYPE),
    "array of a dtype that torch lacks": lambda f, i: (
        np.zeros(f.width, ["O", "U3", "S2", "M8[s]", ">f4", ">i8", "g", "V3", [("a", "i4")]][i % 9]),
        DTYPE,
    ),
    "array of complex": lambda f, i: (np.zeros(f.width, "c8"), DTYPE),
    "array of rank 0": lambda f, i: (np.zeros((), "i8"), SHAPE),
    "array of rank 2": lambda f, i: (np.zeros((f.width, 1), "i8"), SHAPE),
    "matrix": lambda f, i: (np.zeros((1, f.width), "f4").view(OwnArray), SHAPE),
}


def draw_bad(draw: Any, field: dg.Field) -> Drawn:
    # bool: [0] * 1000 is no list of bools.
    kinds = sorted(BAD_ROWS.keys() - ({"endless list", "wider"} if field.leading else set()))
    kind = draw(st.sampled_from(kinds))
    row, errors = BAD_ROWS[kind](field, draw(st.integers(0, 40)))
    return Drawn(kind, row, None, errors)


@st.composite
def field_lists(draw: Any) -> tuple[dg.Field, ...]:
    fields = []
    for name in draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=5, unique=True)):
        conversion = draw(st.sampled_from(["", "", "allow_cast", "exact"]))
        fields.append(
            dg.Field(
                name,
                draw(st.integers(1, 70)),
                draw(st.sampled_from(REAL_DTYPES + MORE_DTYPES)),
                optional=draw(st.booleans()),
                leading=draw(st.sampled_from([False, False, True])),
                **({conversion: True} if conversion else {}),
            )
        )
    return tuple(fields)


# -- the rig: everything that a call may write, poisoned


class Rig:
    """An assembler with fixed outputs and a future map, all poisoned."""

    def __init__(
        self,
        fields: Sequence[dg.Field],
        machine: Machine,
        mailbox: dg.DraftMailbox | None = None,
        outputs: Any = "fixed",
    ) -> None:
        self.fields = fields
        self.assembler = dg.DraftAssembler(
            fields, max_batch_size=MAX_ROWS + 2, mailbox=mailbox, outputs=outputs, machine=machine
        )
        self.future_map = poisoned_map(fields, MAP_SLOTS, machine=machine)
        self.outputs: Mapping[str, torch.Tensor] = {}
        if outputs == "fixed":
            nothing: dict[str, Any] = {field.name: [] for field in fields}
            self.outputs = self.assembler.assemble_rows(pad_to=MAX_ROWS + 2, **nothing).tensors
        poison(*self.outputs.values())

    def assert_untouched(self) -> None:
        assert_poisoned(*self.outputs.values(), *relay_tensors(self.future_map).values())

    def assert_written(self, batch: dg.DraftBatch, rows: Rows, call: Call) -> None:
        """The batch, zeros below it, and poison below them; the relay's rows, and nothing else of the map."""
        # What the output of a field holds that is not in every row is nobody's business.
        outputs = [output for name, output in self.outputs.items() if None not in rows[name]]
        if call.batch_outputs:
            assert_batch(batch, self.fields, rows, call.num_padded)
            assert_poisoned(*(output[call.num_padded :] for output in outputs))
        else:
            assert not batch.tensors
            assert_poisoned(*self.outputs.values())
        indices, count = call.indices or (), range(call.num_rows)
        assert_relayed(self.future_map, indices, [10 + i for i in count], [500 + i for i in count], rows)


@dataclass(frozen=True)
class Call:
    """What goes with any batch."""

    num_rows: int
    indices: tuple[int, ...] | None  # the relay's, distinct; None: no relay
    padding: int | None
    request_ids: list[Any] | None
    outputs: str = "fixed"
    batch_outputs: bool = True  # False only with a relay

    def __call__(self, assemble: Callable[..., dg.DraftBatch], rig: Rig, *slots: Any, **rows: Any) -> dg.DraftBatch:
        return assemble(
            *slots,
            request_ids=self.request_ids,
            relay=None if self.indices is None else relay_to(rig.future_map, self.indices),
            pad_to=self.pad_to,
            batch_outputs=self.batch_outputs,
            **rows,
        )

    @property
    def num_padded(self) -> int:
        return self.num_rows + (self.padding or 0)

    @property
    def pad_to(self) -> int | None:
        return None if self.padding is None else self.num_padded

    def id_of(self, i: int) -> object:
        return None if self.request_ids is None else self.request_ids[i]


@st.composite
def calls(draw: Any, num_rows: int) -> Call:
    order = draw(st.permutations(range(1, MAP_SLOTS)))
    indices = draw(st.sampled_from([None, tuple(order[:num_rows])]))
    return Call(
        num_rows,
        indices,
        padding=draw(st.sampled_from([None, 0, 1, 2])),
        request_ids=draw(st.none() | st.lists(st.text() | st.integers(), min_size=num_rows, max_size=num_rows)),
        outputs=draw(st.sampled_from(["fixed", "fresh"])),
        batch_outputs=indices is None or draw(st.booleans()),
    )


Expected = tuple[int, object, str, tuple[type[dg.DraftRowError], ...]]  # position, id, field, classes that fit


def assert_problems(problems: Sequence[dg.Problem], expected: Sequence[Expected]) -> None:
    """Every bad row, in the order of the batch, each with a name, what came, what was expected and a fitting class."""
    assert [(p.position, p.request_id, p.field) for p in problems] == [case[:3] for case in expected]
    for problem, (_, _, field, classes) in zip(problems, expected, strict=True):
        assert problem.error in classes, str(problem)
        assert problem.got and problem.expected and field in str(problem)


def assert_refused(error: dg.DraftRowError, problems: Sequence[dg.Problem]) -> None:
    """The error has the problems that the check without raising lists, and their common class."""
    assert error.problems == tuple(problems)
    kinds = {problem.error for problem in problems}
    assert type(error) is (kinds.pop() if len(kinds) == 1 else dg.DraftRowError)


# -- separate rows


@dataclass(frozen=True)
class RowsCase:
    fields: tuple[dg.Field, ...]
    drawn: dict[str, list[Drawn]]
    forms: dict[str, str]  # a field: what its list is
    call: Call

    def lists(self) -> dict[str, Any]:
        given = {name: [drawn.row for drawn in of_field] for name, of_field in self.drawn.items()}
        lists = {name: FORMS[self.forms[name]](rows) for name, rows in given.items()}
        return {name: rows for name, rows in lists.items() if rows is not ...}

    @property
    def want(self) -> Rows:
        return {name: [drawn.want for drawn in of_field] for name, of_field in self.drawn.items()}

    @property
    def problems(self) -> list[Expected]:
        return [
            (i, self.call.id_of(i), field.name, self.drawn[field.name][i].errors)
            for i in range(self.call.num_rows)
            for field in self.fields
            if self.drawn[field.name][i].errors
        ]


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda rows: rows,
    "tuple": tuple,
    "generator": lambda rows: (row for row in rows),
    "deque": collections.deque,
    "none": lambda rows: None,
    "left out": lambda rows: ...,
}


@st.composite
def rows_cases(draw: Any, has_kernel: bool) -> RowsCase:
    fields = draw(field_lists())
    num_rows = draw(st.integers(0, MAX_ROWS))
    # Half of the batches are good, else nearly none would be; and half of them are plain, all but for one bad row.
    is_good, is_plain = draw(st.booleans()), draw(st.booleans())
    the_bad = draw(st.integers(0, len(fields) - 1)), draw(st.integers(0, max(num_rows - 1, 0)))
    drawn, forms = {}, {}
    for f, field in enumerate(fields):
        # Some list must say how many rows there are.
        is_any_form = f and not is_plain and (field.optional or not is_good)
        form = draw(st.sampled_from(sorted(FORMS))) if is_any_form else "list"
        if form in ("none", "left out"):
            of_field = [Drawn(form, None, None, () if field.optional else MISSING)] * num_rows
        else:
            of_field = [
                draw_bad(draw, field)
                if not is_good and ((f, i) == the_bad if is_plain else draw(st.integers(0, 3)) == 0)
                else draw_good(draw, field, has_kernel, is_plain)
                for i in range(num_rows)
            ]
        drawn[field.name], forms[field.name] = of_field, form
    return RowsCase(fields, drawn, forms, draw(calls(num_rows)))


def check_rows_case(case: RowsCase, machine: Machine) -> None:
    rig = Rig(case.fields, machine, outputs=case.call.outputs)
    problems = rig.assembler.check_rows(case.call.request_ids, **case.lists())
    assert_problems(problems, case.problems)
    if problems:
        with pytest.raises(dg.DraftRowError) as caught:
            case.call(rig.assembler.assemble_rows, rig, **case.lists())
        assert_refused(caught.value, problems)
        rig.assert_untouched()
    else:
        rig.assert_written(case.call(rig.assembler.assemble_rows, rig, **case.lists()), case.want, case.call)


@TWIN_AND_KERNEL
def test_any_rows(machine: Machine) -> None:
    """Guards against any row at all that crashes, is refused wrongly or late, or comes out with other bytes."""
    fuzz(lambda case: check_rows_case(case, machine), rows_cases(machine.has_kernel), share=share_of(machine, 2.0, 0.2))


@TWIN_AND_KERNEL
@pytest.mark.parametrize("kind", BAD_ROWS)
def test_every_bad_row(machine: Machine, kind: str) -> None:
    """Guards against a kind of bad row that no draw happens to hit: each alone, among good ones, by rows and by put."""
    for dtype in (torch.float32, torch.int64, torch.bool):
        check_bad_row(machine, dg.Field("a", 3, dtype), kind)


@plainly
def check_bad_row(machine: Machine, field: dg.Field, kind: str) -> None:
    good = Drawn("own", zeros(field), zeros(field))
    many = {"dtype", "list with what is no number", "object", "array of a dtype that torch lacks"}
    for i in range(20 if kind in many and not machine.has_kernel else 1):
        row, errors = BAD_ROWS[kind](field, i)
        bad = Drawn(kind, row, None, errors)
        case = RowsCase((field,), {"a": [good, bad, good]}, {"a": "list"}, Call(3, (3, 1, 2), None, None))
        check_rows_case(case, machine)
        mailbox = dg.DraftMailbox([field], 1, pin_memory=False)
        with pytest.raises(errors):
            mailbox.put(0, 1, a=row)
        assert not raw(mailbox.view("a")).any()


# -- records


SLOT_FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": lambda slots: slots,
    "tuple": tuple,
    "int64": lambda slots: torch.tensor(slots, dtype=torch.int64),
    "int32": lambda slots: torch.tensor(slots, dtype=torch.int32),
    "every other of a tensor": lambda slots: torch.tensor(slots, dtype=torch.int64).repeat_interleave(2)[::2],
    "expanded tensor": lambda slots: torch.tensor(slots[0]).expand(len(slots)) if len(set(slots)) == 1 else slots,
    "subclass": lambda slots: torch.tensor(slots, dtype=torch.int64).as_subclass(Traced),
    "list of NumPy numbers": lambda slots: [np.int64(slot) for slot in slots],
    "list of tensors": lambda slots: [torch.tensor(slot) for slot in slots],
    "buffer": lambda slots: array.array("q", slots),
    "range": lambda slots: range(slots[0], slots[0] + len(slots)) if is_run(slots) else slots,
    "backward array": lambda slots: np.array(slots[::-1], np.int64)[::-1],
    "read-only array": lambda slots: np.frombuffer(np.array(slots, np.int64).tobytes(), np.int64),
    **{name: partial(np.array, dtype=name) for name in ("i1", "u1", "i2", "u4", "i4", "u8", "<i8", ">i8")},
}
SLOT_JUNK: dict[str, Any] = {
    "none": None,
    "number": 3,
    "float": 1.5,
    "text": "12",
    "bytes": b"12",
    "set": {1, 2},
    "dict": {1: 2},
    "object": object(),
    "floats": [0.0, 1.0],
    "nan": [math.nan],
    "bools": [True, False],
    "one bool": [0, True],
    "bool array": np.array([True]),
    "bool tensor": torch.tensor([True]),
    "texts": ["0"],
    "none inside": [0, None],
    "nested": [[0], [1]],
    "ragged": [[0], [1, 2]],
    "deep": [[[[[[0]]]]]],
    "beyond 64 bits": [2**63],
    "far beyond": [2**100],
    "far beyond, mixed": [2**63, -1],
    "digits without end": [10**5000],
    "float tensor": torch.zeros(2),
    "half tensor": torch.zeros(2, dtype=torch.bfloat16),
    "complex tensor": torch.zeros(2, dtype=torch.complex64),
    "scalar tensor": torch.tensor(0),
    "rank 2 tensor": torch.zeros((1, 1), dtype=torch.int64),
    "meta tensor": torch.zeros(2, dtype=torch.int64, device="meta"),
    "sparse tensor": torch.ones(2, dtype=torch.int64).to_sparse(),
    "quantized tensor": quantized(torch.ones(2)),
    "float array": np.zeros(2),
    "object array": np.array([0, None]),
    "date array": np.zeros(2, "M8[s]"),
    "structured array": np.zeros(2, [("a", "i4")]),
    "scalar array": np.array(0),
    "rank 2 array": np.zeros((2, 2), np.int64),
    "unsigned beyond": np.array([2**63], np.uint64),
    "masked array": np.ma.masked_array([0, 1], [True, False]),
    "a bool of NumPy's": [0, np.bool_(True)],
    "tensor of a graph": torch.zeros(2, requires_grad=True),
    "conjugate tensor": torch.zeros(2, dtype=torch.complex64).conj(),
    "jagged tensor": jagged(1, 2),
    "list of tensors of a graph": [torch.zeros((), requires_grad=True)],
    "freed tensor": freed_view(torch.int64, 2),
    "list of freed tensors": [freed(torch.zeros((), dtype=torch.int64))],
}


def is_run(slots: list[int]) -> bool:
    return bool(slots) and slots == list(range(slots[0], slots[0] + len(slots)))


def in_form(values: list[int], form: str) -> Any:
    """`values` as `form`, or as a list where they do not fit."""
    try:
        return SLOT_FORMS[form](values)
    except (OverflowError, RuntimeError, IndexError):
        return values


@dataclass(frozen=True)
class SlotsCase:
    fields: tuple[dg.Field, ...]
    states: list[str]  # a slot: written, held, free, released
    owners: list[int]  # a slot: of its row
    rows: list[dict[str, Drawn]]  # a slot: what was put
    slots: list[int]
    wanted: list[int] | None  # the owners that the call expects
    forms: tuple[str, str]  # of slots and of owners
    call: Call

    @property
    def problems(self) -> list[Expected]:
        return [
            (i, self.call.id_of(i), "slot", (dg.SlotError,))
            for i, slot in enumerate(self.slots)
            if not 0 <= slot < len(self.states)
            or self.states[slot] != "written"
            or (self.wanted is not None and self.owners[slot] != self.wanted[i])
        ]


_OWNERS = st.sampled_from([0, 1, 1, 2, -1, 2**63 - 1, -(2**63)])


@st.composite
def slots_cases(draw: Any) -> SlotsCase:
    fields = draw(field_lists())
    states = draw(st.lists(st.sampled_from(["written"] * 5 + ["held", "free", "released"]), min_size=1, max_size=5))
    owners = [draw(_OWNERS) for _ in states]
    rows = [{field.name: draw_good(draw, field, False) for field in fields} for _ in states]
    written = [slot for slot, state in enumerate(states) if state == "written"]
    any_slot = st.integers(-2, len(states) + 1) | st.sampled_from([2**31, 2**40, 2**63 - 1, -(2**63)])
    good = st.lists(st.sampled_from(written), max_size=MAX_ROWS) if written else st.just([])
    slots = draw(good | st.lists(any_slot, max_size=MAX_ROWS))
    wanted = draw(st.sampled_from([None, "right", "right", "any"]))
    if wanted is not None:
        known = [owners[slot] if 0 <= slot < len(states) else 7 for slot in slots]
        wanted = known if wanted == "right" else [draw(_OWNERS) for _ in slots]
    forms = draw(st.tuples(st.sampled_from(sorted(SLOT_FORMS)), st.sampled_from(sorted(SLOT_FORMS))))
    return SlotsCase(fields, states, owners, rows, slots, wanted, forms, draw(calls(len(slots))))


def filled_mailbox(case: SlotsCase) -> dg.DraftMailbox:
    mailbox = dg.DraftMailbox(case.fields, len(case.states), pin_memory=False)
    assert [mailbox.acquire() for _ in case.states] == list(range(len(case.states)))
    for slot, state in enumerate(case.states):
        if state in ("written", "released"):
            mailbox.put(slot, case.owners[slot], **{name: drawn.row for name, drawn in case.rows[slot].items()})
        if state in ("free", "released"):
            mailbox.release(slot)
    return mailbox


def check_slots_case(case: SlotsCase, machine: Machine) -> None:
    rig = Rig(case.fields, machine, filled_mailbox(case), case.call.outputs)
    slots = in_form(case.slots, case.forms[0])
    owners = None if case.wanted is None else in_form(case.wanted, case.forms[1])
    problems = rig.assembler.check_slots(slots, owners, case.call.request_ids)
    assert_problems(problems, case.problems)
    if problems:
        with pytest.raises(dg.SlotError) as caught:
            case.call(rig.assembler.assemble_slots, rig, slots, owners)
        assert_refused(caught.value, problems)
        rig.assert_untouched()
    else:
        batch = case.call(rig.assembler.assemble_slots, rig, slots, owners)
        want: Rows = {field.name: [case.rows[slot][field.name].want for slot in case.slots] for field in case.fields}
        rig.assert_written(batch, want, case.call)


@TWIN_AND_KERNEL
def test_any_slots(machine: Machine) -> None:
    """Guards against slots and owners in any form that crash, are refused wrongly, or give another slot's bytes."""
    fuzz(lambda case: check_slots_case(case, machine), slots_cases(), share=share_of(machine, 1.5, 0.15))


@TWIN_AND_KERNEL
@pytest.mark.parametrize("junk", SLOT_JUNK)
def test_slots_and_owners_that_are_no_integers(machine: Machine, junk: str) -> None:
    """Guards against what is no list of integers: refused as such, by the check too, and nothing written."""
    check_slot_junk(machine, junk)


@plainly
def check_slot_junk(machine: Machine, name: str) -> None:
    junk = SLOT_JUNK[name]
    fields = (dg.Field("a", 3, torch.int16),)
    rig = Rig(fields, machine, written_mailbox(fields, random_rows(fields, 2), 3))
    try:
        num_rows = len(junk)
    except (TypeError, RuntimeError):
        num_rows = 1
    for call in (rig.assembler.assemble_slots, rig.assembler.check_slots):
        with pytest.raises(MALFORMED):
            call(junk)
        if junk is not None:  # no owners: a call like any other
            with pytest.raises(MALFORMED):
                call([0] * num_rows, junk)
    rig.assert_untouched()


# -- calls that are malformed as a whole


N = 3  # rows of the batch that is good but for one thing

VECTORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "int32": lambda v: v.int(),
    "step 2": lambda v: v.repeat_interleave(2)[::2],
    "offset": lambda v: torch.cat([v[:1], v])[1:],
    "column": lambda v: torch.stack([v, v * 3], 1)[:, 0],
    "subclass": lambda v: v.as_subclass(Traced),
    "parameter": lambda v: torch.nn.Parameter(v, requires_grad=False),
    "own": lambda v: v,
}
BAD_VECTORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda v: None,
    "number": lambda v: 3,
    "text": lambda v: "123",
    "list": lambda v: v.tolist(),
    "array": lambda v: v.numpy(),
    "object": lambda v: object(),
    "float": lambda v: v.float(),
    "graph": lambda v: v.float().requires_grad_(),
    "bool": lambda v: v.bool(),
    "uint8": lambda v: v.to(torch.uint8),
    "int16": lambda v: v.to(torch.int16),
    "uint64": lambda v: v.to(torch.uint64),
    "complex": lambda v: v.to(torch.complex64).conj(),
    "shorter": lambda v: v[1:],
    "longer": lambda v: torch.cat([v[:1] + 100, v]),
    "empty": lambda v: v[:0],
    "rank 0": lambda v: v.sum(),
    "rank 2": lambda v: v[:, None],
    "meta": lambda v: v.to("meta"),
    "sparse": lambda v: v.to_sparse(),
    "quantized": lambda v: quantized(v, torch.qint32),
    "freed": lambda v: freed(v.clone()),
    "freed view": lambda v: freed_view(torch.int64, len(v)),
    "shrunk": lambda v: shrunk(v.clone()),
    "freed, rank 2": lambda v: freed_view(torch.int64, len(v), 1),
    "jagged": lambda v: jagged(2, 3),
    "negated": lambda v: torch._neg_view(v.neg()),
}
PAD_JUNK: dict[str, Any] = {
    "too few": N - 1, "none of them": 0, "below zero": -1, "float": 3.0, "nan": math.nan, "bool": True, "text": "3",
    "list": [3], "tensor": torch.tensor(3), "NumPy": np.int64(3), "object": object(), "too many": 9,
    "far too many": 2**70, "digits without end": 10**5000,
}  # fmt: skip
ID_JUNK: dict[str, Any] = {
    "too few": ["a"], "too many": "abcd", "none": [], "number": 3, "object": object(), "generator": (i for i in "abc"),
    "scalar": torch.tensor(1), "a set": {"a"}, "a dict": {"a": 1},
}  # fmt: skip
RELAY_JUNK: dict[str, Callable[[dg.Relay], Any]] = {
    "text": lambda r: "relay",
    "number": lambda r: 3,
    "a map": lambda r: r.future_map,
    "without a map": lambda r: SimpleNamespace(future_indices=r.future_indices),
    "a map of text": lambda r: dg.Relay("map", r.future_indices, r.seq_lens, r.bonus_tokens),  # type: ignore[arg-type]
}


def swapped(relay: dg.Relay, name: str, vector: Any) -> dg.Relay:
    vectors = {key: getattr(relay, key) for key in ("future_indices", "seq_lens", "bonus_tokens", "future_indices_cpu")}
    return dg.Relay(relay.future_map, **{**vectors, name: vector})


VECTOR_NAMES = ("future_indices", "seq_lens", "bonus_tokens", "future_indices_cpu")


@plainly
def check_malformed(machine: Machine, make: Callable[[dg.FutureMap], dict[str, Any]], way: str) -> None:
    """A good batch but for what `make` gives: refused, and nothing written."""
    fields = (dg.Field("a", 3, torch.int16), dg.Field("b", 2, torch.float32))
    rows = random_rows(fields, N)
    rig = Rig(fields, machine, written_mailbox(fields, rows, N))
    call: dict[str, Any] = {"relay": relay_to(rig.future_map, [4, 2, 7]), **make(rig.future_map)}
    assemble, what = {
        "rows": (rig.assembler.assemble_rows, rows),
        "slots": (rig.assembler.assemble_slots, {"slots": list(range(N))}),
    }[way]
    with pytest.raises(MALFORMED):
        assemble(**what, **call)
    rig.assert_untouched()


MALFORMED_CALLS: dict[str, Callable[[dg.FutureMap], dict[str, Any]]] = {
    **{f"pad_to {name}": lambda m, junk=junk: {"pad_to": junk} for name, junk in PAD_JUNK.items()},
    **{f"request_ids {name}": lambda m, junk=junk: {"request_ids": junk} for name, junk in ID_JUNK.items()},
    **{
        f"{vector} {name}": lambda m, vector=vector, change=change: {
            "relay": swapped(relay_to(m, [4, 2, 7]), vector, change(torch.tensor([4, 2, 7])))
        }
        for vector in VECTOR_NAMES
        for name, change in BAD_VECTORS.items()
        if (vector, name) != ("future_indices_cpu", "none")
    },
    **{
        f"relay {name}": lambda m, make=make: {"relay": make(relay_to(m, [4, 2, 7]))}
        for name, make in RELAY_JUNK.items()
    },
    "nothing to write": lambda m: {"relay": None, "batch_outputs": False},
    "an index twice": lambda m: {"relay": relay_to(m, [4, 2, 4])},
    "an index out of range": lambda m: {"relay": relay_to(m, [4, 2, MAP_SLOTS])},
    "an index below zero": lambda m: {"relay": relay_to(m, [4, 2, -1])},
    "an index of 64 bits": lambda m: {"relay": relay_to(m, [4, 2, -(2**63)])},
    "a map of other fields": lambda m: {"relay": relay_to(dg.FutureMap([dg.Field("c", 1, torch.int8)], 9), [4, 2, 7])},
}


@pytest.mark.parametrize("way", ["rows", "slots"])
@TWIN_AND_KERNEL
def test_malformed_calls(machine: Machine, way: str) -> None:
    """Guards against an argument beside the rows that is looked at too late, or not: each alone, nothing written."""
    for make in MALFORMED_CALLS.values():
        check_malformed(machine, make, way)


ROW_LISTS: dict[str, Any] = {
    "number": 3, "float": 1.5, "object": object(), "class": int, "scalar tensor": torch.tensor(1.0),
    "scalar array": np.array(1.0), "shorter": [[1, 2]], "empty": [], "dict": {"a": 1, "b": 2}, "text": "ab",
    "meta": torch.zeros((N, 2), device="meta"), "sparse": torch.ones(N, 2).to_sparse(), "flat": torch.zeros(N),
    "flat array": np.zeros(N), "deep array": np.zeros((N, 2, 1)), "wide": torch.zeros((N, 3)),
    "object array": np.array([None] * N), "exhausted": iter(()), "opaque": torch.ones(N, 2).to_mkldnn(),
    "jagged": jagged(*[2] * N), "freed": freed_view(torch.float32, N, 2),
    "freed, without offset": freed(torch.zeros(N, 2)),
}  # fmt: skip


@plainly
def check_row_list(machine: Machine, name: str) -> None:
    fields = (dg.Field("a", 3, torch.int16), dg.Field("b", 2, torch.float32))
    rows: dict[str, Any] = {**random_rows(fields, N), "b": ROW_LISTS[name]}
    rig = Rig(fields, machine)
    with pytest.raises(MALFORMED):
        rig.assembler.assemble_rows(relay=relay_to(rig.future_map, [4, 2, 7]), **rows)
    rig.assert_untouched()


@TWIN_AND_KERNEL
@pytest.mark.parametrize("junk", ROW_LISTS)
def test_lists_that_are_no_lists_of_rows(machine: Machine, junk: str) -> None:
    """Guards against a list of rows that cannot be counted or walked, or whose rows are none."""
    check_row_list(machine, junk)


# -- the mailbox: any calls in any order, beside a model of plain lists


@dataclass(frozen=True)
class Op:
    """One call of a mailbox."""

    name: str
    slot: Any = None  # of put, generation, an engine's write; a list for accept and release
    owner: Any = None
    rows: Any = None  # a field -> Drawn
    lag: int = 0  # how many generations behind the engine's is


class ModelMailbox:
    """What a mailbox is, in plain lists: state, owner, generation and rows of each slot, and what the record says."""

    def __init__(self, num_slots: int) -> None:
        self.states = ["free"] * num_slots
        self.owners = [0] * num_slots
        self.generations = [1] * num_slots
        self.rows: list[dict[str, torch.Tensor | None]] = [{}] * num_slots
        self.tags: list[tuple[int, int, dict[str, torch.Tensor | None]] | None] = [None] * num_slots

    def is_slot(self, slot: object) -> bool:
        is_integer = isinstance(slot, (int, np.integer)) and not isinstance(slot, bool)
        return is_integer and 0 <= int(slot) < len(self.states)  # type: ignore[call-overload,no-any-return]

    def write(self, slot: int, owner: int, rows: dict[str, torch.Tensor | None]) -> None:
        self.states[slot], self.owners[slot], self.rows[slot] = "written", owner, rows
        self.tags[slot] = (owner, self.generations[slot], rows)


def is_owner(owner: object) -> bool:
    return isinstance(owner, (int, np.integer)) and -(2**63) <= int(owner) < 2**63


_SLOT_JUNK = st.sampled_from(
    [-1, 4, 99, 2**31, 2**63, -(2**70), True, False, 1.0, math.nan, None, "0", b"0", (), [0], {}, object(),
     torch.tensor(0), np.bool_(True), np.float64(0), np.array([0]), slice(None), ...]
)  # fmt: skip
_OWNER_JUNK = st.sampled_from(
    [2**63, -(2**63) - 1, 10**30, 1.0, math.nan, None, "1", [1], torch.tensor(1), np.uint64(2**63)]
)


@st.composite
def mailbox_cases(draw: Any) -> tuple[tuple[dg.Field, ...], int, list[Op]]:
    fields = draw(field_lists())
    num_slots = draw(st.integers(1, 4))
    number = st.integers(0, num_slots - 1)
    good_slot = number | number.map(np.int64) | number.map(np.uint8)
    good_owner = st.sampled_from([0, 1, 1, np.int32(1), -(2**63)])
    ops = []
    for _ in range(draw(st.integers(1, 12))):
        is_good = draw(st.integers(0, 3)) > 0
        slot = good_slot if is_good else good_slot | _SLOT_JUNK
        owner = good_owner if is_good else good_owner | _OWNER_JUNK
        name = draw(st.sampled_from(["acquire", "put", "put", "put", "engine", "accept", "accept", "release", "read"]))
        if name == "put":
            bad = None if is_good else draw(st.sampled_from([None, *fields]))
            rows = {f.name: draw_bad(draw, f) if f is bad else draw_good(draw, f, False) for f in fields}
            ops.append(Op(name, draw(slot), draw(owner), rows))
        elif name == "engine":
            rows = {f.name: draw_good(draw, f, False) for f in fields}
            ops.append(Op(name, draw(number), draw(_OWNERS), rows, draw(st.sampled_from([0, 0, 0, 1, -1]))))
        elif name == "accept":
            slots = draw(st.lists(number, max_size=3, unique=True) if is_good else st.lists(slot, max_size=3))
            same = st.lists(good_owner, min_size=len(slots), max_size=len(slots))
            ops.append(Op(name, slots, draw(same if is_good else same | st.lists(owner, max_size=3))))
        elif name == "release":
            ops.append(Op(name, draw(st.lists(number, max_size=3, unique=True) | st.lists(slot, max_size=3) | slot)))
        else:
            ops.append(Op(name, draw(slot)))
    return fields, num_slots, ops


def slab_of(mailbox: dg.DraftMailbox) -> bytes:
    info = mailbox.buffer_info()
    return ctypes.string_at(info.address, info.num_bytes)


def apply_op(mailbox: dg.DraftMailbox, model: ModelMailbox, op: Op) -> None:
    """Do `op` on both; the mailbox must refuse what the model refuses, and write nothing then."""
    before = slab_of(mailbox)
    if op.name == "acquire":
        if "free" not in model.states:
            with pytest.raises(dg.MailboxFullError):
                mailbox.acquire()
            return
        slot = mailbox.acquire()
        assert model.states[slot] == "free"
        model.states[slot] = "held"
    elif op.name == "read":
        if model.is_slot(op.slot):
            assert mailbox.generation(op.slot) == model.generations[int(op.slot)]
        else:
            with pytest.raises(MALFORMED):
                mailbox.generation(op.slot)
    elif op.name == "engine":
        if model.states[op.slot] != "written":
            rows = {name: drawn.want for name, drawn in op.rows.items()}
            generation = model.generations[op.slot] - op.lag
            write_record(mailbox, op.slot, op.owner, rows, generation=generation)  # type: ignore[arg-type]
            model.tags[op.slot] = (op.owner, generation, rows)
    elif op.name == "put":
        is_good = model.is_slot(op.slot) and is_owner(op.owner) and not any(d.errors for d in op.rows.values())
        rows = {name: drawn.row for name, drawn in op.rows.items()}
        if is_good and not (model.states[int(op.slot)] == "written" and model.owners[int(op.slot)] != op.owner):
            mailbox.put(op.slot, op.owner, **rows)
            model.write(int(op.slot), int(op.owner), {name: drawn.want for name, drawn in op.rows.items()})
            return
        with pytest.raises(MALFORMED):
            mailbox.put(op.slot, op.owner, **rows)
        assert slab_of(mailbox) == before
    elif op.name == "accept":
        accept(mailbox, model, op.slot, op.owner)
        assert slab_of(mailbox) == before
    else:
        release(mailbox, model, op.slot)


def release(mailbox: dg.DraftMailbox, model: ModelMailbox, given: Any) -> None:
    before = slab_of(mailbox)
    slots = given.tolist() if isinstance(given, (np.ndarray, torch.Tensor)) else given
    slots = list(slots) if isinstance(slots, (list, tuple, dict)) else [slots]
    is_good = all(model.is_slot(slot) and model.states[int(slot)] in ("held", "written") for slot in slots)
    if not is_good or len({int(slot) for slot in slots}) < len(slots):
        with pytest.raises(MALFORMED):
            mailbox.release(given)
        assert slab_of(mailbox) == before
        return
    mailbox.release(given)
    for slot in map(int, slots):
        model.states[slot], model.tags[slot] = "free", None
        model.generations[slot] += 1


def accept(mailbox: dg.DraftMailbox, model: ModelMailbox, slots: list[Any], owners: list[Any]) -> None:
    bad = []
    for i, (slot, owner) in enumerate(zip(slots, owners, strict=False)):
        if not model.is_slot(slot) or not is_owner(owner):
            bad.append(i)
            continue
        tag, earlier = model.tags[int(slot)], slots[:i]
        is_tag = tag is not None and tag[:2] == (int(owner), model.generations[int(slot)])
        if not is_tag or int(slot) in [int(s) for s in earlier if model.is_slot(s)]:
            bad.append(i)
    if len(slots) == len(owners) and not bad:
        mailbox.accept(slots, owners)
        for slot in map(int, slots):
            tag = model.tags[slot]
            assert tag is not None
            model.states[slot], model.owners[slot], model.rows[slot] = "written", tag[0], tag[2]
        return
    with pytest.raises(MALFORMED) as caught:
        mailbox.accept(slots, owners)
    if isinstance(caught.value, dg.SlotError):
        assert [problem.position for problem in caught.value.problems] == bad


def check_mailbox_case(case: tuple[tuple[dg.Field, ...], int, list[Op]], machine: Machine) -> None:
    fields, num_slots, ops = case
    mailbox = dg.DraftMailbox(fields, num_slots, pin_memory=False)
    assembler = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine)
    model = ModelMailbox(num_slots)
    for op in ops:
        apply_op(mailbox, model, op)
        states = ["written" if s == "written" else "" for s in model.states]
        problems = assembler.check_slots(range(num_slots), model.owners)
        assert [p.position for p in problems] == [slot for slot, state in enumerate(states) if not state]
        assert [mailbox.generation(slot) for slot in range(num_slots)] == model.generations
        assert mailbox.num_free == model.states.count("free")
    written = [slot for slot, state in enumerate(model.states) if state == "written"]
    if written:
        batch = assembler.assemble_slots(written, [model.owners[slot] for slot in written])
        assert_batch(batch, fields, {f.name: [model.rows[slot].get(f.name) for slot in written] for f in fields})


def test_any_calls_of_a_mailbox() -> None:
    """Guards a slot's life against any calls in any order, junk among them: state, owner, generation and bytes."""
    twin = Machine(torch.device("cpu"), has_kernel=False, pins=False, zero_copy=False)
    fuzz(lambda case: check_mailbox_case(case, twin), mailbox_cases(), share=1.5)


RELEASE_JUNK: dict[str, Any] = {
    "none": None, "float": 1.5, "text": "0", "object": object(), "floats": [0.0], "bool": True, "bools": [True],
    "nested": [[0]], "rank 2 array": np.zeros((1, 1), np.int64), "float array": np.zeros(1),
    "rank 0 float": np.array(0.5), "float tensor": torch.zeros(1), "bool tensor": torch.tensor([True]),
    "rank 2 tensor": torch.zeros((1, 1), dtype=torch.int64),
    "dict": {0: 1, 9: 2}, "digits without end": [10**5000], "twice": [0, 0], "twice otherwise": (0, np.int8(0)),
    "meta tensor": torch.zeros(1, dtype=torch.int64, device="meta"), "sparse tensor": torch.ones(1).long().to_sparse(),
    "jagged tensor": jagged(1, 2),
    "freed tensor": freed(torch.zeros(1, dtype=torch.int64)), "freed view": freed_view(torch.int64, 1),
}  # fmt: skip


@plainly
def check_release(name: str) -> None:
    fields = (dg.Field("a", 3, torch.int16),)
    mailbox = written_mailbox(fields, random_rows(fields, 3), 3)
    before = slab_of(mailbox)
    with pytest.raises(MALFORMED):
        mailbox.release(RELEASE_JUNK[name])
    assert slab_of(mailbox) == before
    assert dg.DraftAssembler(fields, mailbox=mailbox).check_slots([0, 1, 2], [100, 101, 102]) == []


@pytest.mark.parametrize("junk", RELEASE_JUNK)
def test_release_of_what_is_no_slot(junk: str) -> None:
    """Guards against a release of half a list, or of slots that nobody named."""
    check_release(junk)


# -- the future map: any calls in any order, beside a model of plain bytes


TABLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "own": lambda t: t,
    "columns": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "transposed": lambda t: t.T.contiguous().T,
    "rows of step 2": lambda t: t.repeat_interleave(2, 0)[::2],
    "graph": lambda t: t.clone().requires_grad_() if t.dtype.is_floating_point else t,
    "subclass": lambda t: t.as_subclass(Traced),
    "negated": lambda t: negated(t) if t.dtype in (torch.float32, torch.float64) and t.numel() > 1 else t,
}
BAD_TABLES: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda t: t.tolist(),
    "text": lambda t: "rows",
    "array": lambda t: np.zeros(t.shape),
    "flat": lambda t: t.flatten(),
    "wider": lambda t: torch.cat([t, t], 1),
    "another row": lambda t: torch.cat([t, t[:1]]) if len(t) else torch.zeros((1, t.shape[1]), dtype=t.dtype),
    "scalar": lambda t: torch.zeros((), dtype=t.dtype),
    "another dtype": lambda t: torch.zeros(t.shape, dtype=torch.int16 if t.dtype is torch.float16 else torch.float16),
    "complex": lambda t: torch.zeros(t.shape, dtype=torch.complex64).conj(),
    "meta": lambda t: torch.zeros(t.shape, dtype=t.dtype, device="meta"),
    "freed": lambda t: freed(t.clone()) if len(t) else "nothing to free",
    "sparse": lambda t: torch.zeros(t.shape).to_sparse() if len(t) else "no rows",
    "opaque": lambda t: torch.zeros(t.shape).to_mkldnn() if len(t) else "no rows",
    "quantized": quantized,
}


@dataclass(frozen=True)
class MapOp:
    """One call of a future map."""

    name: str  # publish, stash, resolve
    indices: tuple[int, ...]
    forms: tuple[str, str]  # how the indices come, and the lengths or tokens
    tables: tuple[str, ...] = ()  # a field: how its rows come; "none" for none
    seed: int = 0
    valid: tuple[bool, ...] | None = None  # of optional fields, as a resolve left it


@st.composite
def map_cases(draw: Any) -> tuple[tuple[dg.Field, ...], list[MapOp]]:
    fields = draw(field_lists())
    ops = []
    good_vector = st.sampled_from(sorted(VECTORS))
    any_vector = st.sampled_from(sorted((VECTORS.keys() | BAD_VECTORS.keys()) - {"empty"}))
    any_table = st.sampled_from(sorted(TABLES.keys() | BAD_TABLES.keys() | {"none"}))
    good = st.lists(st.integers(1, 7), max_size=5, unique=True) | st.just([0, 3, 0])
    for _ in range(draw(st.integers(1, 5))):
        is_good = draw(st.integers(0, 2)) > 0
        name = draw(st.sampled_from(["publish", "stash", "stash", "resolve"]))
        any_index = st.integers(-1, 8) | st.sampled_from([2**31, -(2**63), 2**63 - 1])
        indices = draw(good if is_good else st.lists(any_index, max_size=5))
        forms = draw(st.tuples(*[good_vector if is_good else any_vector] * 2))
        good_tables = [st.sampled_from(sorted(TABLES) + (["none"] if field.optional else [])) for field in fields]
        tables = draw(st.tuples(*(good_tables if is_good else [any_table] * len(fields))))
        valid = draw(st.none() | st.tuples(*[st.booleans()] * len(indices)))
        ops.append(MapOp(name, tuple(indices), forms, tables, draw(st.integers(0, 2**16)), valid))
    return fields, ops


class ModelMap:
    """What a future map is: the bytes of every table, poisoned at first."""

    def __init__(self, future_map: dg.FutureMap) -> None:
        self.tables = {name: raw(table) for name, table in relay_tensors(future_map).items()}

    def assert_equal(self, future_map: dg.FutureMap) -> None:
        for name, table in relay_tensors(future_map).items():
            np.testing.assert_array_equal(raw(table)[1:], self.tables[name][1:], err_msg=name)  # 0 is the sink


def vector_in_form(values: Sequence[int], form: str) -> Any:
    vector = torch.tensor(values, dtype=torch.int64)
    return (VECTORS.get(form) or BAD_VECTORS[form])(vector)


def is_good_vector(values: Sequence[int], form: str) -> bool:
    """Whether the form leaves it a vector of as many integers."""
    return form in VECTORS and (form != "int32" or all(-(2**31) <= value < 2**31 for value in values))


def check_map_case(case: tuple[tuple[dg.Field, ...], list[MapOp]], machine: Machine) -> None:
    fields, ops = case
    future_map = poisoned_map(fields, 8, machine=machine)
    model = ModelMap(future_map)
    for op in ops:
        # Of no values there is nothing to free or to take away.
        degenerate = {"sparse", "quantized", "freed", "freed view", "shrunk", "longer", "shorter"}
        if op.indices or not degenerate.intersection(op.forms):
            apply_map_op(future_map, model, op)
        model.assert_equal(future_map)


def apply_map_op(future_map: dg.FutureMap, model: ModelMap, op: MapOp) -> None:
    num_rows, fields = len(op.indices), future_map.fields
    if op.forms[0] == "shorter":  # and that may be as long as the numbers
        return
    if op.forms[0] == "int32" and any(index != np.int64(index).astype(np.int32) for index in op.indices):
        return  # made for such a vector they become others
    try:
        indices = vector_in_form(op.indices, op.forms[0])
        numbers = vector_in_form(range(70, 70 + num_rows), op.forms[1])
    except (RuntimeError, IndexError):  # no such form of no values
        return
    others = [index for index in op.indices if index != 0]
    is_repeated = len({*others}) < len(others) and op.name != "resolve"
    is_good = is_good_vector(op.indices, op.forms[0]) and not is_repeated
    is_good = is_good and all(0 <= index < 8 for index in op.indices)
    if op.name != "resolve":
        is_good = is_good and is_good_vector(range(num_rows), op.forms[1])
    where = list(op.indices)
    if op.name == "publish":
        expect(is_good, lambda: future_map.publish(indices, numbers))
        if is_good and num_rows:
            model.tables["seq_lens"][where] = np.arange(70, 70 + num_rows)[:, None].view(np.uint8)
        return
    if op.name == "resolve":
        spec_info = dg.EagleDraftInput(future_indices=indices)
        batch = SimpleNamespace(spec_info=spec_info, seq_lens=None)
        if is_nothing(indices):
            future_map.resolve(batch)
            assert batch.seq_lens is None
            return
        expect(is_good, lambda: future_map.resolve(batch))
        if is_good and 0 not in where:
            for name, got in {**{f.name: spec_info.rows(f.name) for f in fields}, "seq_lens": batch.seq_lens[:, None],
                              "bonus_tokens": spec_info.bonus_tokens[:, None],
                              **{f"valid {n}": v[:, None] for n, v in spec_info.valid.items()}}.items():  # fmt: skip
                np.testing.assert_array_equal(raw(got), model.tables[name][where], err_msg=name)
        return
    stash(future_map, model, op, indices, numbers, is_good)


def is_nothing(indices: Any) -> bool:
    try:
        return indices is None or len(indices) == 0
    except (TypeError, RuntimeError):  # a nested tensor may have no length
        return False


def stash(future_map: dg.FutureMap, model: ModelMap, op: MapOp, indices: Any, tokens: Any, is_good: bool) -> None:
    num_rows, fields, where = len(op.indices), future_map.fields, list(op.indices)
    draft_input = dg.EagleDraftInput(bonus_tokens=tokens)
    given: dict[str, torch.Tensor | None] = {}
    rng = np.random.default_rng(op.seed)
    for field, form in zip(fields, op.tables, strict=True):
        bits = torch.stack([random_row(field, rng) for _ in range(num_rows)] or [random_row(field, rng)])[:num_rows]
        given[field.name] = None if form == "none" else bits
        if form == "none":
            is_good = is_good and field.optional
            continue
        is_good = is_good and form in TABLES
        draft_input.set_rows(field.name, (TABLES.get(form) or BAD_TABLES[form])(bits))
        if op.valid is not None and field.optional:
            draft_input.valid[field.name] = torch.tensor(op.valid, dtype=torch.bool)
    expect(is_good, lambda: future_map.stash(indices, draft_input))
    if not is_good or not num_rows:
        return
    model.tables["bonus_tokens"][where] = np.arange(70, 70 + num_rows)[:, None].view(np.uint8)
    for field in fields:
        rows = given[field.name]
        valid = [rows is not None] * num_rows
        if field.optional:
            valid = list(op.valid) if rows is not None and op.valid is not None else valid
            model.tables[f"valid {field.name}"][where] = np.array(valid)[:, None].view(np.uint8)
        for i, index in enumerate(where):
            if rows is not None and valid[i]:
                model.tables[field.name][index] = raw(rows[i])


def expect(is_good: bool, call: Callable[[], object]) -> None:
    if is_good:
        call()
    else:
        with pytest.raises(MALFORMED):
            call()


@TWIN_AND_KERNEL
def test_any_calls_of_a_future_map(machine: Machine) -> None:
    """Guards the relay against any calls in any order, junk among them: every byte of every table, after each."""
    fuzz(lambda case: check_map_case(case, machine), map_cases(), share=share_of(machine, 1.5, 0.1))


# -- constructors


_A = (dg.Field("a", 3, torch.float32),)
_OBJECTS = [None, True, False, 0, -1, 1, 2, 3, -(2**70), 1.0, 1.5, math.nan, math.inf, 1j, ..., object(), float, Traced]
_WORDS = ["", "x", "a b", "class", b"x", "cpu", "cpu:7", "meta", "xpu", "fixed", "pinned", "fresh", torch.device("cpu")]
_HEAPS = [
    [],
    [1],
    ["a"],
    (),
    {},
    {"a": 1},
    np.int64(3),
    np.float32(1),
    np.array([1, 2]),
    torch.tensor(3),
    torch.zeros(2),
]
_TYPES = [torch.float32, torch.int64, torch.complex64, torch.complex32, _A[0], _A, [*_A], _A * 2, (*_A, 1)]
_NINE = [dg.Field(f"f{i}", 1, torch.int8, optional=True) for i in range(9)]
_ANYTHING = st.sampled_from([*_OBJECTS, *_WORDS, *_HEAPS, *_TYPES, _NINE])
_FIELDS = (dg.Field("a", 2, torch.int8), dg.Field("b", 3, torch.float32, optional=True))
CONSTRUCTORS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "Field": (dg.Field, {"name": "a", "width": 2, "dtype": torch.int8, "optional": False, "allow_cast": False}),
    "eagle_fields": (dg.eagle_fields, {"topk": 1, "hidden_size": 4, "hidden_dtype": torch.half, "num_steps": 1}),
    "DraftMailbox": (dg.DraftMailbox, {"fields": _FIELDS, "num_slots": 2, "pin_memory": False}),
    "FutureMap": (dg.FutureMap, {"fields": _FIELDS, "num_slots": 2, "device": "cpu", "debug": False}),
    "DraftAssembler": (
        dg.DraftAssembler,
        {"fields": _FIELDS, "device": "cpu", "max_batch_size": 4, "mailbox": None, "outputs": "fixed",
         "output_memory": "device", "vocab_size": None},
    ),
}  # fmt: skip


@st.composite
def constructions(draw: Any) -> tuple[str, dict[str, Any]]:
    which = draw(st.sampled_from(sorted(CONSTRUCTORS)))
    arguments = dict(CONSTRUCTORS[which][1])
    for name in draw(st.sets(st.sampled_from(sorted(arguments)), min_size=1, max_size=2)):
        arguments[name] = draw(_ANYTHING)
    return which, arguments


def test_any_arguments_of_a_constructor() -> None:
    """Guards against settings that are taken and fail later, or fail with what no caller expects."""

    def check(case: tuple[str, dict[str, Any]]) -> None:
        which, arguments = case
        try:
            made = CONSTRUCTORS[which][0](**arguments)
        except MALFORMED:
            return
        if isinstance(made, dg.DraftAssembler):
            rows: dict[str, Any] = {f.name: [torch.ones(f.width, dtype=f.dtype)] for f in made.fields}
            assert made.assemble_rows(**rows).num_rows == 1
        if isinstance(made, dg.DraftMailbox):
            assert made.acquire() == 0
        if isinstance(made, dg.FutureMap):
            made.publish(torch.tensor([1]), torch.tensor([5]))
            assert made.new_seq_lens_buf[1].item() == 5

    fuzz(check, constructions(), share=3.0)


# -- traces


def nested(depth: int, is_object: bool) -> bytes:
    opening, closing = (b'{"a":', b"}") if is_object else (b"[", b"]")
    return opening * depth + b"1" + closing * depth


_JSON_NUMBERS = st.sampled_from(
    ["0", "-0", "-0.0", "1", "1.5", "1e3", "1E+3", "2147483647", "2147483648", "9007199254740992", "9007199254740993",
     "9007199254740992.0", "1e308", "1e309", "-1e309", "1e-400", "5e-324", "NaN", "Infinity", "-Infinity", "-1", "01",
     "+1", ".5", "1.", "0x10", "1_000", "9" * 4300, "9" * 4301, "-" + "9" * 4400, "1e" + "9" * 400,
     "0." + "0" * 5000 + "1"]
)  # fmt: skip


def _nested(inner: Any) -> Any:
    return inner | st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)


_JSON_VALUES = st.one_of(
    _JSON_NUMBERS.map(str.encode),
    st.integers(0, 2**31 - 1).map(lambda n: str(n).encode()),
    st.floats().map(lambda x: json.dumps(x).encode()),
    _nested(_nested(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5))).map(
        lambda value: json.dumps(value).encode()
    ),
    st.text(max_size=8).map(lambda text: json.dumps(text, ensure_ascii=False).encode(errors="surrogatepass")),
    st.sampled_from([b"true", b"null", b'"0"', b'"\\ud800"', b'"\\u0000"', b"[]", b"{}", b"", b'"', b"[1,", b"\\"]),
    st.builds(nested, st.sampled_from([5, 400, 990, 1100, 20_000, 150_000]), st.booleans()),
)
_KEYS = ("timestamp", "input_length", "output_length")


@st.composite
def good_lines(draw: Any) -> tuple[bytes, Arrival]:
    time = draw(st.integers(0, 2**53) | st.floats(0, 2**53) | st.sampled_from([0, 0.0, 5e-324, 2.0**53]))
    lengths = draw(st.tuples(*[st.integers(0, 2**31 - 1)] * 2))
    request = {"timestamp": time, "input_length": lengths[0], "output_length": lengths[1]}
    items = draw(st.permutations([*request.items(), ("hash_ids", [1, {"a": None}])]))
    return json.dumps(dict(items)).encode(), Arrival(float(time), *lengths)


@st.composite
def bad_lines(draw: Any) -> bytes:
    kind = draw(st.sampled_from(["values", "values", "keys", "cut", "bytes", "inserted", "value", "wrapped"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))  # type: ignore[no-any-return]
    if kind == "value":
        return draw(_JSON_VALUES)  # type: ignore[no-any-return]
    values = dict.fromkeys(_KEYS, b"5")
    values[draw(st.sampled_from([*_KEYS, "hash_ids"]))] = draw(_JSON_VALUES)
    line = b"{" + b", ".join(b'"%s": %s' % (key.encode(), value) for key, value in values.items()) + b"}"
    if kind == "keys":
        line = line.replace(draw(st.sampled_from(_KEYS)).encode(), draw(st.binary(max_size=12)))
    if kind == "cut":
        line = line[draw(st.integers(0, 20)) : len(line) - draw(st.integers(0, 20))]
    if kind == "inserted":
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.binary(max_size=4)) + line[at:]
    if kind == "wrapped":
        line = draw(st.sampled_from([b"\xef\xbb\xbf", b"[", b"\x00", b"\xff\xfe"])) + line
    return line


_LINE_ENDS = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b" \t\n", b"\r", b"", b"\x0b", b"\xe2\x80\xa8"])


def check_trace(path: Path, data: bytes, jitter: bool) -> list[Arrival] | None:
    """Arrivals in order of time, or an error of one line that names the file; nothing else."""
    path.write_bytes(data)
    try:
        arrivals = read_trace(path, jitter=jitter, seed=1)
    except TraceError as error:
        text = str(error)
        assert text.startswith(str(path)) and len(text.splitlines()) == 1 and text.isprintable() and len(text) < 1000
        return None
    assert arrivals
    times = [arrival.time_ms for arrival in arrivals]
    assert all(type(time) is float and 0 <= time < 2.0**54 for time in times) and times == sorted(times)
    for arrival in arrivals:
        for length in (arrival.input_length, arrival.output_length):
            assert type(length) is int and 0 <= length < 2**31
    return arrivals


def test_any_good_trace(tmp_path: Path) -> None:
    """Guards against a request that is lost, changed or handed on out of turn."""

    def check(lines: list[tuple[bytes, Arrival]], end: bytes) -> None:
        data = end.join(line for line, _ in lines)
        arrivals = check_trace(tmp_path / "trace", data, jitter=False)
        assert arrivals == sorted((arrival for _, arrival in lines), key=lambda arrival: arrival.time_ms)
        moved = check_trace(tmp_path / "trace", data, jitter=True)
        assert moved is not None and arrivals is not None
        assert [a.input_length for a in moved] == [a.input_length for a in arrivals]

    ends = st.sampled_from([b"\n", b"\r\n", b"\n\n", b" \t\n"])
    fuzz(check, st.lists(good_lines(), min_size=1, max_size=8), ends, share=1.0)


def test_any_bad_trace(tmp_path: Path) -> None:
    """Guards against a traceback, an error of many lines, and a broken line that is taken for a request."""
    line = bad_lines() | good_lines().map(lambda pair: pair[0])

    def check(lines: list[tuple[bytes, bytes]], jitter: bool) -> None:
        check_trace(tmp_path / "trace", b"".join(text + end for text, end in lines), jitter)

    fuzz(check, st.lists(st.tuples(line, _LINE_ENDS), max_size=4), st.booleans(), share=3.0)


def test_any_bytes_are_a_trace_or_none(tmp_path: Path) -> None:
    """Guards the reader against files of another kind."""
    fuzz(lambda data, jitter: check_trace(tmp_path / "t", data, jitter), st.binary(), st.booleans(), share=1.0)


# -- what the fuzzers found, by name


_TWIN = Machine(torch.device("cpu"), has_kernel=False, pins=False, zero_copy=False)
_KERNEL = Machine(torch.device("cpu"), has_kernel=True, pins=False, zero_copy=True)


def lazily_negated(first: int, last: int) -> torch.Tensor:
    """[first, ..., last] as a dense tensor of more than one element with torch's negative bit."""
    numbers = torch.arange(first, last + 1, dtype=torch.float32).neg()
    pairs = torch.cat([torch.zeros(1), numbers, torch.zeros((len(numbers) + 1) % 2)]).view(-1, 2)
    return torch.view_as_complex(pairs).conj().imag.as_strided((len(numbers),), (1,), 1)


def test_backward_array_of_one_slot(machine: Machine) -> None:
    """Guards a scheduler's one slot out of a reversed array: a good call like any other."""
    rows = random_rows(_A, 3)
    assembler = dg.DraftAssembler(_A, mailbox=written_mailbox(_A, rows, 3), machine=machine)
    assert_batch(assembler.assemble_slots(np.array([2])[::-1]), _A, {"a": rows["a"][2:]})


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
def test_release_of_narrow_numbers(dtype: Any) -> None:
    """Guards against a tag that is written elsewhere: slots out of an array of bytes, which every other call takes."""
    fields = (dg.Field("a", 300, torch.float32),)
    mailbox = written_mailbox(fields, random_rows(fields, 64), 64)
    mailbox.release(list(np.arange(64, dtype=dtype)))
    assert mailbox.num_free == 64


def test_put_of_a_dense_negated_row() -> None:
    """Guards against a sign that is lost in silence: only rows of one element were thought to be dense and negated."""
    row = lazily_negated(1, 3)
    assert row.tolist() == [1.0, 2.0, 3.0] and row.is_contiguous() and row.is_neg()
    mailbox = dg.DraftMailbox(_A, 1, pin_memory=False)
    mailbox.put(0, 0, a=row)
    assert mailbox.view("a").tolist() == [[1.0, 2.0, 3.0]]


def test_kernel_of_dense_negated_rows() -> None:
    """Guards the same where rows are read by their address."""
    assembler = dg.DraftAssembler(_A, machine=_KERNEL)
    assert assembler.assemble_rows(a=[lazily_negated(1, 3)]).tensors["a"].tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("other", [[9.0, 9.0, 9.0], torch.full((6,), 9.0)[::2]], ids=["list", "strided"])
def test_rows_of_the_fixed_outputs_beside_others(other: Any) -> None:
    """Guards a batch fed back from fixed outputs, beside a new row that is not plain: right, or refused by name."""
    assembler = dg.DraftAssembler(_A, outputs="fixed", max_batch_size=4, machine=_TWIN)
    former = assembler.assemble_rows(a=[[float(i)] * 3 for i in range(4)]).tensors["a"]
    try:
        batch = assembler.assemble_rows(a=[former[3], other, former[0]])
    except MALFORMED:
        assert former[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        return
    assert batch.tensors["a"][:, 0].tolist() == [3.0, 9.0, 0.0]


BAD_FLAGS: dict[str, Any] = {
    "too few": torch.ones(1, dtype=torch.bool), "too many": torch.ones(9, dtype=torch.bool),
    "numbers": torch.ones(2, dtype=torch.int64), "list": [True, True], "rank 2": torch.ones((2, 1), dtype=torch.bool),
    "freed": freed(torch.ones(2, dtype=torch.bool)),
}  # fmt: skip


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_stash_with_flags_that_do_not_fit(flags: str) -> None:
    """Guards against half a stash, and flags read beyond their end: as many as the rows, or nothing is written."""
    future_map = poisoned_map([dg.Field("seed", 3, torch.int32, optional=True)], 8)
    given = dg.EagleDraftInput(bonus_tokens=torch.arange(2), extras={"seed": torch.zeros(2, 3, dtype=torch.int32)})
    given.valid["seed"] = BAD_FLAGS[flags]
    with pytest.raises(MALFORMED):
        future_map.stash(torch.tensor([3, 5]), given)
    assert_poisoned(*relay_tensors(future_map).values())


def test_stash_of_one_negated_element() -> None:
    """Guards a draft input of one row and column: contiguous, and yet lazily negated."""
    future_map = dg.FutureMap([dg.Field("hidden_states", 1, torch.float32)], 8)
    hidden_states = torch.tensor([[1 - 5j]]).conj().imag
    future_map.stash(torch.tensor([3]), dg.EagleDraftInput(hidden_states=hidden_states, bonus_tokens=torch.tensor([1])))
    assert future_map.buffers["hidden_states"][3].tolist() == [5.0]


@pytest.mark.parametrize(
    ("name", "slot"), [("a", -1), ("a", 3), ("a", 1.5), ("a", None), ("a", True), ("a", "0"), ("b", 0)], ids=str
)
def test_row_of_no_slot(name: str, slot: Any) -> None:
    """Guards against slot -1 meaning the last one: another request's row, handed out without a word."""
    mailbox = written_mailbox(_A, random_rows(_A, 3), 3)
    with pytest.raises((dg.SlotError, ValueError)):
        mailbox.row(name, slot)


def test_view_of_no_field() -> None:
    """Guards a misspelt field: named as one, as `put` does."""
    with pytest.raises(ValueError, match="zz"):
        dg.DraftMailbox(_A, 1, pin_memory=False).view("zz")


@pytest.mark.parametrize("device", ["banana", "", "cpu:x", 0])
@pytest.mark.parametrize("make", [dg.DraftAssembler, dg.FutureMap])
def test_device_that_torch_does_not_know(make: Callable[..., object], device: Any) -> None:
    """Guards against a misspelt device that is no ValueError, as other wrong settings are."""
    with pytest.raises(MALFORMED):
        make(_A, device=device, **({"num_slots": 2} if make is dg.FutureMap else {}))


@pytest.mark.parametrize("fields", ["ab", [1, 2], [None], ["a"]], ids=str)
def test_future_map_of_what_are_no_fields(fields: Any) -> None:
    """Guards the one constructor that does not look at its fields."""
    with pytest.raises(MALFORMED):
        dg.FutureMap(fields, 4)


@pytest.mark.parametrize("mailbox", ["mailbox", 3, object()], ids=["text", "number", "object"])
def test_assembler_of_what_is_no_mailbox(mailbox: Any) -> None:
    """Guards against a mailbox that is none."""
    with pytest.raises(MALFORMED):
        dg.DraftAssembler(_A, mailbox=mailbox)


TOO_LARGE: dict[str, Callable[[], object]] = {
    "mailbox": lambda: dg.DraftMailbox(_A, 2**70, pin_memory=False),
    "future map": lambda: dg.FutureMap(_A, 2**70),
    "fixed outputs": lambda: dg.DraftAssembler(_A, max_batch_size=2**70, outputs="fixed"),
    "record": lambda: dg.DraftMailbox([dg.Field("a", 2**70, torch.int8)], 1, pin_memory=False),
}


@pytest.mark.parametrize("which", TOO_LARGE)
def test_sizes_that_no_machine_has(which: str) -> None:
    """Guards against a number of slots that is no address any more."""
    with pytest.raises((ValueError, TypeError, MemoryError)):
        TOO_LARGE[which]()


@pytest.mark.parametrize("dtype", [torch.quint8, torch.bits8, torch.int4, torch.float4_e2m1fn_x2], ids=str)
def test_dtypes_that_hold_no_numbers(dtype: torch.dtype) -> None:
    """Guards the promise of Field, "any real torch dtype": it works, or is refused when it is written down."""
    try:
        field = dg.Field("a", 2, dtype)
    except ValueError:
        return
    row = torch.zeros(2, dtype=torch.uint8).view(dtype)
    assert dg.DraftAssembler([field]).assemble_rows(a=[row]).num_rows == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_lists_that_a_dtype_without_infinity_cannot_hold(dtype: torch.dtype) -> None:
    """Guards against a number that becomes another in silence: these dtypes have no infinity to tell by."""
    problems = dg.DraftAssembler([dg.Field("a", 1, dtype)]).check_rows(a=[[1e10]])
    assert [problem.error for problem in problems] == [dg.RowDtypeError]


def test_lists_of_large_unsigned_numbers() -> None:
    """Guards a number that fits from being refused: [2**63] is taken, [np.uint64(2**63)] is not."""
    assembler = dg.DraftAssembler([dg.Field("a", 1, torch.uint64)])
    batch = assembler.assemble_rows(a=[[2**63], [np.uint64(2**63)]])
    assert batch.tensors["a"].view(torch.int64).tolist() == [[-(2**63)], [-(2**63)]]


def test_request_ids_that_have_no_order() -> None:
    """Guards ids of the right number that are no sequence: the fault of a row must not hide behind theirs."""
    with pytest.raises(MALFORMED):
        dg.DraftAssembler(_A).assemble_rows({"x": 1}, a=[None])  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["put", "accept", "release", "generation"])
def test_slot_of_too_many_digits(call: str) -> None:
    """Guards the class of the error: a caller that catches SlotError must get one."""
    mailbox = dg.DraftMailbox(_A, 2, pin_memory=False)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: mailbox.put(10**5000, 1, a=[1.0, 2.0, 3.0]),
        "accept": lambda: mailbox.accept([10**5000], [1]),
        "release": lambda: mailbox.release([10**5000]),
        "generation": lambda: mailbox.generation(10**5000),
    }
    with pytest.raises(dg.SlotError):
        calls[call]()


def test_name_of_a_trace_with_a_line_end(tmp_path: Path) -> None:
    """Guards an error of one line, whatever the file is called."""
    path = tmp_path / "a\nb"
    path.write_bytes(b"{")
    with pytest.raises(TraceError) as caught:
        read_trace(path, jitter=False, seed=0)
    assert len(str(caught.value).splitlines()) == 1


def test_line_number_after_a_long_blank_line(tmp_path: Path) -> None:
    """Guards the number of the bad line."""
    path = tmp_path / "t"
    path.write_bytes(b" " * (1 << 20) + b"\n{")
    with pytest.raises(TraceError, match=r"t:2: is not JSON"):
        read_trace(path, jitter=False, seed=0)


def test_resolve_of_jagged_indices() -> None:
    """Guards against torch's internal error for a nested tensor, which has no length."""
    future_map = dg.FutureMap((dg.Field("a", 3, torch.float32),), 8)
    batch = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=jagged(2, 3)), seq_lens=None)
    with pytest.raises(dg.RelayError, match="future_indices is"):
        future_map.resolve(batch)


def test_stash_of_a_jagged_table() -> None:
    """Guards against rows of different widths: refused as what they are."""
    future_map = poisoned_map(_A, 8)
    with pytest.raises(dg.RelayError):
        future_map.stash(
            torch.tensor([3, 5]), dg.EagleDraftInput(bonus_tokens=torch.arange(2), extras={"a": jagged(3, 3)})
        )
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("flags", [None, [], torch.ones(2, dtype=torch.bool)], ids=["none", "list", "tensor"])
def test_stash_with_flags_that_are_no_mapping(flags: Any) -> None:
    """Guards a foreign draft input that calls something else `valid`."""
    future_map = poisoned_map([dg.Field("seed", 3, torch.int32, optional=True)], 8)
    given = SimpleNamespace(bonus_tokens=torch.arange(2), seed=torch.zeros(2, 3, dtype=torch.int32), valid=flags)
    with pytest.raises(MALFORMED):
        future_map.stash(torch.tensor([3, 5]), given)
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("number", [-1.0, 0.0])
def test_lists_that_a_dtype_without_sign_cannot_hold(number: float) -> None:
    """Guards against a number that becomes another in silence."""
    problems = dg.DraftAssembler([dg.Field("a", 1, torch.float8_e8m0fnu)]).check_rows(a=[[number]])
    assert [problem.error for problem in problems] == [dg.RowDtypeError]


def test_masked_rows() -> None:
    """Guards against a number that its owner calls missing: rows are never invented (slots are refused so already)."""
    row = np.ma.masked_array([1, 2, 3], [False, True, False], np.float32)
    assert [problem.position for problem in dg.DraftAssembler(_A).check_rows(a=[row])] == [0]
    with pytest.raises(dg.DraftRowError):
        dg.DraftMailbox(_A, 1, pin_memory=False).put(0, 1, a=row)


def test_request_ids_that_cannot_be_printed() -> None:
    """Guards the class of a bad row's error, whatever the request is called."""
    with pytest.raises(dg.MissingRowError):
        dg.DraftAssembler(_A).assemble_rows([10**5000], a=[None])
