"""The draft input: row i stays the i-th request's through filter and merge, in either mode."""

from __future__ import annotations

import pytest
import torch

import draftgather as dg
from helpers import REAL_DTYPES, assert_bytes, raw


def make_input(first: int, num_rows: int = 3, **more: object) -> dg.EagleDraftInput:
    """Rows whose every number tells the request: first, first + 1, ..."""
    numbers = torch.arange(first, first + num_rows)
    return dg.EagleDraftInput(
        topk_p=numbers[:, None].float() / 64,
        topk_index=torch.stack([numbers, -numbers], 1),
        hidden_states=numbers[:, None].to(torch.bfloat16).expand(num_rows, 5).contiguous(),
        bonus_tokens=numbers + 1000,
        **more,
    )


def assert_requests(draft_input: dg.EagleDraftInput, requests: list[int]) -> None:
    """Each tensor's row i is that of requests[i]."""
    assert draft_input.topk_index.tolist() == [[r, -r] for r in requests]
    assert (draft_input.topk_p * 64).tolist() == [[r] for r in requests]
    assert draft_input.hidden_states.tolist() == [[r] * 5 for r in requests]
    assert draft_input.bonus_tokens.tolist() == [r + 1000 for r in requests]
    assert draft_input.num_rows == len(requests)


@pytest.mark.parametrize(
    "keep",
    [
        torch.tensor([2, 0]),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([False, True, False]),
        torch.tensor([1, 1]),
        torch.empty(0, dtype=torch.int64),
    ],
    ids=str,
)
def test_filter(keep):
    """Guards the rows that stay, in their new order, of every tensor alike."""
    draft_input = make_input(
        10, extras={"seed": torch.arange(3)[:, None]}, valid={"seed": torch.tensor([True, False, True])}
    )
    kept = torch.arange(3)[keep].tolist()
    draft_input.filter_batch(keep)
    assert_requests(draft_input, [10 + i for i in kept])
    assert draft_input.extras["seed"].tolist() == [[i] for i in kept]
    assert draft_input.valid["seed"].tolist() == [i != 1 for i in kept]


def test_filter_with_host_indices():
    """Guards the call shape of sglang: the host's copy of the indices may be given as well."""
    draft_input = make_input(10)
    draft_input.filter_batch(torch.tensor([1]), [1])
    assert_requests(draft_input, [11])


def test_merge():
    """Guards the order of a merge: the other's rows come after one's own."""
    draft_input = make_input(10, 2)
    draft_input.merge_batch(make_input(20, 1))
    draft_input.merge_batch(make_input(30, 2))
    assert_requests(draft_input, [10, 11, 20, 30, 31])


def test_merge_keeps_bits():
    """Guards against a conversion on the way: NaN payloads and -0.0 stay."""
    bits = torch.tensor([[0x7FC01234, -(2**31)]], dtype=torch.int32)
    inputs = [dg.EagleDraftInput(topk_p=bits.view(torch.float32)) for _ in range(2)]
    inputs[0].merge_batch(inputs[1])
    assert_bytes(inputs[0].topk_p, raw(bits.repeat(2, 1)))


@pytest.mark.parametrize("name", ["topk_p", "topk_index", "hidden_states", "bonus_tokens", "extra"])
def test_merge_of_a_field_that_one_side_lacks(name):
    """Guards against misaligned rows: fewer rows of one field than of the others. A failed merge changes nothing."""
    mine, other = make_input(10, 2), make_input(20, 2)
    if name == "extra":
        other.extras["seed"] = torch.zeros(2, 1)
    else:
        setattr(other, name, None)
    with pytest.raises(ValueError, match=f"{'seed' if name == 'extra' else name} is there for the rows of one"):
        mine.merge_batch(other)
    assert_requests(mine, [10, 11])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(2, 6, dtype=torch.bfloat16), r"hidden_states: rows of \(5,\) torch.bfloat16 and of \(6,\)"),
        (torch.zeros(2, 5), r"hidden_states: rows of .* and of \(5,\) torch.float32"),
    ],
    ids=["width", "dtype"],
)
def test_merge_of_other_rows(rows, message):
    """Guards against torch.cat's own promotion of dtypes: bfloat16 rows must not become float32."""
    mine, other = make_input(10, 2), make_input(20, 2)
    other.hidden_states = rows
    with pytest.raises(ValueError, match=message):
        mine.merge_batch(other)
    assert_requests(mine, [10, 11])


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_presence_is_anded_on_merge(first, second):
    """Guards a seed that half of the rows lack: gone for the merged batch, and no error."""
    mine = make_input(10, 1, present={"seed": first})
    other = make_input(20, 1, present={"seed": second})
    for draft_input, there in ((mine, first), (other, second)):
        if there:
            draft_input.extras["seed"] = torch.full((1, 2), draft_input.bonus_tokens.item())
    mine.merge_batch(other)
    assert mine.present == {"seed": first and second}
    if first and second:
        assert mine.extras["seed"].tolist() == [[1010] * 2, [1020] * 2]
    else:
        assert "seed" not in mine.extras
    assert_requests(mine, [10, 20])


# -- under overlap


def test_under_overlap_only_the_indices_change():
    """Guards against old rows beside new indices: they are dropped until resolve fills them again."""
    mine = make_input(10, 3, future_indices=torch.tensor([5, 6, 7]), present={"seed": True})
    other = make_input(20, 1, future_indices=torch.tensor([9]), present={"seed": False})
    mine.filter_batch(torch.tensor([2, 0]))
    assert mine.future_indices.tolist() == [7, 5]
    assert mine.num_rows == 2
    assert [mine.topk_p, mine.topk_index, mine.hidden_states, mine.bonus_tokens] == [None] * 4
    mine.merge_batch(other)
    assert mine.future_indices.tolist() == [7, 5, 9]
    assert mine.present == {"seed": False}
    assert [mine.topk_p, mine.topk_index, mine.hidden_states, mine.bonus_tokens] == [None] * 4
    assert other.num_rows == 1


@pytest.mark.parametrize("mine_overlaps", [True, False])
def test_merge_across_modes(mine_overlaps):
    """Guards against rows with indices beside rows without: which rows would resolve fill?"""
    with_indices = make_input(10, 1, future_indices=torch.tensor([5]))
    without = make_input(20, 1)
    mine, other = (with_indices, without) if mine_overlaps else (without, with_indices)
    with pytest.raises(ValueError, match="under overlap"):
        mine.merge_batch(other)
    assert_requests(with_indices, [10])
    assert_requests(without, [20])


# -- idle and empty


def test_idle_input():
    """Guards typed empty tensors for an idle rank: stubs without width or dtype broke the next merge."""
    idle = dg.EagleDraftInput.create_idle_input("cpu", 24, torch.float16, 4)
    assert (idle.topk_p.shape, idle.topk_p.dtype) == ((0, 4), torch.float32)
    assert (idle.topk_index.shape, idle.topk_index.dtype) == ((0, 4), torch.int64)
    assert (idle.hidden_states.shape, idle.hidden_states.dtype) == ((0, 24), torch.float16)
    assert (idle.bonus_tokens.shape, idle.bonus_tokens.dtype) == ((0,), torch.int64)
    assert idle.capture_hidden_mode is dg.CaptureHiddenMode.LAST
    assert (idle.future_indices, idle.num_rows) == (None, 0)


def test_idle_input_without_hidden_states():
    """Guards drafts that read no hidden states (STANDALONE)."""
    idle = dg.EagleDraftInput.create_idle_input("cpu", None, None, 1, capture_hidden_mode=dg.CaptureHiddenMode.NULL)
    assert idle.hidden_states is None
    assert idle.capture_hidden_mode is dg.CaptureHiddenMode.NULL


@pytest.mark.parametrize(
    "empty", [dg.EagleDraftInput(), dg.EagleDraftInput.create_idle_input("cpu", 5, torch.bfloat16, 2)]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_merge_with_nothing(empty, overlap):
    """Guards an idle step between two running ones: the running rows stay, their indices too."""
    indices = torch.tensor([3, 4, 8]) if overlap else None
    running = make_input(10, future_indices=indices)
    running.merge_batch(empty)
    assert_requests(running, [10, 11, 12])
    fresh = dg.EagleDraftInput(**{name: getattr(empty, name) for name in ("topk_p", "topk_index", "hidden_states")})
    fresh.merge_batch(running)
    assert_requests(fresh, [10, 11, 12])
    assert fresh.future_indices is indices


def test_merge_into_an_idle_input_does_not_share_dicts():
    """Guards two batches that look into one dictionary of extras."""
    idle, running = dg.EagleDraftInput(), make_input(10, extras={"seed": torch.zeros(3, 1)})
    idle.merge_batch(running)
    idle.filter_batch(torch.tensor([0]))
    assert len(running.extras["seed"]) == 3


def test_defaults_are_not_shared():
    """Guards two draft inputs with one dictionary."""
    first, second = dg.EagleDraftInput(), dg.EagleDraftInput()
    first.extras["seed"] = torch.zeros(1, 1)
    first.present["seed"] = False
    assert not second.extras
    assert not second.present
    assert first.capture_hidden_mode is dg.CaptureHiddenMode.LAST


def test_capture_hidden_modes():
    """Guards sglang's own numbers: the mode crosses into CUDA graph runners."""
    assert [(mode.name, int(mode)) for mode in dg.CaptureHiddenMode] == [("NULL", 0), ("LAST", 1), ("FULL", 2)]


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_set_and_get_rows(dtype):
    """Guards fields by name: EAGLE's own are attributes, others are extras, None takes one away."""
    draft_input = dg.EagleDraftInput()
    rows = torch.zeros(2, 3, dtype=dtype)
    for name in ("hidden_states", "seed"):
        assert draft_input.rows(name) is None
        draft_input.set_rows(name, rows)
        assert draft_input.rows(name) is rows
        assert draft_input.num_rows == 2
        draft_input.set_rows(name, None)
        draft_input.set_rows(name, None)
        assert draft_input.rows(name) is None
    assert draft_input.hidden_states is None
    assert not draft_input.extras
