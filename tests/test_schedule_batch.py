"""The last step before the first decode: a draft input, or the last tokens; never neither."""

from __future__ import annotations

import pytest
import torch

import draftgather as dg
from helpers import assert_bytes, make_request, make_settings, random_rows, row_of, stacked


class Own(dg.CustomSpecAlgo):
    """Answers with what it was asked with."""

    def build_disagg_draft_input(self, batch, server_args, last_tokens_tensor, future_map):
        return (batch, server_args, last_tokens_tensor, future_map)


class Forgetful(dg.CustomSpecAlgo):
    def build_disagg_draft_input(self, batch, server_args, last_tokens_tensor, future_map):
        return None


class Stateless(Forgetful):
    stateless = True


def make_batch(algorithm, reqs, **more) -> dg.ScheduleBatch:
    count = torch.arange(len(reqs))
    return dg.ScheduleBatch(reqs, "cpu", count + 1, count + 10, algorithm, **more)


@pytest.mark.parametrize("overlap", [True, False])
def test_eagle_sets_the_draft_input(fields, overlap):
    """Guards the first outcome: spec_info carries the rows and the last tokens; no decode input is set."""
    rows = random_rows(fields, 2)
    reqs = [make_request(i, row_of(rows, i), tokens=(1, 2, 70 + i)) for i in range(2)]
    batch = make_batch(dg.SpeculativeAlgorithm.EAGLE, reqs, enable_overlap=overlap)
    future_map = dg.FutureMap(fields, 8)
    batch.process_prebuilt(make_settings(), future_map)
    assert batch.input_ids is None
    assert batch.spec_info.bonus_tokens.tolist() == [70, 71]
    assert batch.spec_info.bonus_tokens.dtype is torch.int64
    for field in fields:
        assert_bytes(batch.spec_info.rows(field.name), stacked(field, rows[field.name], 2), field.name)
    assert future_map.new_seq_lens_buf.tolist()[:4] == ([0, 10, 11, 0] if overlap else [0] * 4)
    assert future_map.output_tokens_buf.tolist()[:4] == ([0, 70, 71, 0] if overlap else [0] * 4)


@pytest.mark.parametrize(
    "algorithm",
    [
        dg.SpeculativeAlgorithm.NONE,
        dg.SpeculativeAlgorithm.STANDALONE,
        dg.SpeculativeAlgorithm.NGRAM,
        Stateless("STATELESS", lambda server_args: None),
    ],
    ids=str,
)
def test_without_a_draft_input_the_last_tokens_are_decoded(algorithm):
    """Guards the second outcome: the last token of each request becomes the decode input."""
    batch = make_batch(algorithm, [make_request("a", {}, tokens=(5, 6)), make_request("b", {}, tokens=[2**40])])
    batch.process_prebuilt(make_settings(), None)
    assert batch.spec_info is None
    assert batch.input_ids.tolist() == [6, 2**40]
    assert batch.input_ids.dtype is torch.int64


def test_custom_algorithm_is_asked_once_with_everything():
    """Guards the polymorphic call: batch, settings, last tokens and map reach the plug-in as they are."""
    batch = make_batch(Own("OWN", lambda server_args: None), [make_request("a", {}, tokens=(8,))])
    settings, future_map = object(), object()
    batch.process_prebuilt(settings, future_map)
    asked = batch.spec_info
    assert asked[0] is batch
    assert asked[1] is settings
    assert asked[2].tolist() == [8]
    assert asked[3] is future_map
    assert batch.input_ids is None


def test_custom_algorithm_that_yields_nothing():
    """Guards the first decode step from finding no draft input: an error now, with the algorithm's name."""
    batch = make_batch(Forgetful("FORGETFUL", lambda server_args: None), [make_request("a", {})])
    with pytest.raises(dg.AlgorithmError, match="FORGETFUL yielded no draft input"):
        batch.process_prebuilt(make_settings(), None)
    assert (batch.spec_info, batch.input_ids) == (None, None)


def test_missing_output_tokens(fields):
    """Guards a request without a sampled token: all of them are named, and neither batch nor map changes."""
    rows = random_rows(fields, 3)
    reqs = [make_request(f"r{i}", row_of(rows, i), tokens=(7,) if i == 1 else ()) for i in range(3)]
    batch = make_batch(dg.SpeculativeAlgorithm.EAGLE, reqs)
    future_map = dg.FutureMap(fields, 8)
    with pytest.raises(dg.MissingRowError, match="request 'r0': output_ids is empty") as error:
        batch.process_prebuilt(make_settings(), future_map)
    assert [(problem.position, problem.request_id) for problem in error.value.problems] == [(0, "r0"), (2, "r2")]
    assert (batch.spec_info, batch.input_ids) == (None, None)
    assert not future_map.new_seq_lens_buf.any()


def test_bad_rows_leave_the_batch_unchanged(fields):
    """Guards a half-processed batch: a bad row is an error, and spec_info is what it was."""
    rows = random_rows(fields, 1)
    rows["topk_p"][0] = None
    batch = make_batch(dg.SpeculativeAlgorithm.EAGLE, [make_request("a", row_of(rows, 0))])
    with pytest.raises(dg.MissingRowError, match="request 'a': topk_p is missing"):
        batch.process_prebuilt(make_settings(), dg.FutureMap(fields, 8))
    assert (batch.spec_info, batch.input_ids) == (None, None)


def test_empty_batch(fields):
    """Guards an idle rank: typed zero-row tensors, and nothing relayed."""
    batch = make_batch(dg.SpeculativeAlgorithm.EAGLE, [])
    future_map = dg.FutureMap(fields, 8)
    batch.process_prebuilt(make_settings(), future_map)
    assert batch.spec_info.hidden_states.shape == (0, 24)
    assert batch.spec_info.bonus_tokens.shape == (0,)
    assert not future_map.new_seq_lens_buf.any()
