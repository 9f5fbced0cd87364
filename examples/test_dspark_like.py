"""The contract of dspark_like, and its way through registration and a prebuilt batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import draftgather as dg
import dspark_like
from draftgather import testing

SETTINGS = tuple(SimpleNamespace(draft_hidden_size=48, speculative_num_steps=steps) for steps in (3, 5))
CONTRACT = testing.Contract(
    dspark_like.DsparkLike, dspark_like.fields, settings=SETTINGS, attributes=dspark_like.ATTRIBUTES
)


def test_contract(contract_case):
    """Every case of the contract."""
    contract_case.check(CONTRACT)


def test_contract_without_the_plug_in():
    """The same without pytest. Only one case has nothing to say: no field is optional."""
    assert testing.check(CONTRACT) == {"optional row": "no field is optional"}


def test_prebuilt_batch():
    """Registered, found by name, and run as an engine runs it: with literals."""
    dspark_like.register()
    algorithm = dg.SpeculativeAlgorithm.from_string("dspark_like")
    settings = SimpleNamespace(draft_hidden_size=2, speculative_num_steps=3)
    reqs = [
        SimpleNamespace(
            rid=f"r{i}",
            output_ids=[5, 70 + i],
            hidden_states_tensor=torch.tensor([i, i + 0.5], dtype=torch.bfloat16),
            draft_block_mask=torch.arange(8) == i,
            draft_warmup_steps=torch.tensor([i, 10, 20, 30], dtype=torch.int32),
        )
        for i in range(2)
    ]
    future_map = dg.FutureMap(dspark_like.fields(settings), num_slots=8)
    batch = dg.ScheduleBatch(reqs, "cpu", torch.tensor([3, 5]), torch.tensor([100, 200]), algorithm)
    batch.process_prebuilt(settings, future_map)
    batch.spec_info.filter_batch(torch.tensor([1]))  # the first request ends
    future_map.resolve(batch)
    assert batch.spec_info.hidden_states.tolist() == [[1.0, 1.5]]
    assert batch.spec_info.extras["block_mask"].tolist() == [[False, True, *[False] * 6]]
    assert batch.spec_info.extras["warmup_steps"].tolist() == [[1, 10, 20]]
    assert (batch.spec_info.bonus_tokens.tolist(), batch.seq_lens.tolist()) == ([71], [200])
    assert batch.spec_info.topk_p is None


def test_missing_counters_name_the_request():
    """Guards against counters that are made up: a request without them is refused by name."""
    req = SimpleNamespace(rid="r0", output_ids=[1], hidden_states_tensor=torch.zeros(48, dtype=torch.bfloat16))
    req.draft_block_mask = torch.ones(8, dtype=torch.bool)
    algorithm = dspark_like.DsparkLike("OWN", dspark_like.make_worker)
    batch = dg.ScheduleBatch([req], "cpu", torch.tensor([3]), torch.tensor([9]), algorithm)
    with pytest.raises(dg.MissingRowError, match="request 'r0': warmup_steps is missing"):
        batch.process_prebuilt(SETTINGS[0], dg.FutureMap(dspark_like.fields(SETTINGS[0]), 8))
    assert batch.spec_info is None


def test_yielding_nothing_is_an_error_with_the_algorithms_name():
    """Guards a builder that forgets to return: the first decode step would find no draft input."""

    class Forgetful(dspark_like.DsparkLike):
        def build_disagg_draft_input(self, batch, server_args, last_tokens_tensor, future_map):
            super().build_disagg_draft_input(batch, server_args, last_tokens_tensor, future_map)

    algorithm = Forgetful("DSPARK_FORGETFUL", dspark_like.make_worker)
    batch = dg.ScheduleBatch([], "cpu", *torch.empty((2, 0), dtype=torch.int64), algorithm)
    with pytest.raises(dg.AlgorithmError, match="DSPARK_FORGETFUL yielded no draft input"):
        batch.process_prebuilt(SETTINGS[0], dg.FutureMap(dspark_like.fields(SETTINGS[0]), 8))
    with pytest.raises(testing.ContractFailure, match="does not say stateless = True"):
        testing.check_case(testing.Contract(algorithm, dspark_like.fields, SETTINGS), "stateless")
