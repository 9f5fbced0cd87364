"""Algorithms by name, and what a plug-in's class must answer before it is registered."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest
import torch

import draftgather as dg
from helpers import make_request, make_settings, random_rows, row_of

Algorithm = dg.SpeculativeAlgorithm


@pytest.fixture
def name() -> str:
    """A name that nobody has registered: the registry lives as long as the process."""
    return f"PLUGIN_{uuid.uuid4().hex.upper()}"


class Builds(dg.CustomSpecAlgo):
    def build_disagg_draft_input(self, batch, server_args, last_tokens_tensor, future_map):
        return dg.EagleDraftInput(bonus_tokens=last_tokens_tensor)


class OtherBuilds(Builds):
    pass


class Stateless(dg.CustomSpecAlgo):
    stateless = True


@pytest.mark.parametrize("given", ["EAGLE", "eagle", "Eagle", "NEXTN", "nextn"])
def test_eagle_by_any_spelling(given):
    """Guards launch arguments in any case, and NEXTN, which is EAGLE."""
    assert Algorithm.from_string(given) is Algorithm.EAGLE


def test_none():
    """Guards a server without speculation: no name is NONE."""
    assert Algorithm.from_string(None) is Algorithm.NONE
    assert Algorithm.from_string("none") is Algorithm.NONE


@pytest.mark.parametrize("member", list(Algorithm))
def test_every_member_by_its_name(member):
    """Guards the names, in any case."""
    assert Algorithm.from_string(member.name.lower()) is member


def test_members():
    """Guards sglang's list of algorithms."""
    assert [member.name for member in Algorithm] == ["NONE", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH"]


@pytest.mark.parametrize("unknown", ["", "EAGLE4", "EAGLE ", "PLUGIN_NOBODY"])
def test_unknown_names(unknown):
    """Guards a misspelt launch argument: refused with the known names, and not taken for NONE."""
    with pytest.raises(ValueError, match=r"unknown speculative algorithm .* expected one of \[.*'EAGLE'.*'NEXTN'"):
        Algorithm.from_string(unknown)


# name -> the predicates that are true of it.
PREDICATES = {
    "NONE": {"is_none"},
    "EAGLE": {"is_some", "is_speculative", "is_eagle"},
    "EAGLE3": {"is_some", "is_speculative", "is_eagle", "is_eagle3"},
    "STANDALONE": {"is_some", "is_speculative", "is_standalone"},
    "NGRAM": {"is_some", "is_speculative", "is_ngram"},
    "DFLASH": {"is_some", "is_speculative", "is_dflash"},
}


@pytest.mark.parametrize("member", list(Algorithm))
def test_predicates(member):
    """Guards each question about identity, by a table written by hand."""
    asked = [name for name in dir(member) if name.startswith("is_")]
    assert len(asked) == 8
    assert {name for name in asked if getattr(member, name)()} == PREDICATES[member.name]


def test_custom_algorithms_answer_every_question(name):
    """Guards call sites that ask a plug-in's algorithm what they ask the enum."""
    algorithm = Builds(name, lambda server_args: None)
    for question in (name for name in dir(Algorithm.EAGLE) if name.startswith("is_")):
        assert getattr(algorithm, question)() == (question in ("is_some", "is_speculative")), question
    assert name in repr(algorithm)


# -- registration


def test_register(name):
    """Guards the way of a plug-in: registered, found in any case, its worker made by its factory."""

    @Algorithm.register(name, supports_overlap=True, spec_class=Builds)
    def factory(server_args):
        return ("worker", server_args)

    algorithm = Algorithm.from_string(name.lower())
    assert type(algorithm) is Builds
    assert (algorithm.name, algorithm.supports_overlap, algorithm.stateless) == (name, True, False)
    assert algorithm.create_worker("args") == ("worker", "args")
    assert factory("x") == ("worker", "x"), "the decorator returns the factory"


@pytest.mark.parametrize("reserved", ["EAGLE", "eagle3", "NextN", "NONE", "ngram", "DFLASH", "standalone"])
def test_reserved_names(reserved):
    """Guards the built-in algorithms from being shadowed, in any case."""
    before = Algorithm.from_string(reserved)
    with pytest.raises(dg.AlgorithmError, match="reserved"):
        Algorithm.register(reserved, spec_class=Builds)
    assert Algorithm.from_string(reserved) is before


def test_registering_again_is_a_no_op(name):
    """Guards plug-ins that are loaded in every process, and more than once."""
    Algorithm.register(name, spec_class=Builds)(lambda server_args: 1)
    first = Algorithm.from_string(name)
    Algorithm.register(name.lower(), spec_class=Builds)(lambda server_args: 2)
    assert Algorithm.from_string(name) is first


def test_another_class_under_the_same_name(name):
    """Guards two plug-ins with one name: the second is refused, the first stays."""
    Algorithm.register(name, spec_class=Builds)(lambda server_args: 1)
    with pytest.raises(dg.AlgorithmError, match=f"{name} is registered already, with Builds"):
        Algorithm.register(name, spec_class=OtherBuilds)(lambda server_args: 1)
    assert type(Algorithm.from_string(name)) is Builds


QUESTIONS = ("is_none", "is_some", "is_speculative", "is_eagle", "is_eagle3", "is_standalone", "is_ngram", "is_dflash")


@pytest.mark.parametrize("missing", [*QUESTIONS, "build_disagg_draft_input"])
def test_incomplete_class(name, missing):
    """Guards a class that would fail at a call site, mid-serving: refused at once, with the missing name."""
    methods = {question: lambda self: False for question in QUESTIONS}
    methods["build_disagg_draft_input"] = lambda self, *arguments: None
    del methods[missing]
    with pytest.raises(dg.AlgorithmError, match=f"Partial lacks {missing}"):
        Algorithm.register(name, spec_class=type("Partial", (), methods))
    with pytest.raises(ValueError, match="unknown"):
        Algorithm.from_string(name)


def test_incomplete_class_names_all_that_is_missing(name):
    """Guards the plug-in's author from one error after the other."""
    with pytest.raises(dg.AlgorithmError) as error:
        Algorithm.register(name, spec_class=type("Empty", (), {}))
    for question in (*QUESTIONS, "build_disagg_draft_input"):
        assert question in str(error.value)


@pytest.mark.parametrize("spec_class", [None, dg.CustomSpecAlgo, type("Idle", (dg.CustomSpecAlgo,), {})])
def test_class_that_neither_builds_nor_is_stateless(name, spec_class):
    """Guards the first decode step: a class that hands nothing over must say so."""
    with pytest.raises(dg.AlgorithmError, match="neither overrides build_disagg_draft_input nor sets stateless"):
        Algorithm.register(name, spec_class=spec_class)


def test_stateless_class(name):
    """Guards n-gram like plug-ins: stateless = True is enough."""
    Algorithm.register(name, spec_class=Stateless)(lambda server_args: None)
    assert Algorithm.from_string(name).build_disagg_draft_input(None, None, None, None) is None


# -- what each hands over


def make_batch(overlap: bool, reqs: list) -> SimpleNamespace:
    return SimpleNamespace(
        reqs=reqs, device="cpu", enable_overlap=overlap, req_pool_indices=torch.tensor([3]), seq_lens=torch.tensor([9])
    )


@pytest.mark.parametrize("algorithm", [Algorithm.NONE, Algorithm.STANDALONE, Algorithm.NGRAM])
def test_algorithms_without_rows(algorithm):
    """Guards the stateless ones: nothing is built, and they say that they are stateless."""
    batch = make_batch(True, [make_request("a", {})])
    assert algorithm.build_disagg_draft_input(batch, make_settings(), torch.tensor([7]), None) is None
    assert algorithm.stateless


@pytest.mark.parametrize("algorithm", [Algorithm.EAGLE, Algorithm.EAGLE3])
def test_eagle_hands_over_rows(algorithm):
    """Guards EAGLE and EAGLE3 alike: their draft input carries the rows."""
    rows = row_of(random_rows(dg.eagle_fields(4, 24), 1), 0)
    batch = make_batch(False, [make_request("a", rows)])
    draft_input = algorithm.build_disagg_draft_input(batch, make_settings(), torch.tensor([7]), None)
    assert draft_input.hidden_states.shape == (1, 24)
    assert not algorithm.stateless


@pytest.mark.parametrize("overlap", [True, False])
def test_dflash_hands_over_tokens_and_lengths(overlap):
    """Guards DFLASH: bonus tokens and lengths only, relayed under overlap and not touched outside it."""
    future_map = dg.FutureMap((), 8)
    batch = make_batch(overlap, [make_request("a", {})])
    draft_input = Algorithm.DFLASH.build_disagg_draft_input(batch, make_settings(), torch.tensor([7]), future_map)
    assert draft_input.bonus_tokens.tolist() == [7]
    assert draft_input.capture_hidden_mode is dg.CaptureHiddenMode.NULL
    assert (draft_input.topk_p, draft_input.hidden_states) == (None, None)
    assert not Algorithm.DFLASH.stateless
    if overlap:
        assert draft_input.future_indices.tolist() == [3]
        assert future_map.new_seq_lens_buf.tolist() == [0, 0, 0, 9, 0, 0, 0, 0]
        assert future_map.output_tokens_buf.tolist() == [0, 0, 0, 7, 0, 0, 0, 0]
    else:
        assert draft_input.future_indices is None
        assert not future_map.new_seq_lens_buf.any()
