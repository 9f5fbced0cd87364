"""The contract of seeded, its mapping with literals, and a batch in which one request has no seed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import draftgather as dg
import seeded
from draftgather import testing

SETTINGS = tuple(SimpleNamespace(speculative_eagle_topk=topk, draft_hidden_size=40) for topk in (1, 4))
MAX_LEN = 2048
# Slot 1 + position + 3000 * request pool index: another for each token of each request.
REQ_TO_TOKEN = (1 + torch.arange(MAX_LEN) + 3000 * torch.arange(testing.NUM_SLOTS)[:, None]).to(torch.int32)


def make_row(field: dg.Field, generator: torch.Generator) -> torch.Tensor:
    """Seeds are positions in the sequence, every fifth request's with one beyond it; all else is random bits."""
    if field.name != "seed":
        return testing.random_row(field, generator)
    positions = torch.randint(0, 1000, (field.width,), generator=generator, dtype=torch.int32)
    positions[3] += 5000 * (torch.randint(0, 5, (), generator=generator) == 0)
    return positions


def expected_slots(row: torch.Tensor, request: testing.Request) -> torch.Tensor:
    """The same mapping as plain Python."""
    if any(position < 0 or position >= request.seq_len for position in row.tolist()):
        return torch.full_like(row, -1)
    return torch.tensor([1 + position + 3000 * request.pool_index for position in row.tolist()], dtype=torch.int32)


CONTRACT = testing.Contract(
    seeded.Seeded,
    seeded.fields,
    settings=SETTINGS,
    make_row=make_row,
    expected={"seed": expected_slots},
    batch_extras={"req_to_token": REQ_TO_TOKEN},
)


def test_contract(contract_case):
    """Every case of the contract; none of them is skipped."""
    contract_case.check(CONTRACT)


def test_contract_without_the_plug_in():
    """The same without pytest."""
    assert testing.check(CONTRACT) == {}


def test_a_mapping_that_reads_the_device_fails_the_contract():
    """Guards the contract's last word on this example: a mask as an index, and .any(), are found."""

    def waiting(positions, batch):
        return seeded.map_seeds(positions, batch) if (positions >= 0).any() else positions

    def build(batch, server_args, last_tokens_tensor, future_map):
        return dg.build_disagg_draft_input(
            batch, last_tokens_tensor, future_map, seeded.fields(server_args), post_gather={"seed": waiting}
        )

    with pytest.raises(testing.ContractFailure, match=r"Tensor\.__bool__ in waiting"):
        testing.check_case(replace(CONTRACT, algorithm=build), "no device read")


# Request pool index 2 has 4 tokens in slots 50, 51, 52, 53; index 1 has 2 in slots 70 and 71; row 0 is nobody's.
POOL = torch.tensor([[0, 0, 0, 0, 0], [70, 71, 0, 0, 0], [50, 51, 52, 53, 0]], dtype=torch.int32)
# positions of requests 2 and 1, what becomes of them
MAPPED = {
    "all known": ([[3, 0, 1], [1, 1, 0]], [[53, 50, 51], [71, 71, 70]]),
    "the last token": ([[3, 3, 3], [0, 0, 0]], [[53, 53, 53], [70, 70, 70]]),
    "beyond the sequence": ([[3, 4, 1], [1, 1, 0]], [[-1, -1, -1], [71, 71, 70]]),
    "the other's length": ([[3, 0, 1], [1, 2, 0]], [[53, 50, 51], [-1, -1, -1]]),
    "negative": ([[3, 0, 1], [-1, 1, 0]], [[53, 50, 51], [-1, -1, -1]]),
    "beyond the table": ([[3, 0, 5], [2**31 - 1, 1, 0]], [[-1, -1, -1], [-1, -1, -1]]),
    "the smallest": ([[-(2**31), 0, 1], [1, 1, 0]], [[-1, -1, -1], [71, 71, 70]]),
}


def make_batch(**more) -> SimpleNamespace:
    lengths = torch.tensor([4, 2])
    return SimpleNamespace(req_pool_indices=torch.tensor([2, 1]), seq_lens=lengths, req_to_token=POOL, **more)


@pytest.mark.parametrize("name", MAPPED)
def test_positions_become_slots(name):
    """Guards each way in which a position cannot be mapped: the whole row is -1, the other request's is not."""
    positions, slots = MAPPED[name]
    mapped = seeded.map_seeds(torch.tensor(positions, dtype=torch.int32), make_batch())
    assert mapped.tolist() == slots
    assert mapped.dtype is torch.int32


def test_slots_that_are_not_allocated():
    """Guards stale tables: a token within the sequence whose slot is 0 has none, and the row is blanked."""
    batch = make_batch()
    batch.seq_lens = torch.tensor([5, 9])
    mapped = seeded.map_seeds(torch.tensor([[0, 1, 4], [0, 1, 1]], dtype=torch.int32), batch)
    assert mapped.tolist() == [[-1, -1, -1], [70, 71, 71]]


def test_sequences_that_are_longer_than_the_table():
    """Guards against a read past the table's end, for which a device stops the whole engine."""
    batch = make_batch()
    batch.seq_lens = torch.tensor([9, 2])
    mapped = seeded.map_seeds(torch.tensor([[0, 1, 5], [0, 1, 1]], dtype=torch.int32), batch)
    assert mapped.tolist() == [[-1, -1, -1], [70, 71, 71]]


def prebuilt(seeds) -> dg.ScheduleBatch:
    """A batch of two, run as an engine runs it; the map with a former owner's seeds."""
    seeded.register()
    settings = SimpleNamespace(speculative_eagle_topk=1, draft_hidden_size=2)
    reqs = [
        SimpleNamespace(
            rid=f"r{i}",
            output_ids=[70 + i],
            output_topk_p=torch.full((16,), 0.5),
            output_topk_index=torch.arange(16) + i,
            hidden_states_tensor=torch.full((2,), float(i), dtype=torch.bfloat16),
            **({} if seed is None else {"seed": torch.tensor(seed, dtype=torch.int32)}),
        )
        for i, seed in enumerate(seeds)
    ]
    future_map = dg.FutureMap(seeded.fields(settings), num_slots=8)
    future_map.buffers["seed"].fill_(99)
    future_map.valid["seed"].fill_(True)
    algorithm = dg.SpeculativeAlgorithm.from_string("EAGLE_SEEDED")
    batch = dg.ScheduleBatch(reqs, "cpu", torch.tensor([2, 1]), torch.tensor([4, 2]), algorithm)
    batch.req_to_token = POOL
    batch.process_prebuilt(settings, future_map)
    batch.future_map = future_map
    return batch


def test_prebuilt_batch():
    """The seeds are relayed as slots, blanked where one position is unknown."""
    batch = prebuilt([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 0, 0, 0, 0]])
    expected = [[50, 51, 52, 53, 50, 51, 52, 53], [-1] * 8]
    assert batch.spec_info.extras["seed"].tolist() == expected
    batch.future_map.resolve(batch)
    assert batch.spec_info.extras["seed"].tolist() == expected
    assert batch.spec_info.present == {"seed": True}
    assert batch.spec_info.topk_index.tolist() == [[0], [1]]


def test_one_request_without_a_seed():
    """Guards a mixed batch: it goes on without seeds, for every rank to see, and the former owner's are not read."""
    batch = prebuilt([[0, 1, 2, 3, 0, 1, 2, 3], None])
    assert batch.spec_info.present == {"seed": False}
    assert "seed" not in batch.spec_info.extras
    batch.future_map.resolve(batch)
    assert "seed" not in batch.spec_info.extras
    assert batch.spec_info.valid["seed"].tolist() == [False, False]
    assert batch.spec_info.hidden_states.tolist() == [[0.0, 0.0], [1.0, 1.0]]
