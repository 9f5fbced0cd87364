"""The contract's cases: each calls a builder as an engine does, and says what that engine would have done wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftgather.draft_input import EagleDraftInput
from draftgather.fields import Field
from draftgather.testing_kit import (
    ContractFailure,
    Kit,
    NotApplicable,
    Request,
    Telling,
    check_unwritten,
    fail,
    rows_of,
    same_bytes,
    snapshot,
)
from draftgather.testing_reads import DeviceReads


@dataclass(frozen=True)
class Case:
    """One case of the contract. harm: what an engine does wrong where it fails."""

    name: str
    harm: str
    run: Callable[[Kit], None]
    needs_rows: bool  # it says nothing about an algorithm that is stateless


_cases: list[Case] = []
_Run = Callable[[Kit], None]


def _case(name: str, harm: str, needs_rows: bool = True) -> Callable[[_Run], _Run]:
    def add(run: _Run) -> _Run:
        _cases.append(Case(name, harm, run, needs_rows))
        return run

    return add


# -- whose rows


@_case("stateless", "the first decode step finds no draft input and dies, or a draft input that nobody expects", False)
def _stateless(kit: Kit) -> None:
    """None, if and only if the algorithm says that it is stateless."""
    for overlap in (False, True):
        for requests in ([], kit.requests(2)):
            future_map = kit.future_map()
            before = snapshot(future_map)
            if not kit.is_stateless:
                kit.build(kit.batch(requests, overlap), future_map)
            elif kit.build_raw(kit.batch(requests, overlap), future_map) is not None:
                fail("the algorithm says stateless = True, but yielded a draft input")
            else:
                check_unwritten(future_map, before)


@_case("row order", "a request is drafted from another's row: acceptance drops, and nothing crashes")
def _row_order(kit: Kit) -> None:
    """Row i is request i's, in batches of 1, 3 and 70, forwards and backwards."""
    everyone = kit.requests(70)
    for f in kit.fields:
        if all(same_bytes(kit.expected(f, request), kit.expected(f, everyone[0])) for request in everyone):
            raise ValueError(f"the contract gives all requests one row of {f.name}: swapped rows would not be seen")
    for requests in (everyone[:1], everyone[:3], everyone[2::-1], everyone, everyone[::-1]):
        for overlap in (False, True):
            _built(kit, requests, overlap)


@_case("bonus tokens", "the draft continues from a token that the target never sampled")
def _bonus_tokens(kit: Kit) -> None:
    """The bonus tokens are the last tokens, int64, one a request, in an empty batch too."""
    for overlap in (False, True):
        for requests in (kit.requests(3), []):
            draft_input = kit.build(kit.batch(requests, overlap), kit.future_map())
            _check_tokens(draft_input, requests)


@_case("resumed request", "a request that comes back after a retraction is drafted from other rows than before")
def _resumed(kit: Kit) -> None:
    """The same request again, with other batches in between, and at another pool index: the same rows."""
    first, others = kit.requests(3), kit.requests(3, first=3)
    elsewhere = replace(first[1], pool_index=255)
    for overlap in (False, True):
        future_map = kit.future_map()
        for requests in (first, others[:2], [others[2], first[1]], [elsewhere, others[0]]):
            _built(kit, requests, overlap, future_map)


@_case("two batches in flight", "the scheduler builds the next batch while this one waits: this one's rows change")
def _two_in_flight(kit: Kit) -> None:
    """Batch B is built before A is used: A's tensors stay, and both are resolved right."""
    first, second = kit.requests(3), kit.requests(3, first=3)
    for overlap in (False, True):
        future_map = kit.future_map()
        earlier = kit.build(kit.batch(first, overlap), future_map)
        later = kit.build(kit.batch(second, overlap), future_map)
        with Telling("the first batch, after the second was built: "):
            kit.check_input(earlier, first)
        kit.check_input(later, second)
        if overlap:
            kit.check_resolved(earlier, future_map, first)
            kit.check_resolved(later, future_map, second)


@_case("rows are copies", "the transfer engine writes the next request's row into that memory, under this draft input")
def _copies(kit: Kit) -> None:
    """What requests brought may be overwritten after the call."""
    requests = kit.requests(3)
    for overlap in (False, True):
        batch, future_map = kit.batch(requests, overlap), kit.future_map()
        draft_input = kit.build(batch, future_map)
        for req in batch.reqs:
            for f in kit.fields:
                getattr(req, kit.attribute(f)).view(torch.uint8).zero_()
        with Telling("after the requests' own rows were overwritten: "):
            kit.check_input(draft_input, requests)
            if overlap:
                kit.check_relayed(future_map, requests)


@_case("odd rows", "rows are read from the wrong addresses, as another engine's buffers lie otherwise")
def _odd_rows(kit: Kit) -> None:
    """Rows with a stride, and rows at addresses that are no multiple of 16."""
    requests = kit.requests(3)

    def strided(position: int, f: Field, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([row, torch.zeros_like(row)], dim=1)[:, 0]

    def shifted(position: int, f: Field, row: torch.Tensor) -> torch.Tensor:
        return torch.cat([row[:1], row])[1:]

    for spoil in (strided, shifted):
        for overlap in (False, True):
            future_map = kit.future_map()
            draft_input = kit.build(kit.batch(requests, overlap, spoil), future_map)
            with Telling(f"rows that are {spoil.__name__}: "):
                kit.check_input(draft_input, requests)
                if overlap:
                    kit.check_relayed(future_map, requests)


# -- batches without rows, and rows that are not there


@_case("empty batch", "an idle data-parallel rank crashes, or its untyped stub breaks the next merge")
def _empty(kit: Kit) -> None:
    """Typed zero-row tensors, and nothing relayed."""
    for overlap in (False, True):
        future_map = kit.future_map()
        before = snapshot(future_map)
        draft_input = kit.build(kit.batch([], overlap), future_map)
        for f in kit.fields:
            rows = rows_of(draft_input, f.name)
            if not (f.optional and rows is None):
                kit.check_field(f, rows, [])
        _check_tokens(draft_input, [])
        check_unwritten(future_map, before)


@_case("idle rank", "a rank that was idle cannot take requests, or loses those that it has")
def _idle(kit: Kit) -> None:
    """A zero-row draft input merges into a busy one, and a busy one into it."""
    requests = kit.requests(3)
    for overlap in (False, True):
        for is_own in (True, False):
            for is_busy_first in (True, False):
                future_map = kit.future_map()
                busy = kit.build(kit.batch(requests, overlap), future_map)
                if not is_own and not isinstance(busy, EagleDraftInput):
                    continue
                idle = kit.build(kit.batch([], overlap), future_map) if is_own else _idle_input(kit)
                merged, other = (busy, idle) if is_busy_first else (idle, busy)
                merged.merge_batch(other)
                with Telling("an idle rank's draft input, merged with a busy one: "):
                    _check_either(kit, merged, requests, future_map, overlap)


@_case("missing row", "a request without a draft row is drafted from made-up ones: acceptance drops, nothing crashes")
def _missing(kit: Kit) -> None:
    """A required row that is None, or whose attribute is not there: refused, with the request's name."""
    requests = kit.requests(3)
    required = [f for f in kit.fields if not f.optional]
    if not required:
        raise NotApplicable("no field is required")
    for overlap in (False, True):
        for f in required:
            for position in (0, 2):
                batch = kit.batch(requests, overlap)
                setattr(batch.reqs[position], kit.attribute(f), None)
                kit.check_refused(batch, [requests[position]], f"a request whose {f.name} is None")
                delattr(batch.reqs[position], kit.attribute(f))
                kit.check_refused(batch, [requests[position]], f"a request without the attribute {kit.attribute(f)}")


@_case("optional row", "a row that no request brought is used, or that of the pool index's former owner")
def _optional(kit: Kit) -> None:
    """Where some or all lack an optional field: it is None, `present` says so, and their relay rows are invalid."""
    optional = [f for f in kit.fields if f.optional]
    if not optional:
        raise NotApplicable("no field is optional")
    requests = kit.requests(3)
    for f in optional:
        for lacking in ((), (1,), (0, 1, 2)):
            mixed = [_without(request, f) if i in lacking else request for i, request in enumerate(requests)]
            for overlap in (False, True):
                future_map = kit.future_map()
                kit.build(kit.batch(requests, overlap), future_map)  # the former owners, who had all
                draft_input = kit.build(kit.batch(mixed, overlap), future_map)
                with Telling(f"{len(lacking)} of 3 requests lack {f.name}: "):
                    kit.check_input(draft_input, mixed)
                    _check_presence(draft_input, f, not lacking)
                    if overlap:
                        _check_validity(kit, future_map, f, mixed)


@_case("wrong width", "rows of another model or setting are cut, padded or broadcast: wrong drafts, and no error")
def _wrong_width(kit: Kit) -> None:
    """Narrower, wider, of one element, and 2-d; in one request, and in all."""
    if not kit.fields:
        raise NotApplicable("no draft rows are handed over")
    requests = kit.requests(3)
    for f in kit.fields:
        spoils: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"2-d": lambda row: row[None]}
        spoils |= {f"{f.width - 1} wide": lambda row, w=f.width: row[: w - 1]} if f.width > 1 else {}  # type: ignore[misc]
        spoils |= {"1 wide": lambda row: row[:1]} if f.width > 2 else {}
        spoils |= {} if f.leading else {f"{f.width + 1} wide": lambda row: torch.cat([row, row[:1]])}
        for how, spoil in spoils.items():
            _check_spoiled(kit, requests, f, spoil, f"{f.name} {how}, not {f.width} wide,")


@_case("wrong dtype", "rows are rounded, or their bits taken for other numbers: wrong drafts, and no error")
def _wrong_dtype(kit: Kit) -> None:
    """A dtype from which converting is not exact; in one request, and in all."""
    strict = [f for f in kit.fields if not f.allow_cast]
    if not strict:
        raise NotApplicable("no field refuses a dtype")
    for f in strict:
        other = torch.int64 if f.dtype is torch.float64 else torch.float64
        _check_spoiled(kit, kit.requests(3), f, lambda row, dtype=other: row.to(dtype), f"{f.name} as {other}")  # type: ignore[misc]


@_case("nothing written on error", "the batch is dropped, but the next iteration finds its lengths without its rows")
def _unwritten(kit: Kit) -> None:
    """A batch whose last request has a bad row leaves the future map, the batch and its requests as they were."""
    if not kit.fields:
        raise NotApplicable("no draft rows are handed over")
    requests = kit.requests(3)
    for f in kit.fields:
        for overlap in (False, True):
            batch = kit.batch(requests, overlap, lambda i, g, row, f=f: row[None] if (i, g) == (2, f) else row)  # type: ignore[misc]
            before = [dict(vars(thing)) for thing in (batch, *batch.reqs)]
            bits = [_frozen(values) for values in before]
            kit.check_refused(batch, requests[2:], f"a last request whose {f.name} is 2-d")
            for thing, values, kept in zip((batch, *batch.reqs), before, bits, strict=True):
                changed = [n for n, value in vars(thing).items() if n not in values or values[n] is not value]
                now = _frozen(values)
                changed += [name for name, value in kept.items() if not same_bytes(value, now[name])]
                if changed or len(vars(thing)) != len(values):
                    fail(f"after the error {getattr(thing, 'rid', 'the batch')} is changed: {sorted(set(changed))}")


# -- the relay between iterations


@_case("relay under overlap", "the next iteration resolves rows, tokens or lengths that nobody wrote, or another's")
def _relay(kit: Kit) -> None:
    """future_indices are the batch's pool indices; its rows, tokens and lengths are written there, and nowhere else."""
    requests = kit.requests(5)
    future_map = kit.future_map()
    before = snapshot(future_map)
    draft_input = kit.build(kit.batch(requests, True), future_map)
    expected = [request.pool_index for request in requests]
    indices = getattr(draft_input, "future_indices", None)
    if not isinstance(indices, torch.Tensor) or indices.tolist() != expected:
        got = indices.tolist() if isinstance(indices, torch.Tensor) else indices
        fail(f"future_indices are {got}, expected the request pool indices {expected}")
    kit.check_relayed(future_map, requests)
    kit.check_resolved(draft_input, future_map, requests)
    check_unwritten(future_map, before, but=expected)


@_case("no relay outside overlap", "a running batch's rows in the future map are overwritten by one that needs none")
def _no_relay(kit: Kit) -> None:
    """With overlap off the future map is not touched, and there are no future indices."""
    requests = kit.requests(3)
    future_map = kit.future_map()
    before = snapshot(future_map)
    draft_input = kit.build(kit.batch(requests, False), future_map)
    check_unwritten(future_map, before)
    if getattr(draft_input, "future_indices", None) is not None:
        fail("future_indices is set with overlap off, where the next iteration must not resolve")
    kit.check_input(draft_input, requests)


@_case("filter and merge", "after a request ends or joins, the others go on with each other's rows")
def _filter_merge(kit: Kit) -> None:
    """Rows stay with their requests when batches are filtered and merged, in both modes, then resolved."""
    requests = kit.requests(5)
    for overlap in (False, True):
        future_map = kit.future_map()
        running = kit.build(kit.batch(requests[:3], overlap), future_map)
        arriving = kit.build(kit.batch(requests[3:], overlap), future_map)
        running.filter_batch(torch.tensor([2, 0]))
        running.merge_batch(arriving)  # requests 2, 0, 3, 4
        running.filter_batch(torch.tensor([3, 0, 1]))
        _check_either(kit, running, [requests[4], requests[2], requests[0]], future_map, overlap)


@_case("padding", "a CUDA graph's padded rows make real ones wrong, or a builder's writes hit other requests' rows")
def _padding(kit: Kit) -> None:
    """Future indices padded with 0 resolve right, and slot 0 was not written."""
    requests = kit.requests(3)
    future_map = kit.future_map()
    before = snapshot(future_map)
    draft_input = kit.build(kit.batch(requests, True), future_map)
    check_unwritten(future_map, before, but=[request.pool_index for request in requests])
    indices = getattr(draft_input, "future_indices", None)
    if not isinstance(indices, torch.Tensor):
        fail("future_indices is not set under overlap: there is nothing to pad")
    draft_input.future_indices = torch.cat([indices, torch.zeros(5, dtype=indices.dtype)])
    kit.resolve(draft_input, future_map)
    for f in kit.fields:
        rows = rows_of(draft_input, f.name)
        kit.check_field(f, rows if rows is None else rows[:3], requests)


# -- settings, and time


@_case("changed settings", "adaptive speculation changes its step count, and rows keep the former width")
def _changed(kit: Kit) -> None:
    """Batches under each of the settings, then under the first again: rows as wide as each says."""
    kits = _other_kits(kit)
    for other in (kit, *kits, kit):
        for overlap in (False, True):
            _built(other, other.requests(3), overlap)


@_case("settings are read at each call", "an engine changes its settings in place, and the builder has kept the old")
def _live(kit: Kit) -> None:
    """One settings object whose attributes change between calls."""
    kits = _other_kits(kit)
    if not all(hasattr(other.settings, "__dict__") for other in (kit, *kits)):
        raise NotApplicable("the settings have no attributes to change")
    live = copy.copy(kit.settings)
    for other in (kit, *kits, kit):
        vars(live).clear()
        vars(live).update(vars(other.settings))
        for overlap in (False, True):
            _built(other.with_settings(live), other.requests(3), overlap)


@_case("no device read", "the scheduler waits for the running forward pass at every such read, and stalls")
def _no_device_read(kit: Kit) -> None:
    """No value of a tensor is read by the host in the author's code: not .item(), .tolist(), a mask as an index."""
    requests = kit.requests(3)
    batches = [requests, []]
    batches += [[_without(requests[0], f), *requests[1:]] for f in kit.fields if f.optional]
    for some in batches:
        for overlap in (False, True):
            batch, future_map = kit.batch(some, overlap), kit.future_map()
            with DeviceReads() as reads:
                kit.build(batch, future_map)
            if reads.found:
                fail(f"the builder reads a tensor on the host: {'; '.join(dict.fromkeys(reads.found))}")


CASES: tuple[Case, ...] = tuple(_cases)


def run_case(case: Case, kits: Sequence[Kit]) -> str | None:
    """None, or why the case says nothing here. Raises ContractFailure."""
    for kit in kits:
        if kit.is_stateless and case.needs_rows:
            return "the algorithm is stateless: it hands over no rows"
        try:
            case.run(kit)
        except NotApplicable as reason:
            return str(reason)
        except ContractFailure as error:
            under = f" (settings {kit.settings})" if len(kits) > 1 else ""
            text = f"case {case.name!r}{under}: {error}\nWhat an engine would do wrong: {case.harm}."
            raise ContractFailure(text) from error.__cause__
    return None


# -- inside


def _built(kit: Kit, requests: Sequence[Request], overlap: bool, future_map: Any = None) -> None:
    """Built, and right; under overlap relayed right too."""
    future_map = kit.future_map() if future_map is None else future_map
    kit.check_input(kit.build(kit.batch(requests, overlap), future_map), requests)
    if overlap:
        kit.check_relayed(future_map, requests)


def _check_either(kit: Kit, draft_input: Any, requests: Sequence[Request], future_map: Any, overlap: bool) -> None:
    if overlap:
        kit.check_resolved(draft_input, future_map, requests)
    else:
        kit.check_input(draft_input, requests)


def _check_tokens(draft_input: Any, requests: Sequence[Request]) -> None:
    tokens = getattr(draft_input, "bonus_tokens", None)
    expected = [request.bonus_token for request in requests]
    if not isinstance(tokens, torch.Tensor):
        fail(f"bonus_tokens is {type(tokens).__name__}, expected the last tokens {expected}")
    if tokens.tolist() != expected or tokens.dtype is not torch.int64:
        fail(f"bonus_tokens are {tokens.tolist()} {tokens.dtype}, expected the last tokens {expected} torch.int64")


def _check_spoiled(
    kit: Kit, requests: Sequence[Request], f: Field, spoil: Callable[[torch.Tensor], torch.Tensor], what: str
) -> None:
    for positions in ((0,), (2,), (0, 1, 2)):
        for overlap in (False, True):

            def spoiled(i: int, g: Field, row: torch.Tensor, positions: tuple[int, ...] = positions) -> torch.Tensor:
                return spoil(row) if g is f and i in positions else row

            batch = kit.batch(requests, overlap, spoiled)
            kit.check_refused(batch, [requests[i] for i in positions], what)


def _without(request: Request, f: Field) -> Request:
    return replace(request, rows={**request.rows, f.name: None})


def _check_presence(draft_input: Any, f: Field, is_present: bool) -> None:
    presence = getattr(draft_input, "present", {}).get(f.name)
    if presence is not is_present:
        fail(f"present[{f.name!r}] is {presence!r}, expected {is_present}")
    if not is_present and rows_of(draft_input, f.name) is not None:
        fail(f"{f.name} is not None in the draft input: rows were made up for the requests that brought none")


def _check_validity(kit: Kit, future_map: Any, f: Field, requests: Sequence[Request]) -> None:
    """Relay rows of requests without the field are invalid; the others' are invalid too, or theirs."""
    resolved = kit.check_relayed(future_map, requests)
    valid, rows = resolved.valid.get(f.name), rows_of(resolved, f.name)
    if valid is None or rows is None:
        return  # this map does not relay the field
    has_all = all(request.rows[f.name] is not None for request in requests)
    for i, (request, is_valid) in enumerate(zip(requests, valid.tolist(), strict=True)):
        if is_valid and request.rows[f.name] is None:
            fail(f"the relay row {i} of {f.name} is valid, but request {request.rid!r} brought none")
        if has_all and not is_valid:
            fail(f"the relay row {i} of {f.name} is invalid, but request {request.rid!r} brought one")
        if is_valid:
            kit.check_field(f, rows[i : i + 1], [request])


def _idle_input(kit: Kit) -> EagleDraftInput:
    """As EagleDraftInput.create_idle_input makes one, of any fields."""
    idle = EagleDraftInput(bonus_tokens=torch.empty(0, dtype=torch.int64))
    for f in kit.fields:
        idle.set_rows(f.name, torch.empty((0, f.width), dtype=f.dtype))
    return idle


def _other_kits(kit: Kit) -> list[Kit]:
    others = [settings for settings in kit.contract.settings if settings is not kit.settings]
    if not others:
        raise NotApplicable("the contract has one settings only")
    return [Kit(kit.contract, settings) for settings in others]


def _frozen(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
