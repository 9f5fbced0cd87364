"""The contract kit passes what is right, and fails each of many wrong builders: in the right case, in words."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import draftgather as dg
from draftgather import testing
from draftgather.testing_reads import DeviceReads
from helpers import make_settings

FIELDS = (
    dg.Field("hidden_states", 6, torch.bfloat16),
    dg.Field("counts", 3, torch.int32),
    dg.Field("seed", 5, torch.int32, optional=True),
)
ADAPTIVE = tuple(make_settings(topk=1, steps=steps, multi_layer=True) for steps in (2, 5))


def eagle_fields(server_args: Any) -> tuple[dg.Field, ...]:
    """EAGLE's, whose requests bring top-k rows that are wider than what is asked for."""
    steps = server_args.speculative_num_steps if server_args.enable_multi_layer_eagle else 1
    fields = dg.eagle_fields(server_args.speculative_eagle_topk, 24, num_steps=steps)
    return tuple(replace(f, leading=f.name != "hidden_states") for f in fields)


def step_fields(server_args: Any) -> tuple[dg.Field, ...]:
    """Fields of which one is as wide as the step count."""
    return (FIELDS[0], dg.Field("counts", server_args.speculative_num_steps, torch.int32, leading=True), FIELDS[2])


# -- what is right passes

Algorithm = dg.SpeculativeAlgorithm
ONE_SETTING = {"changed settings", "settings are read at each call"}
NO_ROWS = {"missing row", "optional row", "wrong width", "wrong dtype", "nothing written on error"}
SETTINGS = (
    make_settings(1),
    make_settings(4),
    make_settings(4, 3),
    make_settings(4, 3, True),
    make_settings(2, 5, True),
)
# contract, the cases that say nothing about it
RIGHT = {
    "EAGLE": (testing.Contract(Algorithm.EAGLE, eagle_fields, SETTINGS), {"optional row"}),
    "EAGLE3": (testing.Contract(Algorithm.EAGLE3, eagle_fields, SETTINGS), {"optional row"}),
    "one top-k": (testing.Contract(Algorithm.EAGLE, eagle_fields, SETTINGS[:1]), {"optional row", *ONE_SETTING}),
    "DFLASH": (testing.Contract(Algorithm.DFLASH, ()), NO_ROWS | ONE_SETTING),
    "any fields": (
        testing.Contract(lambda batch, s, tokens, m: dg.build_disagg_draft_input(batch, tokens, m, FIELDS), FIELDS),
        ONE_SETTING,
    ),
    "bits": (
        testing.Contract(
            lambda batch, s, tokens, m: dg.build_disagg_draft_input(batch, tokens, m, BITS), lambda s: BITS
        ),
        ONE_SETTING,
    ),
}
BITS = (
    dg.Field("mask", 1, torch.bool),
    dg.Field("one", 1, torch.float64),
    dg.Field("warm", 2, torch.uint8, optional=True),
    dg.Field("small", 1, torch.float16, optional=True),
)
STATELESS = [Algorithm.NONE, Algorithm.STANDALONE, Algorithm.NGRAM]


@pytest.mark.parametrize("name", RIGHT)
def test_right_builders_pass(name) -> None:
    """Guards the kit from failing what is right, and from skipping more than it says."""
    contract, skipped = RIGHT[name]
    assert testing.check(contract).keys() == skipped


@pytest.mark.parametrize("algorithm", STATELESS)
def test_stateless_algorithms_pass(algorithm) -> None:
    skipped = testing.check(testing.Contract(algorithm, FIELDS))
    assert skipped.keys() == {case.name for case in testing.CASES} - {"stateless"}


# -- a builder in plain torch, in steps of which each can be broken


@dataclass
class Plain:
    """One that uses nothing of the package's gathering: checks, torch.stack, publish, stash."""

    fields: Callable[[Any], tuple[dg.Field, ...]] = lambda server_args: FIELDS
    attribute = staticmethod(lambda f: {"hidden_states": "hidden_states_tensor"}.get(f.name, f.name))

    def __call__(self, batch: Any, server_args: Any, tokens: torch.Tensor, future_map: Any) -> Any:
        fields = self.fields_now(server_args)
        rows = {f.name: [self.row(req, f, batch) for req in batch.reqs] for f in fields}
        draft_input = dg.EagleDraftInput(bonus_tokens=self.bonus_tokens(batch, tokens))
        for f in fields:
            given = rows[f.name]
            draft_input.set_rows(f.name, None if None in given else self.stack(batch, f, given))
            if f.optional:
                draft_input.present[f.name] = self.is_present(f, given)
        self.relay(batch, draft_input, future_map)
        return draft_input

    def fields_now(self, server_args: Any) -> tuple[dg.Field, ...]:
        return self.fields(server_args)

    def bonus_tokens(self, batch: Any, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def row(self, req: Any, f: dg.Field, batch: Any) -> torch.Tensor | None:
        row = getattr(req, self.attribute(f), None)
        if row is None and f.optional:
            return None
        if row is None or row.ndim != 1 or row.dtype is not f.dtype:
            raise ValueError(f"request {req.rid}: {f.name} is {row}")
        if len(row) < f.width or (len(row) > f.width and not f.leading):
            raise ValueError(f"request {req.rid}: {f.name} is {len(row)} wide")
        return row[: f.width]

    def stack(self, batch: Any, f: dg.Field, given: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(given) if given else torch.empty((0, f.width), dtype=f.dtype)

    def is_present(self, f: dg.Field, given: list[Any]) -> bool:
        return None not in given

    def relay(self, batch: Any, draft_input: Any, future_map: Any) -> None:
        if batch.enable_overlap:
            draft_input.future_indices = batch.req_pool_indices
            future_map.publish(batch.req_pool_indices, batch.seq_lens)
            future_map.stash(batch.req_pool_indices, draft_input)


def contract_of(builder: Any) -> testing.Contract:
    return testing.Contract(builder, step_fields, ADAPTIVE)


def test_plain_builder_passes() -> None:
    """Guards the kit from asking for the package's own gathering; and the broken ones below break one step only."""
    assert testing.check(contract_of(Plain(step_fields))) == {}


# -- what is wrong fails: the case that must find it, and words of its failure

BROKEN: dict[str, tuple[type[Plain], str, str]] = {}


def broken(case: str, words: str) -> Callable[[type[Plain]], type[Plain]]:
    def add(builder: type[Plain]) -> type[Plain]:
        BROKEN[builder.__name__] = (builder, case, words)
        return builder

    return add


@broken(
    "row order",
    r"row 0 of hidden_states is that of request 'rid-001', not of 'rid-000': rid-000 would be drafted from rid-001's",
)
class RowsSwapped(Plain):
    def stack(self, batch, f, given):
        return super().stack(batch, f, [*given[1:2], *given[:1], *given[2:]])


@broken("row order", "row 64 of hidden_states is that of request 'rid-000'")
class RowsBeyond64Repeat(Plain):
    def stack(self, batch, f, given):
        return super().stack(batch, f, given[:64] + given[: max(len(given) - 64, 0)])


@broken("missing row", r"whose hidden_states is None is accepted")
class ZerosForAMissingRow(Plain):
    def row(self, req, f, batch):
        if getattr(req, self.attribute(f), None) is None and not f.optional:
            return torch.zeros(f.width, dtype=f.dtype)
        return super().row(req, f, batch)


@broken(
    "missing row",
    r"without the attribute hidden_states_tensor: AttributeError \(.*\), expected a ValueError that names the request",
)
class MissingAttributeIsAnAttributeError(Plain):
    def row(self, req, f, batch):
        getattr(req, self.attribute(f))
        return super().row(req, f, batch)


@broken("missing row", r"refused without the request's name \('rid-000'\)")
class ErrorWithoutAName(Plain):
    def row(self, req, f, batch):
        if getattr(req, self.attribute(f), None) is None and not f.optional:
            raise ValueError(f"a {f.name} is missing")
        return super().row(req, f, batch)


@broken("optional row", r"present\['seed'\] is True, expected False|seed is not None")
class OptionalRowInvented(Plain):
    def row(self, req, f, batch):
        row = super().row(req, f, batch)
        return torch.zeros(f.width, dtype=f.dtype) if row is None else row


@broken("optional row", r"present\['seed'\] is True, expected False")
class PresentSaysTrue(Plain):
    def is_present(self, f, given):
        return True


@broken("optional row", "is valid, but request 'rid-001' brought none")
class AbsentRowsStayValid(Plain):
    def relay(self, batch, draft_input, future_map):
        super().relay(batch, draft_input, future_map)
        if batch.enable_overlap:
            future_map.valid["seed"][batch.req_pool_indices] = True


@broken("nothing written on error", "is refused, but the future map was written where it may not be: new_seq_lens_buf")
class PublishedBeforeTheCheck(Plain):
    def __call__(self, batch, server_args, tokens, future_map):
        if batch.enable_overlap:
            future_map.publish(batch.req_pool_indices, batch.seq_lens)
        return super().__call__(batch, server_args, tokens, future_map)


@broken("nothing written on error", r"after the error the batch is changed: \['seq_lens'\]")
class LengthsChangedBeforeTheCheck(Plain):
    def __call__(self, batch, server_args, tokens, future_map):
        batch.seq_lens.add_(1)
        draft_input = super().__call__(batch, server_args, tokens, future_map)
        batch.seq_lens.sub_(1)
        return draft_input


@broken("relay under overlap", "resolved out of the future map: row 0 of hidden_states is that of")
class StashedToTheWrongIndex(Plain):
    def relay(self, batch, draft_input, future_map):
        super().relay(batch, draft_input, future_map)
        if batch.enable_overlap:
            future_map.stash(batch.req_pool_indices.flip(0), draft_input)


@broken(
    "relay under overlap", "resolved out of the future map: row 0 of hidden_states is not that of request 'rid-000'"
)
class NotStashed(Plain):
    def relay(self, batch, draft_input, future_map):
        if batch.enable_overlap:
            draft_input.future_indices = batch.req_pool_indices
            future_map.publish(batch.req_pool_indices, batch.seq_lens)


@broken("relay under overlap", r"the sequence lengths are \['never published', .*expected \[1000, 1013")
class NotPublished(Plain):
    def relay(self, batch, draft_input, future_map):
        if batch.enable_overlap:
            draft_input.future_indices = batch.req_pool_indices
            future_map.stash(batch.req_pool_indices, draft_input)


@broken("no relay outside overlap", "the future map was written where it may not be")
class RelaysOutsideOverlap(Plain):
    def relay(self, batch, draft_input, future_map):
        super().relay(SimpleNamespace(**{**vars(batch), "enable_overlap": True}), draft_input, future_map)
        if not batch.enable_overlap:
            draft_input.future_indices = None


@broken("no relay outside overlap", "future_indices is set with overlap off")
class IndicesOutsideOverlap(Plain):
    def relay(self, batch, draft_input, future_map):
        super().relay(batch, draft_input, future_map)
        draft_input.future_indices = batch.req_pool_indices


@broken("relay under overlap", r"future_indices are None, expected the request pool indices \[4, 11, 18, 25, 32\]")
class FutureIndicesMissing(Plain):
    def relay(self, batch, draft_input, future_map):
        super().relay(batch, draft_input, future_map)
        draft_input.future_indices = None


@broken("wrong width", "hidden_states 1 wide, not 6 wide, is accepted")
class NarrowRowBroadcast(Plain):
    def row(self, req, f, batch):
        row = getattr(req, self.attribute(f), None)
        if row is not None and row.shape == (1,):
            setattr(req, self.attribute(f), row.expand(f.width))
        return super().row(req, f, batch)


@broken("wrong width", "hidden_states 5 wide, not 6 wide, is accepted")
class NarrowRowPadded(Plain):
    def row(self, req, f, batch):
        row = getattr(req, self.attribute(f), None)
        if row is not None and row.ndim == 1 and 1 < len(row) < f.width:
            setattr(req, self.attribute(f), torch.cat([row, row.new_zeros(f.width - len(row))]))
        return super().row(req, f, batch)


@broken("wrong width", "hidden_states 7 wide, not 6 wide, is accepted")
class WideRowCut(Plain):
    def row(self, req, f, batch):
        return super().row(req, replace(f, leading=True), batch)


@broken("wrong width", "hidden_states 2-d, not 6 wide, is accepted")
class TwoDimensionalRowFlattened(Plain):
    def row(self, req, f, batch):
        row = getattr(req, self.attribute(f), None)
        if row is not None:
            setattr(req, self.attribute(f), row.reshape(-1))
        return super().row(req, f, batch)


@broken("wrong width", "hidden_states 2-d, not 6 wide,: RuntimeError .*, expected a ValueError that names the request")
class OnlyTheFirstRowIsChecked(Plain):
    def row(self, req, f, batch):
        return super().row(req, f, batch) if req is batch.reqs[0] else getattr(req, self.attribute(f), None)


@broken("wrong dtype", r"refused without the request's name \('rid-000'\): request rid-001")
class DtypeOfTheFirstRow(Plain):
    def row(self, req, f, batch):
        first = getattr(batch.reqs[0], self.attribute(f), None)
        return super().row(req, f if first is None else replace(f, dtype=first.dtype), batch)


@broken("wrong dtype", "hidden_states as torch.float64 is accepted")
class AnyDtypeConverted(Plain):
    def row(self, req, f, batch):
        row = getattr(req, self.attribute(f), None)
        if row is not None:
            setattr(req, self.attribute(f), row.to(f.dtype))
        return super().row(req, f, batch)


@broken("rows are copies", "after the requests' own rows were overwritten: row 0 of hidden_states is all zeros")
class ViewsOfTheRequestsRows(Plain):
    def stack(self, batch, f, given):
        return given[0][None] if len(given) == 1 else self._views(batch, f, given)

    def _views(self, batch, f, given):
        """The first row's memory, with all rows written behind it: what a kept arena does."""
        if not given:
            return super().stack(batch, f, given)
        arena = super().stack(batch, f, given)
        for req, row in zip(batch.reqs, arena, strict=True):
            setattr(req, self.attribute(f), row)
        return arena


@broken(
    "two batches in flight",
    "the first batch, after the second was built: row 0 of hidden_states is that of request 'rid-003'",
)
class OneKeptTensor(Plain):
    def stack(self, batch, f, given):
        kept = self.__dict__.setdefault("kept", {}).setdefault(f.name, torch.empty((512, 8), dtype=f.dtype))
        out = kept[: len(given), : f.width]
        out.copy_(super().stack(batch, f, given))
        return out


@broken("changed settings", r"counts is \[3, 2\] torch.int32 on cpu, expected \[3, 5\]")
class FirstSettingsKept(Plain):
    def fields_now(self, server_args):
        return self.__dict__.setdefault("kept", super().fields_now(server_args))


@broken("settings are read at each call", r"counts is \[3, 2\] torch.int32 on cpu, expected \[3, 5\]")
class FieldsKeptASettingsObject(Plain):
    def fields_now(self, server_args):
        kept = self.__dict__.setdefault("kept", {})
        if id(server_args) not in kept:
            kept[id(server_args)] = (server_args, super().fields_now(server_args))
        return kept[id(server_args)][1]


@broken("no device read", r"Tensor.item in row \(.*test_testing.py:\d+\)")
class ReadsARow(Plain):
    def row(self, req, f, batch):
        row = super().row(req, f, batch)
        if row is not None:
            row[0].item()
        return row


@broken("no device read", "aten.nonzero in stack")
class CountsRows(Plain):
    def stack(self, batch, f, given):
        batch.seq_lens.nonzero()
        return super().stack(batch, f, given)


@broken("no device read", "aten.index in stack")
class IndexesByAMask(Plain):
    def stack(self, batch, f, given):
        batch.seq_lens[batch.seq_lens > 0]
        return super().stack(batch, f, given)


@broken("no device read", r"Tensor.__bool__ in relay")
class AsksATensor(Plain):
    def relay(self, batch, draft_input, future_map):
        if (batch.seq_lens >= 0).all():
            super().relay(batch, draft_input, future_map)


@broken("empty batch", r"hidden_states is NoneType, expected a tensor \[0, 6\] torch.bfloat16")
class NothingForAnEmptyBatch(Plain):
    def stack(self, batch, f, given):
        return super().stack(batch, f, given) if given else None


@broken("empty batch", r"hidden_states is \[0\] torch.float32 on cpu, expected \[0, 6\] torch.bfloat16")
class UntypedEmptyBatch(Plain):
    def stack(self, batch, f, given):
        return super().stack(batch, f, given) if given else torch.empty(0)


@broken("idle rank", "the builder raised IndexError for a batch in which nothing is wrong")
class LooksAtRowZero(Plain):
    def bonus_tokens(self, batch, tokens):
        batch.reqs[0]
        return tokens


@broken("row order", r"hidden_states is \[1, 6\] torch.float32 on cpu, expected \[1, 6\] torch.bfloat16")
class AnotherDtype(Plain):
    def stack(self, batch, f, given):
        return super().stack(batch, f, given).float() if f.name == "hidden_states" else super().stack(batch, f, given)

    def relay(self, batch, draft_input, future_map):
        handed = dg.EagleDraftInput(bonus_tokens=draft_input.bonus_tokens, extras=draft_input.extras)
        handed.hidden_states = draft_input.hidden_states.bfloat16()
        super().relay(batch, handed, future_map)
        draft_input.future_indices = handed.future_indices


@broken("bonus tokens", r"bonus_tokens are \[1, 1, 1\]")
class FirstTokens(Plain):
    def bonus_tokens(self, batch, tokens):
        return torch.tensor([req.output_ids[0] for req in batch.reqs], dtype=torch.int64)


@broken("bonus tokens", r"torch.int32, expected the last tokens \[40000, 40017, 40034\] torch.int64")
class NarrowTokens(Plain):
    def bonus_tokens(self, batch, tokens):
        return tokens.int()


@broken("stateless", "yielded no draft input, and the algorithm does not say stateless = True")
class NoneWithoutStateless(Plain):
    def __call__(self, batch, server_args, tokens, future_map):
        return None


@broken("stateless", "the algorithm says stateless = True, but yielded a draft input")
class StatelessWithRows(Plain):
    stateless = True


@broken("padding", r"the future map was written where it may not be: .*, slots \[0\]")
class WritesThePaddingSlot(Plain):
    def relay(self, batch, draft_input, future_map):
        super().relay(batch, draft_input, future_map)
        if batch.enable_overlap:
            future_map.new_seq_lens_buf[0] = 0


@broken("padding", r"the future map was written where it may not be: .*, slots \[250\]")
class WritesAnothersSlot(Plain):
    def relay(self, batch, draft_input, future_map):
        super().relay(batch, draft_input, future_map)
        if batch.enable_overlap:
            future_map.buffers["seed"][250] = 0


@broken("odd rows", "rows that are strided: row 0 of hidden_states")
class IgnoresStrides(Plain):
    def stack(self, batch, f, given):
        dense = [torch.as_strided(row, (f.width,), (1,)) for row in given]
        return super().stack(batch, f, dense)


@broken("resumed request", "row 0 of hidden_states is that of request 'rid-000', not of 'rid-005'")
class CachedByPlace(Plain):
    """Rows remembered by pool index: those of an index's next tenant are the former's."""

    def stack(self, batch, f, given):
        kept = self.__dict__.setdefault("kept", {})
        slots = [pool_index % 5 for pool_index in batch.req_pool_indices.tolist()]
        return super().stack(batch, f, [kept.setdefault((f, i), row) for i, row in zip(slots, given, strict=True)])


@broken("filter and merge", r"hidden_states is \[5, 6\] torch.bfloat16 on cpu, expected \[3, 6\]")
class CannotBeFiltered(Plain):
    def __call__(self, batch, server_args, tokens, future_map):
        draft_input = super().__call__(batch, server_args, tokens, future_map)
        draft_input.__class__ = Unfiltered
        return draft_input


class Unfiltered(dg.EagleDraftInput):
    """Keeps all rows."""

    def filter_batch(self, new_indices, new_indices_cpu=None):
        pass


@pytest.mark.parametrize("name", BROKEN)
def test_broken_builders_fail(name) -> None:
    """Guards each case: the one that is to find this fault finds it, in words, with what an engine would do wrong."""
    builder, case, words = BROKEN[name]
    with pytest.raises(testing.ContractFailure, match=words) as error:
        testing.check_case(contract_of(builder(step_fields)), case)
    assert f"case '{case}'" in str(error.value)
    assert "What an engine would do wrong: " in str(error.value)


def test_all_failures_at_once() -> None:
    """Guards `check`: it runs every case, and tells of all that failed."""
    with pytest.raises(testing.ContractFailure) as error:
        testing.check(contract_of(NoneWithoutStateless(step_fields)))
    told = re.findall("^case '(.*)' ", str(error.value), re.MULTILINE)
    assert {"stateless", "row order", "missing row", "no device read"} <= set(told)
    assert str(error.value).startswith(f"{len(told)} of {len(testing.CASES)} cases failed")


def test_every_case_can_fail() -> None:
    """Guards against a case that nothing fails."""
    assert {case for _, case, _ in BROKEN.values()} == {case.name for case in testing.CASES}
    assert len(BROKEN) >= 18


# -- the kit's own edges


def test_a_contract_whose_rows_are_all_alike() -> None:
    """Guards against rows by which swapped ones would not be seen."""
    contract = replace(
        contract_of(Plain(step_fields)), make_row=lambda f, generator: torch.zeros(f.width, dtype=f.dtype)
    )
    with pytest.raises(ValueError, match="gives all requests one row of hidden_states"):
        testing.check(contract)


class KeepsFirstSettings(dg.CustomSpecAlgo):
    """Of a class an engine makes one object, and what it keeps stays."""

    kept = None

    def build_disagg_draft_input(self, batch, server_args, last_tokens_tensor, future_map):
        self.kept = self.kept or step_fields(server_args)
        return dg.build_disagg_draft_input(batch, last_tokens_tensor, future_map, self.kept)


@pytest.mark.parametrize("case", ["changed settings", "settings are read at each call"])
def test_a_class_is_one_object(case) -> None:
    """Guards against a class that passes, as each of the settings had an object of its own."""
    with pytest.raises(testing.ContractFailure, match=r"counts is \[3, 2\] torch.int32 on cpu, expected \[3, 5\]"):
        testing.check_case(contract_of(KeepsFirstSettings), case)


@pytest.mark.parametrize("width", [5, 6])
def test_expected_rows_are_as_wide_as_the_field(width) -> None:
    """Guards a `leading` field whose requests bring wider rows, and NaNs whose bits arithmetic does not keep."""

    def fields(steps):
        return (dg.Field("confidence", steps, torch.float16, leading=True),)

    def build(batch, server_args, last_tokens_tensor, future_map):
        clamp = {"confidence": lambda rows, batch: rows.clamp(min=0)}
        return dg.build_disagg_draft_input(
            batch, last_tokens_tensor, future_map, fields(server_args), post_gather=clamp
        )

    clamped = {"confidence": lambda row, request: row.clamp(min=0)}
    assert testing.check(testing.Contract(build, fields, (3, width), expected=clamped)) == {
        "optional row": "no field is optional",
        "settings are read at each call": "the settings have no attributes to change",
    }
    with pytest.raises(testing.ContractFailure, match="confidence"):
        testing.check(testing.Contract(build, fields, (3, width)))


WRONG_CONTRACTS = {
    "function without settings": ({"settings": (None,)}, ValueError, "the fields cannot be made of"),
    "settings": ({"settings": SimpleNamespace(steps=2)}, TypeError, "settings is namespace.*, expected a sequence"),
    "no settings": ({"settings": ()}, ValueError, "has no settings"),
    "attributes": ({"attributes": {"hiden": "x"}}, ValueError, r"attributes name \['hiden'\], but the fields are"),
    "expected": ({"expected": {"hiden": lambda row, request: row}}, ValueError, r"expected name \['hiden'\]"),
    "expected row": (
        {"expected": {"hidden_states": lambda row, request: row.double()}}, ValueError,
        r"expected gave \[\d+\] torch.float64 for hidden_states, expected a tensor",
    ),
    "made row": ({"make_row": lambda f, generator: None}, ValueError, "make_row gave None for hidden_states"),
    "made width": ({"make_row": lambda f, generator: testing.random_row(f, generator)[:1]}, ValueError, r"gave \[1\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_CONTRACTS)
def test_a_contract_that_is_wrong_itself(what) -> None:
    """Guards an author from looking for the fault of the contract in the builder."""
    changed, error, words = WRONG_CONTRACTS[what]
    with pytest.raises(error, match=words):
        testing.check_case(replace(contract_of(Plain(step_fields)), **changed), "row order")


class FillsTheMap(Plain):
    def relay(self, batch, draft_input, future_map):
        super().relay(batch, draft_input, future_map)
        if batch.enable_overlap:
            future_map.tokens.fill_(7)


class PlainMap:
    """A future map of another class: publish, stash and resolve of required fields, in plain torch."""

    def __init__(self, fields: Any, num_slots: int) -> None:
        self.fields = tuple(fields)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64)
        self.tokens = torch.zeros(num_slots, dtype=torch.int64)
        self.tables = {f.name: torch.zeros((num_slots, f.width), dtype=f.dtype) for f in self.fields}

    def publish(self, future_indices: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self.lengths[future_indices] = seq_lens

    def stash(self, future_indices: torch.Tensor, draft_input: Any) -> None:
        self.tokens[future_indices] = draft_input.bonus_tokens
        for name, table in self.tables.items():
            table[future_indices] = draft_input.rows(name)

    def resolve(self, batch: Any) -> None:
        indices = batch.spec_info.future_indices
        batch.seq_lens, batch.spec_info.bonus_tokens = self.lengths[indices], self.tokens[indices]
        for name, table in self.tables.items():
            batch.spec_info.set_rows(name, table[indices])


def test_another_future_map_and_extras() -> None:
    """Guards contracts of an engine's own map, and of builders that read more of requests and batches than rows."""

    def build(batch, server_args, tokens, future_map):
        assert {req.priority for req in batch.reqs} <= {3}
        assert batch.tree == "cache"
        return dg.build_disagg_draft_input(batch, tokens, future_map, FIELDS[:2])

    extras = {"request_extras": {"priority": 3}, "batch_extras": {"tree": "cache"}}
    contract = testing.Contract(build, FIELDS[:2], make_future_map=PlainMap, **extras)
    assert testing.check(contract).keys() == {"optional row", *ONE_SETTING}
    for builder in (FillsTheMap, NotStashed):
        with pytest.raises(
            testing.ContractFailure, match=r"tokens, slots \[0, 1, |row 0 of hidden_states is not that of"
        ):
            testing.check_case(replace(contract, algorithm=builder(lambda server_args: FIELDS[:2])), "padding")


def test_unknown_case_and_no_settings() -> None:
    with pytest.raises(ValueError, match="unknown case 'order', expected one of"):
        testing.check_case(contract_of(Plain()), "order")
    with pytest.raises(ValueError, match="no settings"):
        testing.check(replace(contract_of(Plain()), settings=()))


def test_algorithm_classes_are_instantiated() -> None:
    """Guards a CustomSpecAlgo given as a class, as it is registered."""

    class Own(dg.CustomSpecAlgo):
        def build_disagg_draft_input(self, batch, server_args, last_tokens_tensor, future_map):
            return dg.build_disagg_draft_input(batch, last_tokens_tensor, future_map, FIELDS)

    testing.check_case(testing.Contract(Own, FIELDS), "row order")
    testing.check_case(testing.Contract(Own("OWN", lambda server_args: None), FIELDS), "row order")


def test_device_reads_are_found_and_the_tensor_class_is_as_before() -> None:
    """Guards the reads that are told from one another, and every test after this one."""
    before = dict(vars(torch.Tensor))
    tensor = torch.arange(3)
    reads = [
        lambda: tensor[0].item(),
        lambda: tensor.tolist(),
        lambda: tensor.cpu(),
        lambda: tensor.numpy(),
        lambda: int(tensor[0]),
        lambda: bool(tensor[0]),
        lambda: tensor.nonzero(),
        lambda: tensor[tensor > 1],
        lambda: torch.masked_select(tensor, tensor > 1),
        lambda: torch.equal(tensor, tensor),
        lambda: tensor.unique(),
        lambda: tensor.index_put_((tensor > 1,), tensor[:1].expand(1).repeat(2)[:1].repeat(1)),
    ]
    for read in reads[:-1]:
        with DeviceReads() as found:
            read()
        assert found.found, read
    with DeviceReads() as found:
        tensor[tensor > 5] = -1
        torch.where(tensor > 1, tensor, -1)
        tensor.to("cpu", torch.int32)
        reads[-1]()
    assert not found.found
    assert dict(vars(torch.Tensor)) == before


def test_nothing_imports_the_kit() -> None:
    """Guards the package's import: neither the kit nor pytest comes with it, nor pytest with the kit."""
    code = """if True:
        import sys, draftgather
        assert not [name for name in sys.modules if name.startswith(("draftgather.testing", "pytest"))]
        import draftgather.testing
        assert "pytest" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


SUITE = """
    import torch
    import draftgather as dg
    from draftgather import testing

    FIELDS = (dg.Field("hidden_states", 4, torch.float32),)

    def right(batch, server_args, last_tokens_tensor, future_map):
        return dg.build_disagg_draft_input(batch, last_tokens_tensor, future_map, FIELDS)

    def nothing(batch, server_args, last_tokens_tensor, future_map):
        return None

    def test_right(contract_case):
        contract_case.check(testing.Contract(right, FIELDS))

    def test_nothing(contract_case):
        contract_case.check(testing.Contract(nothing, FIELDS))
"""


@pytest.mark.parametrize("how", ["conftest", "-p"])
def test_plug_in(tmp_path: Path, how: str) -> None:
    """Guards the pytest plug-in: one run a case, skips with reasons, failures that fail, and no warning of pytest's."""
    (tmp_path / "test_own.py").write_text(textwrap.dedent(SUITE))
    options = ["-p", "draftgather.testing"] if how == "-p" else []
    if how == "conftest":
        (tmp_path / "conftest.py").write_text(
            'from draftgather import testing\n\npytest_plugins = ["draftgather.testing"]\n'
        )
    command = [sys.executable, "-m", "pytest", "-rsf", "-W", "error", "-p", "no:cacheprovider", *options, "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "one settings only" in ran.stdout and "no field is optional" in ran.stdout
    assert "FAILED test_own.py::test_nothing[row-order]" in ran.stdout
    assert "FAILED test_own.py::test_right" not in ran.stdout
    assert "18 passed" in ran.stdout, ran.stdout


# -- the page

PAGE = (Path(__file__).parent.parent / "docs/algorithms.md").read_text()


def test_page_runs(capsys) -> None:
    """Guards a reader who types the page: its fences run, one after the other, and say what it says they do."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/algorithms.md", "exec"), names)
    shown = re.search(r"print\(error\)  # (.*) \.\.\.", PAGE)
    assert shown is not None
    assert shown[1] in capsys.readouterr().out
    assert testing.check(names["CONTRACT"]) == {}


def test_page_has_every_case() -> None:
    """Guards the table: every case, what it holds and what an engine would do wrong, in the kit's own words."""
    rows = [f"| {case.name} | {(case.run.__doc__ or '').strip()} | {case.harm} |" for case in testing.CASES]
    assert [line for line in PAGE.splitlines() if line in rows] == rows
