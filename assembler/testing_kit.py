"""What the cases of the contract kit work with: requests of random bits, a builder that is called as an engine does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from draftgather.algorithms import CustomSpecAlgo
from draftgather.builder import REQUEST_ROWS
from draftgather.draft_input import EagleDraftInput
from draftgather.errors import shown
from draftgather.fields import Field
from draftgather.future_map import FutureMap
from draftgather.schedule_batch import ScheduleBatch

# The future map's slots, and so the rows of whatever a batch brings by request pool index.
NUM_SLOTS = 256
_POISON = 0xA5
_POISON_LENGTH = int.from_bytes(bytes([_POISON] * 8), "little", signed=True)

Expected = Callable[[torch.Tensor, "Request"], torch.Tensor]


class ContractFailure(AssertionError):
    """A builder breaks the contract: what came, what was expected, and what an engine would have done wrong."""


class NotApplicable(Exception):
    """A case says nothing about this contract; the text tells why."""


@dataclass(frozen=True)
class Request:
    """One request as the kit made it. The builder sees copies of its rows."""

    rid: str
    pool_index: int  # key of the future map, never 0
    seq_len: int  # at least 1000
    bonus_token: int
    rows: Mapping[str, torch.Tensor | None]  # a field name each; None: the request lacks an optional field


def random_row(row_field: Field, generator: torch.Generator) -> torch.Tensor:
    """[width] any bits at all, NaN payloads among them (a bool is 0 or 1)."""
    if row_field.dtype is torch.bool:
        return torch.randint(0, 2, (row_field.width,), generator=generator) == 1
    bits = torch.randint(0, 256, (row_field.row_bytes,), dtype=torch.uint8, generator=generator)
    return bits.view(row_field.dtype)


@dataclass(frozen=True)
class Contract:
    """The builder that is tested, and what it is to hand over.

    algorithm: a CustomSpecAlgo (object or class), a SpeculativeAlgorithm, or a function with the arguments of
        `build_disagg_draft_input`.
    fields: the draft row, or a function of server_args that gives it. `leading=True`: a request's row may be wider.
    settings: one server_args or more, None where the builder reads none; with more, changes between them are tested.
    attributes: the attribute of a request that holds a field's row; default: EAGLE's own names, or the field's name.
    make_row: a request's row of a field, [width], where random bits are not legal rows.
    expected: a field's function (row [width], request) giving the row to hand over, where a `post_gather` changes it.
        Any NaN stands for any other there.
    make_future_map: (fields, num_slots) -> the future map; default: a FutureMap.
    batch_extras, request_extras: attributes that the builder reads beside the usual ones. What is by request pool
        index has NUM_SLOTS rows.
    """

    algorithm: Any
    fields: Sequence[Field] | Callable[[Any], Sequence[Field]]
    settings: Sequence[Any] = (None,)
    attributes: Mapping[str, str] = field(default_factory=dict)
    make_row: Callable[[Field, torch.Generator], torch.Tensor] = random_row
    expected: Mapping[str, Expected] = field(default_factory=dict)
    make_future_map: Callable[[Sequence[Field], int], Any] = FutureMap
    batch_extras: Mapping[str, Any] = field(default_factory=dict)
    request_extras: Mapping[str, Any] = field(default_factory=dict)

    def fields_at(self, settings: Any) -> tuple[Field, ...]:
        return tuple(self.fields(settings) if callable(self.fields) else self.fields)


def ready(contract: Contract) -> Contract:
    """The same with one object in place of the algorithm's class: an engine makes one, and what it keeps stays.

    Raises ValueError or TypeError where the contract itself is wrong.
    """
    if isinstance(contract.settings, (str, Mapping)) or not isinstance(contract.settings, Sequence):
        raise TypeError(f"settings is {shown(contract.settings)}, expected a sequence of server_args")
    if not contract.settings:
        raise ValueError("the contract has no settings: give (None,) where the builder reads none")
    try:
        names = {f.name for settings in contract.settings for f in contract.fields_at(settings)}
    except AttributeError as error:
        raise ValueError(f"the fields cannot be made of the contract's settings: {error}") from error
    for member in ("attributes", "expected"):
        unknown = sorted(getattr(contract, member).keys() - names)
        if unknown:
            raise ValueError(f"the contract's {member} name {unknown}, but the fields are {sorted(names)}")
    algorithm = contract.algorithm
    if isinstance(algorithm, type) and issubclass(algorithm, CustomSpecAlgo):
        return replace(contract, algorithm=algorithm("CONTRACT", lambda server_args: None))
    return contract


class Kit:
    """A contract under one of its settings."""

    def __init__(self, contract: Contract, settings: Any) -> None:
        self.contract, self.settings = contract, settings
        self.fields = contract.fields_at(settings)
        algorithm = contract.algorithm
        self.call = getattr(algorithm, "build_disagg_draft_input", algorithm)
        self.is_stateless = bool(getattr(algorithm, "stateless", False))
        widths = [(f.name, f.width) for other in contract.settings for f in contract.fields_at(other)]
        self._widest = {name: max(w for n, w in widths if n == name) for name, _ in widths}
        self._made: dict[str, Request] = {}

    def with_settings(self, settings: Any) -> Kit:
        """The same requests and expectations; the builder is given `settings`."""
        other = copy.copy(self)
        other.settings = settings
        return other

    # -- what the builder is given

    def requests(self, count: int, first: int = 0) -> list[Request]:
        """The same ones each time; at most 251 in all."""
        return [self._request(first + i) for i in range(count)]

    def batch(
        self,
        requests: Sequence[Request],
        overlap: bool,
        spoil: Callable[[int, Field, torch.Tensor], Any] = lambda position, row_field, row: row,
    ) -> ScheduleBatch:
        """spoil: of a position, a field and a row, what the request really brings."""
        reqs = []
        for position, request in enumerate(requests):
            rows = {}
            for f in self.fields:
                row = request.rows[f.name]
                rows[self.attribute(f)] = None if row is None else spoil(position, f, row.clone())
            extras = self.contract.request_extras
            reqs.append(SimpleNamespace(rid=request.rid, output_ids=[1, 2, request.bonus_token], **{**extras, **rows}))
        indices, lengths = [r.pool_index for r in requests], [r.seq_len for r in requests]
        batch = ScheduleBatch(reqs, "cpu", _integers(indices), _integers(lengths), enable_overlap=overlap)
        vars(batch).update(self.contract.batch_extras)
        return batch

    def attribute(self, row_field: Field) -> str:
        name = row_field.name
        return self.contract.attributes.get(name, REQUEST_ROWS.get(name, name))

    def future_map(self) -> Any:
        """A future map whose every byte is poison."""
        future_map = self.contract.make_future_map(self.fields, NUM_SLOTS)
        for tensor in _tensors_of(future_map).values():
            if tensor.is_contiguous():
                tensor.view(torch.uint8).fill_(_POISON)
        return future_map

    def build_raw(self, batch: ScheduleBatch, future_map: Any) -> Any:
        tokens = _integers([req.output_ids[-1] for req in batch.reqs])
        return self.call(batch, self.settings, tokens, future_map)

    def build(self, batch: ScheduleBatch, future_map: Any) -> Any:
        """The draft input of a batch in which nothing is wrong."""
        try:
            draft_input = self.build_raw(batch, future_map)
        except Exception as error:
            fail(f"the builder raised {type(error).__name__} for a batch in which nothing is wrong: {error}", error)
        if draft_input is None:
            fail("the builder yielded no draft input, and the algorithm does not say stateless = True")
        return draft_input

    # -- what it must have done

    def check_input(self, draft_input: Any, requests: Sequence[Request]) -> None:
        """Row i of every field, and bonus token i, are request i's."""
        for f in self.fields:
            if all(request.rows[f.name] is not None for request in requests):
                self.check_field(f, rows_of(draft_input, f.name), requests)
        tokens = getattr(draft_input, "bonus_tokens", None)
        expected = [request.bonus_token for request in requests]
        if not isinstance(tokens, torch.Tensor) or tokens.tolist() != expected:
            got = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
            fail(f"bonus_tokens are {got}, expected the last tokens {expected}")

    def check_field(self, f: Field, rows: object, requests: Sequence[Request]) -> None:
        expected = (len(requests), f.width)
        if not isinstance(rows, torch.Tensor):
            got, where = type(rows).__name__, self.attribute(f)
            fail(
                f"{f.name} is {got}, expected a tensor {list(expected)} {f.dtype} (requests bring its row as "
                f"{where!r}: `attributes` of the contract names another)"
            )
        if (tuple(rows.shape), rows.dtype, rows.device.type) != (expected, f.dtype, "cpu"):
            got = f"{list(rows.shape)} {rows.dtype} on {rows.device}"
            fail(f"{f.name} is {got}, expected {list(expected)} {f.dtype} on cpu")
        for i, request in enumerate(requests):
            if not self._is_right(f, rows[i], request):
                fail(self._told(f, i, rows[i], request))

    def check_resolved(self, draft_input: Any, future_map: Any, requests: Sequence[Request]) -> None:
        """What the next iteration finds: resolve gives each request its rows, token and length."""
        lengths_found = self.resolve(draft_input, future_map).tolist()
        got = ["never published" if length == _POISON_LENGTH else length for length in lengths_found]
        lengths = [request.seq_len for request in requests]
        if got != lengths:
            fail(f"resolved out of the future map: the sequence lengths are {got}, expected {lengths}")
        with Telling("resolved out of the future map: "):
            self.check_input(draft_input, requests)

    def resolve(self, draft_input: Any, future_map: Any) -> torch.Tensor:
        """The next iteration's first step: it fills the draft input. The sequence lengths."""
        indices = getattr(draft_input, "future_indices", None)
        if not isinstance(indices, torch.Tensor):
            fail("future_indices is not set under overlap: the next iteration resolves nothing")
        batch = ScheduleBatch([], "cpu", indices, _integers([]), spec_info=draft_input)
        future_map.resolve(batch)
        return batch.seq_lens

    def check_relayed(self, future_map: Any, requests: Sequence[Request]) -> EagleDraftInput:
        """The same by the requests' own pool indices. What was resolved."""
        resolved = EagleDraftInput(future_indices=_integers([request.pool_index for request in requests]))
        self.check_resolved(resolved, future_map, requests)
        return resolved

    def check_refused(self, batch: ScheduleBatch, requests: Sequence[Request], what: str) -> None:
        """An error that names one of `requests`, and nothing written."""
        future_map = self.future_map()
        before = snapshot(future_map)
        try:
            draft_input = self.build_raw(batch, future_map)
        except ValueError as error:
            text = str(error)
            if not any(request.rid in text for request in requests):
                named = " or ".join(repr(request.rid) for request in requests[:2])
                fail(f"{what} is refused without the request's name ({named}): {text}", error)
        except Exception as error:
            fail(f"{what}: {type(error).__name__} ({error}), expected a ValueError that names the request", error)
        else:
            shapes = {f.name: getattr(rows_of(draft_input, f.name), "shape", None) for f in self.fields}
            told = {name: None if shape is None else list(shape) for name, shape in shapes.items()}
            fail(f"{what} is accepted: the draft input has rows {told}; expected an error that names the request")
        with Telling(f"{what} is refused, but "):
            check_unwritten(future_map, before)

    def expected(self, f: Field, request: Request) -> torch.Tensor:
        row = request.rows[f.name]
        assert row is not None
        change = self.contract.expected.get(f.name)
        return row[: f.width] if change is None else _checked(change(row[: f.width], request), f, "expected")

    def _is_right(self, f: Field, got: torch.Tensor, request: Request) -> bool:
        """Byte for byte; but arithmetic need not keep a NaN's bits, so of a field with `expected` any NaN will do."""
        expected = self.expected(f, request)
        if f.name in self.contract.expected and f.dtype.is_floating_point:
            is_nan = expected.isnan()
            if torch.equal(got.isnan(), is_nan):
                got, expected = torch.where(is_nan, 0, got), torch.where(is_nan, 0, expected)
        return same_bytes(got, expected)

    # -- inside

    def _request(self, number: int) -> Request:
        rid = f"rid-{number:03d}"
        if rid not in self._made:
            rows: dict[str, torch.Tensor | None] = {}
            for position, f in enumerate(self.fields):
                wide = replace(f, width=self._widest[f.name]) if f.leading else f
                generator = torch.Generator().manual_seed(1000 * number + position)
                rows[f.name] = _checked(self.contract.make_row(wide, generator), wide, "make_row")
            pool_index = (7 * number + 3) % 251 + 1
            self._made[rid] = Request(rid, pool_index, 1000 + 13 * number, 40_000 + 17 * number, rows)
        return self._made[rid]

    def _told(self, f: Field, i: int, got: torch.Tensor, request: Request) -> str:
        for other in self._made.values():
            if other.rid != request.rid and other.rows[f.name] is not None:
                if same_bytes(got, self.expected(f, other)):
                    return (
                        f"row {i} of {f.name} is that of request {other.rid!r}, not of {request.rid!r}: {request.rid} "
                        f"would be drafted from {other.rid}'s {f.name}, and nothing would crash"
                    )
        if not _bytes(got).any():
            return f"row {i} of {f.name} is all zeros: made up, where request {request.rid!r} brought a row"
        wrong = (_bytes(got) != _bytes(self.expected(f, request))).nonzero()[0].item()
        return f"row {i} of {f.name} is not that of request {request.rid!r}: it differs from byte {wrong} on"


def _checked(row: object, f: Field, source: str) -> torch.Tensor:
    """ValueError where the contract's own function gives no row of the field."""
    if isinstance(row, torch.Tensor) and (tuple(row.shape), row.dtype) == ((f.width,), f.dtype):
        return row
    got = f"{list(row.shape)} {row.dtype}" if isinstance(row, torch.Tensor) else shown(row)
    raise ValueError(f"the contract's {source} gave {got} for {f.name}, expected a tensor {[f.width]} {f.dtype}")


class Telling:
    """Puts words before a failure's."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ContractFailure):
            raise ContractFailure(f"{self._words}{error}") from error.__cause__


def fail(what: str, cause: BaseException | None = None) -> NoReturn:
    raise ContractFailure(what) from cause


def rows_of(draft_input: Any, name: str) -> Any:
    return draft_input.rows(name) if isinstance(draft_input, EagleDraftInput) else getattr(draft_input, name, None)


def snapshot(future_map: Any) -> dict[str, torch.Tensor]:
    """The bytes of everything that a future map holds, [num_slots, row_bytes] each."""
    held = _tensors_of(future_map)
    return {name: _bytes(tensor.reshape(len(tensor), -1)).clone() for name, tensor in held.items()}


def check_unwritten(future_map: Any, before: Mapping[str, torch.Tensor], but: Iterable[int] = ()) -> None:
    """Every byte is what it was, but the rows of the slots `but`."""
    for name, now in snapshot(future_map).items():
        changed = (now != before[name]).any(dim=1).nonzero()[:, 0].tolist()
        slots = sorted(set(changed) - set(but))
        if slots:
            what = "whole" if len(slots) == len(now) else f"slots {slots[:8]}"
            fail(f"the future map was written where it may not be: {name}, {what}")


def _tensors_of(future_map: Any) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for name, value in getattr(future_map, "__dict__", {}).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        held.update({f"{name} {key}".strip(): t for key, t in parts if isinstance(t, torch.Tensor) and t.ndim})
    return held


def _integers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """As raw bytes: a NaN is itself, and -0.0 is not 0.0."""
    is_alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    return is_alike and torch.equal(_bytes(first), _bytes(second))
