"""The pair: tokens are those of greedy decoding, acceptance lengths those of one process, wrong rows show."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from pd_pair.compare import Reference, later_steps, mean_accepted, mean_first, problems, wrong_steps, wrong_tokens
from pd_pair.decode import Served
from pd_pair.decoder import NUM_PATHS, NUM_STEPS, Output, Step, draft_paths, greedy, next_rows, prefill, verify
from pd_pair.model import VOCAB_SIZE, Model, make_model, no_past, trajectories
from pd_pair.pair import PairError, run_pair
from pd_pair.wire import why_no_engine
from pd_pair.workload import ROW_KINDS, Mix, Request, RowKind, Run, make_mixes

MIXES = make_mixes()
NO_ENGINE = why_no_engine()
needs_engine = pytest.mark.skipif(NO_ENGINE is not None, reason=str(NO_ENGINE))
each_mix = pytest.mark.parametrize("mix", MIXES, ids=[f"{mix.name}, {mix.max_running} running" for mix in MIXES])
each_kind = pytest.mark.parametrize("kind", ROW_KINDS)
References = dict[tuple[Request, ...], Reference]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


@pytest.fixture(scope="module")
def references(model: Model) -> References:
    return {requests: Reference.of(model, requests) for requests in {mix.requests for mix in MIXES}}


@pytest.fixture(scope="module")
def served(model: Model) -> dict[Run, Served]:
    """All mixes with all kinds of rows, on one pair of processes."""
    runs = [Run(mix, kind) for mix in MIXES for kind in ROW_KINDS]
    return dict(zip(runs, run_pair(model, runs), strict=True))


# -- in one process


def test_cached_forward(model: Model) -> None:
    """Guards the KV cache: tokens after a padded past have the hidden states that they have in the whole sequence."""
    tokens = torch.arange(24).view(2, 12) * 7 % VOCAB_SIZE
    whole, kv = model.forward(tokens, *no_past(2))
    past = torch.cat([kv[:, :8], torch.full_like(kv[:, :3], 1e3)], dim=1)
    for length in (8, 5):
        hidden, _ = model.forward(tokens[:, length:], past, torch.tensor([length, length]))
        torch.testing.assert_close(hidden, whole[:, length:], rtol=0, atol=1e-11)


def test_verify_by_hand(model: Model) -> None:
    """Guards what is accepted: two draft tokens of the better path, then the target's own, and their KV."""
    request = Request(tuple(range(10, 20)), 8)
    expected, prefilled = greedy(model, request), prefill(model, request.prompt)
    assert prefilled.first_token == expected[0]
    wrong = [(token + 1) % VOCAB_SIZE for token in expected]
    paths = torch.tensor([[[wrong[1], *expected[2:5]], [*expected[1:3], wrong[3], expected[4]]]])
    assert paths.shape == (1, NUM_PATHS, NUM_STEPS)
    verified = verify(model, torch.tensor(expected[:1]), paths, prefilled.kv, torch.tensor([10]))
    assert verified.num_accepted.tolist() == [2]
    assert verified.tokens[0, :3].tolist() == expected[1:4]
    assert verified.bonus_tokens.tolist() == [expected[3]]
    whole, kv = model.forward(torch.tensor([[*request.prompt, *expected[:3]]]), *no_past(1))
    torch.testing.assert_close(verified.hidden, whole[:, -1], rtol=0, atol=1e-11)
    torch.testing.assert_close(verified.kv[:, :3], kv[:, 10:], rtol=0, atol=1e-11)


def test_no_choice_is_close(model: Model) -> None:
    """Guards the comparison of acceptance lengths: rounding, at most 1e-11, is far below what would flip a choice."""
    gaps = []
    for request in {request for mix in MIXES for request in mix.requests}:
        all_hidden, all_tokens = trajectories(model, torch.tensor([request.prompt]), request.num_tokens)
        gaps.append((all_hidden @ model.lm_head).topk(2, dim=2).values.diff(dim=2))
        hidden, tokens = all_hidden[0], all_tokens[0]
        rows = next_rows(model, hidden, tokens)
        # Of the float32 probabilities, the one between a path's first token and a token that begins none.
        gaps.append(rows.topk_p.log()[:, NUM_PATHS - 1 : NUM_PATHS + 1].diff(dim=1) / 1e5)
        hidden = rows.hidden_states.repeat_interleave(NUM_PATHS, dim=0)
        for tokens in draft_paths(model, rows).flatten(0, 1).T[:-1]:
            hidden = model.draft(hidden, tokens)
            gaps.append((hidden @ model.lm_head).topk(2, dim=1).values.diff(dim=1))
    assert torch.cat([gap.abs().flatten().double() for gap in gaps]).min() > 1e-9


def test_acceptance_is_neither_none_nor_all(references: References) -> None:
    """Guards the comparison: with a draft head that is never or always right, no row would matter."""
    for reference in references.values():
        right, zeroed = reference.outputs["right"], reference.outputs["zeroed"]
        assert 1 < mean_accepted(right) < NUM_STEPS - 1
        assert mean_first(right) > mean_first(zeroed) + 0.5
        assert {step.num_accepted for output in right for step in output.steps} == set(range(NUM_STEPS + 1))


def test_reference_in_itself(references: References) -> None:
    """Guards the reference: lossless with any rows, and a wrong first row costs the first step only."""
    for reference in references.values():
        assert problems(reference.outputs, reference) == []


def test_each_difference_is_told() -> None:
    """Guards the checks: one token, one acceptance length and one later step that differ."""
    right = [Output([5, 6, 7], [Step(1, 1), Step(3, 2)]), Output([8], [])]
    other = [Output([5, 6, 8], [Step(1, 0), Step(2, 0), Step(3, 1)]), Output([8], [])]
    assert wrong_tokens(other, [[5, 6, 7], [8]]) == ["request 0: tokens are [5, 6, 8], expected [5, 6, 7]"]
    assert wrong_steps(other, right) == [
        "request 0: (position, accepted) are [(1, 0), (2, 0), (3, 1)], expected [(1, 1), (3, 2)]"
    ]
    assert later_steps(other, right) == (1, 2, ["request 0: 1 tokens accepted at position 3, expected 2"])
    assert (mean_accepted(right), mean_first(right), mean_first(other)) == (1.5, 1.0, 0.0)


# -- over the wire


@needs_engine
@each_kind
@each_mix
def test_tokens_are_greedy(served: dict[Run, Served], references: References, mix: Mix, kind: RowKind) -> None:
    """Guards KV and verification: whatever the rows, the tokens are those of plain greedy decoding."""
    assert wrong_tokens(served[Run(mix, kind)].outputs, references[mix.requests].tokens) == []


@needs_engine
@each_kind
@each_mix
def test_acceptance_of_one_process(served: dict[Run, Served], references: References, mix: Mix, kind: RowKind) -> None:
    """Guards every row's way, handed over and relayed: one that is misaligned, stale or damaged shows in a length.

    Rows that are wrong already arrive as they were packed: they cost what they cost in one process.
    """
    outputs, alone = served[Run(mix, kind)].outputs, references[mix.requests].outputs[kind]
    assert [output.steps[:1] for output in outputs] == [output.steps[:1] for output in alone]
    assert wrong_steps(outputs, alone) == []


@needs_engine
@pytest.mark.parametrize("kind", ["stale", "zeroed"])
@each_mix
def test_wrong_rows_cost_the_first_step(served: dict[Run, Served], mix: Mix, kind: RowKind) -> None:
    """Guards the test above, which must be able to fail: a wrong row is seen, in the first step and nowhere else."""
    right, wrong = served[Run(mix, "right")].outputs, served[Run(mix, kind)].outputs
    assert mean_first(wrong) < mean_first(right) - 0.5
    assert len(wrong_steps(wrong, right)) > len(mix.requests) / 3
    later = later_steps(wrong, right)
    assert later.wrong == []
    assert later.num_compared > later.num_steps / 2


@needs_engine
@each_mix
def test_batches(served: dict[Run, Served], mix: Mix) -> None:
    """Guards the mixes: every request is assembled once, those of a burst in one batch as far as they have room."""
    assembled = served[Run(mix, "right")].assembled
    assert sum(assembled) == len(mix.requests)
    assert max(assembled) >= min(mix.max_running, mix.arrivals.count(0))


@needs_engine
@pytest.mark.parametrize(
    ("request_", "failing"), [(Request((), 4), "prefill"), (Request((1, 2), 1000), "decode")], ids=["prefill", "decode"]
)
def test_no_process_outlives_a_failure(model: Model, request_: Request, failing: str) -> None:
    """Guards the end: when one node fails, the other is not left waiting."""
    with pytest.raises(PairError, match=rf"a run brought no result \(.*\): .*{failing} ended with 1"):
        run_pair(model, [Run(Mix("bad", (request_,), (0,), 1), "right")])
    assert multiprocessing.active_children() == []
