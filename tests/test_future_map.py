"""The relay between iterations: what is published and stashed is what the next iteration resolves."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import draftgather as dg
from helpers import (
    FIELD_LISTS,
    assert_bytes,
    assert_poisoned,
    assert_relayed,
    poisoned_map,
    random_rows,
    relay_tensors,
    relay_to,
    stacked,
)

SEEDED = (dg.Field("hidden_states", 5, torch.float16), dg.Field("seed", 3, torch.int32, optional=True))


def draft_input_of(fields, rows, tokens, indices=None) -> dg.EagleDraftInput:
    """What an iteration stashes: the rows of every field that all of them have."""
    draft_input = dg.EagleDraftInput(bonus_tokens=torch.tensor(tokens, dtype=torch.int64))
    for field in fields:
        if None not in rows[field.name]:
            empty = torch.empty((0, field.width), dtype=field.dtype)
            draft_input.set_rows(field.name, torch.stack(rows[field.name]) if tokens else empty)
        else:
            draft_input.present[field.name] = False
    if indices is not None:
        draft_input.future_indices = torch.tensor(indices, dtype=torch.int64)
    return draft_input


def resolved(future_map, indices, **draft_input) -> SimpleNamespace:
    """A batch of a later iteration, after resolve."""
    spec_info = dg.EagleDraftInput(future_indices=torch.tensor(indices, dtype=torch.int64), **draft_input)
    batch = SimpleNamespace(spec_info=spec_info, seq_lens=None)
    future_map.resolve(batch)
    return batch


def publish_and_stash(future_map, rows, indices, seq_lens, tokens) -> None:
    where = torch.tensor(indices, dtype=torch.int64)
    future_map.publish(where, torch.tensor(seq_lens, dtype=torch.int64))
    future_map.stash(where, draft_input_of(future_map.fields, rows, tokens))


def test_literal(machine):
    """Guards the scatter and the gather by hand-written numbers: rows, lengths and tokens by pool index."""
    fields = (dg.Field("topk_p", 2, torch.float32), dg.Field("topk_index", 2, torch.int64))
    future_map = dg.FutureMap(fields, 5, machine=machine)
    draft_input = dg.EagleDraftInput(
        topk_p=torch.tensor([[0.5, -0.0], [2.0, 1.0]]),
        topk_index=torch.tensor([[11, -12], [21, 2**62]]),
        bonus_tokens=torch.tensor([31, 32]),
    )
    future_map.publish(torch.tensor([4, 1]), torch.tensor([41, 42]))
    future_map.stash(torch.tensor([4, 1]), draft_input)
    assert future_map.new_seq_lens_buf.tolist() == [0, 42, 0, 0, 41]
    assert future_map.output_tokens_buf.tolist() == [0, 32, 0, 0, 31]
    assert future_map.buffers["topk_index"].tolist() == [[0, 0], [21, 2**62], [0, 0], [0, 0], [11, -12]]
    half, minus_zero, two, one = 0x3F000000, -(2**31), 0x40000000, 0x3F800000
    table = future_map.buffers["topk_p"].view(torch.int32).tolist()
    assert table == [[0, 0], [two, one], [0, 0], [0, 0], [half, minus_zero]]

    batch = resolved(future_map, [1, 4])
    assert batch.seq_lens.tolist() == [42, 41]
    assert batch.spec_info.bonus_tokens.tolist() == [32, 31]
    assert batch.spec_info.topk_index.tolist() == [[21, 2**62], [11, -12]]
    assert batch.spec_info.topk_p.view(torch.int32).tolist() == [[two, one], [half, minus_zero]]
    assert batch.spec_info.hidden_states is None


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("which", FIELD_LISTS)
def test_round_trip(machine, which, num_rows):
    """Guards every field list's way through the map: the same bytes come back, and other rows are untouched."""
    fields = FIELD_LISTS[which]
    future_map = poisoned_map(fields, machine=machine)
    rows = random_rows(fields, num_rows, seed=num_rows)
    indices = [31, 1, 17, 8, 2, 30, 5, 9][:num_rows]
    seq_lens, tokens = list(range(100, 100 + num_rows)), list(range(700, 700 + num_rows))
    publish_and_stash(future_map, rows, indices, seq_lens, tokens)
    assert_relayed(future_map, indices, seq_lens, tokens, rows)
    backwards = list(range(num_rows))[::-1]
    batch = resolved(future_map, [indices[i] for i in backwards])
    assert batch.seq_lens.tolist() == seq_lens[::-1]
    assert batch.spec_info.bonus_tokens.tolist() == tokens[::-1]
    for field in fields:
        expected = stacked(field, rows[field.name][::-1], num_rows)
        assert_bytes(batch.spec_info.rows(field.name), expected, field.name)
        if field.optional:
            assert batch.spec_info.valid[field.name].tolist() == [True] * num_rows


def test_publish_alone_and_stash_alone(machine, fields):
    """Guards their different readers: publish writes lengths only, stash everything else."""
    rows = random_rows(fields, 1)
    published, stashed = poisoned_map(fields, machine=machine), poisoned_map(fields, machine=machine)
    published.publish(torch.tensor([3]), torch.tensor([9]))
    others = relay_tensors(published)
    assert others.pop("seq_lens")[3].item() == 9
    assert_poisoned(*others.values())
    stashed.stash(torch.tensor([3]), draft_input_of(fields, rows, [9]))
    assert_poisoned(stashed.new_seq_lens_buf)
    assert stashed.output_tokens_buf[3].item() == 9


def test_int32_indices(machine, fields):
    """Guards int32 indices, lengths and tokens, which some of sglang's tensors are."""
    future_map = poisoned_map(fields, machine=machine)
    rows = random_rows(fields, 2)
    draft_input = draft_input_of(fields, rows, [7, 8])
    draft_input.bonus_tokens = draft_input.bonus_tokens.int()
    indices = torch.tensor([5, 2], dtype=torch.int32)
    future_map.publish(indices, torch.tensor([3, 2**31 - 1], dtype=torch.int32))
    future_map.stash(indices, draft_input)
    assert_relayed(future_map, [5, 2], [3, 2**31 - 1], [7, 8], rows)
    batch = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=indices), seq_lens=None)
    future_map.resolve(batch)
    assert batch.seq_lens.tolist() == [3, 2**31 - 1]


VECTOR_LAYOUTS = {
    "step 2": lambda t: torch.stack([t, torch.full_like(t, 3)], 1).flatten()[::2],
    "offset": lambda t: torch.cat([torch.full_like(t[:1], 3), t])[1:],
}


@pytest.mark.parametrize("layout", VECTOR_LAYOUTS)
@pytest.mark.parametrize("name", ["future_indices", "seq_lens", "bonus_tokens"])
@pytest.mark.parametrize("mode", ["fused", "two calls"])
def test_strided_vectors(machine, fields, mode, name, layout):
    """Guards against an address that is read as if the elements lay one after the other: a column of a table."""
    indices, seq_lens, tokens = [9, 4, 6], [10, 11, 12], [500, 501, 502]
    vectors = {"future_indices": indices, "seq_lens": seq_lens, "bonus_tokens": tokens}
    vectors = {key: torch.tensor(values) for key, values in vectors.items()}
    vectors[name] = VECTOR_LAYOUTS[layout](vectors[name])
    rows = random_rows(fields, 3)
    future_map = poisoned_map(fields, machine=machine)
    if mode == "fused":
        dg.DraftAssembler(fields, machine=machine).assemble_rows(relay=dg.Relay(future_map, **vectors), **rows)
    else:
        draft_input = draft_input_of(fields, rows, tokens)
        draft_input.bonus_tokens = vectors["bonus_tokens"]
        future_map.publish(vectors["future_indices"], vectors["seq_lens"])
        future_map.stash(vectors["future_indices"], draft_input)
    assert_relayed(future_map, indices, seq_lens, tokens, rows)
    batch = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=vectors["future_indices"]), seq_lens=None)
    future_map.resolve(batch)
    assert batch.seq_lens.tolist() == seq_lens
    assert_bytes(batch.spec_info.hidden_states, stacked(fields[2], rows["hidden_states"], 3))


SLICES = {
    "step 2": lambda t: t[:3, :48:2],
    "first columns": lambda t: t[:3, :24],
    "transposed": lambda t: t.T[:3, :24],
    "expanded": lambda t: t[:1, :24].expand(3, 24),
    "one row": lambda t: t[1:2, 1:49:2],
    "one element": lambda t: t[1:2, 1:3:2],
}


@pytest.mark.parametrize("which", SLICES)
def test_stash_of_strided_rows(machine, which):
    """Guards a draft input whose tensors are slices of bigger ones: the rows count, not what lies between."""
    rows = SLICES[which](torch.arange(48 * 50, dtype=torch.int16).view(48, 50))
    field = dg.Field("hidden_states", rows.shape[1], torch.int16)
    indices = [3, 1, 2][: len(rows)]
    future_map = poisoned_map([field], machine=machine)
    draft_input = dg.EagleDraftInput(hidden_states=rows, bonus_tokens=torch.arange(len(rows)))
    future_map.stash(torch.tensor(indices), draft_input)
    assert future_map.buffers["hidden_states"][indices].tolist() == rows.tolist()


def test_stash_of_rows_with_gradients(machine):
    """Guards a draft model that is run without no_grad: its rows are rows like others."""
    field = dg.Field("hidden_states", 4, torch.float32)
    hidden_states = torch.ones(2, 4, requires_grad=True)
    future_map = poisoned_map([field], machine=machine)
    future_map.stash(
        torch.tensor([3, 1]), dg.EagleDraftInput(hidden_states=hidden_states, bonus_tokens=torch.arange(2))
    )
    assert future_map.buffers["hidden_states"][[3, 1]].tolist() == [[1.0] * 4] * 2
    assert not future_map.buffers["hidden_states"].requires_grad


# -- indices


BAD_INDICES = {
    "minus one": ([3, -1], "future index -1 is out of range, expected 0 to 31"),
    "too large": ([32, 3], "future index 32 is out of range, expected 0 to 31"),
    "repeated": ([4, 5, 4], r"future index 4 is given for rows \[0, 2\]"),
}


def calls_of(future_map, fields, machine, indices):
    """Every way to write by these indices."""
    rows = random_rows(fields, len(indices))
    tokens = list(range(len(indices)))
    where = torch.tensor(indices)
    assembler = dg.DraftAssembler(fields, machine=machine)
    return {
        "publish": lambda: future_map.publish(where, torch.tensor(tokens)),
        "stash": lambda: future_map.stash(where, draft_input_of(fields, rows, tokens)),
        "fused": lambda: assembler.assemble_rows(relay=relay_to(future_map, indices), **rows),
    }


@pytest.mark.parametrize("bad", BAD_INDICES)
@pytest.mark.parametrize("call", ["publish", "stash", "fused"])
def test_bad_indices_are_refused(machine, fields, call, bad):
    """Guards against -1 writing the last row, writes outside the map, and one row over another."""
    indices, message = BAD_INDICES[bad]
    future_map = poisoned_map(fields, machine=machine)
    with pytest.raises(dg.RelayError, match=message):
        calls_of(future_map, fields, machine, indices)[call]()
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("call", ["publish", "stash", "fused"])
def test_padding_slot_may_repeat(machine, fields, call):
    """Guards padded batches: slot 0 is the sink, and may be given many times."""
    future_map = poisoned_map(fields, machine=machine)
    calls_of(future_map, fields, machine, [0, 4, 0])[call]()
    assert_poisoned(*(table[[i for i in range(1, 32) if i != 4]] for table in relay_tensors(future_map).values()))


def test_host_copy_of_the_indices_is_checked(machine, fields):
    """Guards indices on a device: with a host copy of them duplicates are refused there as well."""
    future_map = poisoned_map(fields, machine=machine)
    relay = relay_to(future_map, [4, 5])
    relay = dg.Relay(future_map, relay.future_indices, relay.seq_lens, relay.bonus_tokens, torch.tensor([4, 4]))
    with pytest.raises(dg.RelayError, match=r"future index 4 is given for rows \[0, 1\]"):
        dg.DraftAssembler(fields, machine=machine).assemble_rows(relay=relay, **random_rows(fields, 2))
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("index", [-1, 32])
def test_host_copy_of_other_indices(machine, fields, index):
    """Guards against a host copy that vouches for other indices: refused or left out, but no other row written."""
    future_map = poisoned_map(fields, machine=machine)
    relay = relay_to(future_map, [index])
    relay = dg.Relay(future_map, relay.future_indices, relay.seq_lens, relay.bonus_tokens, torch.tensor([4]))
    with suppress(dg.RelayError):
        dg.DraftAssembler(fields, machine=machine).assemble_rows(relay=relay, **random_rows(fields, 1))
    assert_poisoned(*relay_tensors(future_map).values())


# In a batch of 700: where an index is bad, and what it is instead.
BAD_IN_MANY = {"last repeats first": (699, 1), "negative": (350, -1), "too large": (0, 1000)}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", BAD_IN_MANY)
def test_bad_index_in_a_large_batch(bad, dtype):
    """Guards the same checks where the batch is large, and they go another way."""
    fields = (dg.Field("a", 1, torch.int64),)
    position, index = BAD_IN_MANY[bad]
    indices = torch.arange(1, 701, dtype=dtype)
    future_map = poisoned_map(fields, 1000)
    rows = {"a": list(torch.arange(700)[:, None])}
    assembler = dg.DraftAssembler(fields, max_batch_size=1000)
    bad_indices = indices.clone()
    bad_indices[position] = index
    with pytest.raises(dg.RelayError, match=rf"future index {index} is"):
        assembler.assemble_rows(relay=dg.Relay(future_map, bad_indices, indices, indices), **rows)
    assert_poisoned(*relay_tensors(future_map).values())
    assembler.assemble_rows(relay=dg.Relay(future_map, indices, indices, indices), **rows)
    assert future_map.buffers["a"][1:701, 0].tolist() == list(range(700))
    assert future_map.new_seq_lens_buf[1:701].tolist() == list(range(1, 701))
    padded = torch.cat([indices, torch.zeros(5, dtype=dtype)])
    future_map.publish(padded, padded)


@pytest.mark.parametrize("indices", [[-1], [3, 32]])
def test_resolve_out_of_range(machine, fields, indices):
    """Guards against reading outside the map, and against -1 reading the last row."""
    future_map = dg.FutureMap(fields, 32, machine=machine)
    with pytest.raises(dg.RelayError, match=r"out of range, expected 0 to 31"):
        resolved(future_map, indices)


def test_resolve_may_repeat(machine, fields):
    """Guards padded decode batches: reading one row twice is fine."""
    future_map = dg.FutureMap(fields, 32, machine=machine)
    rows = random_rows(fields, 1)
    publish_and_stash(future_map, rows, [4], [9], [8])
    batch = resolved(future_map, [4, 0, 4])
    assert batch.seq_lens.tolist() == [9, 0, 9]
    twice = batch.spec_info.hidden_states[[0, 2]]
    assert_bytes(twice, stacked(fields[2], rows["hidden_states"] * 2, 2))


BAD_VECTORS = {
    "list": [1, 2],
    "length": torch.tensor([1, 2, 3]),
    "rank": torch.tensor([[1, 2]]),
    "scalar": torch.tensor(1),
    "dtype": torch.tensor([1.0, 2.0]),
    "bool": torch.tensor([True, False]),
    "device": torch.zeros(2, dtype=torch.int64, device="meta"),
}


@pytest.mark.parametrize("bad", BAD_VECTORS)
@pytest.mark.parametrize("name", ["future_indices", "seq_lens", "bonus_tokens"])
def test_bad_vectors_are_refused(machine, fields, name, bad):
    """Guards against a length or token that is broadcast, cut down or of another request."""
    future_map = poisoned_map(fields, machine=machine)
    rows = random_rows(fields, 2)
    vectors = {key: torch.tensor([1, 2]) for key in ("future_indices", "seq_lens", "bonus_tokens")}
    vectors[name] = BAD_VECTORS[bad]
    with pytest.raises(dg.RelayError, match=r"expected"):
        dg.DraftAssembler(fields, machine=machine).assemble_rows(relay=dg.Relay(future_map, **vectors), **rows)
    draft_input = draft_input_of(fields, rows, [1, 2])
    draft_input.bonus_tokens = vectors["bonus_tokens"]
    if name != "bonus_tokens":
        with pytest.raises(dg.RelayError, match=r"expected"):
            future_map.publish(vectors["future_indices"], vectors["seq_lens"])
    if name != "seq_lens":
        with pytest.raises(dg.RelayError, match=r"expected"):
            future_map.stash(vectors["future_indices"], draft_input)
    assert_poisoned(*relay_tensors(future_map).values())


# -- shapes, dtypes, devices


BAD_TENSORS = {
    "one wide": torch.zeros(2, 1, dtype=torch.bfloat16),
    "wider": torch.zeros(2, 25, dtype=torch.bfloat16),
    "one row": torch.zeros(1, 24, dtype=torch.bfloat16),
    "one vector": torch.zeros(24, dtype=torch.bfloat16),
    "float32": torch.zeros(2, 24),
    "meta": torch.zeros(2, 24, dtype=torch.bfloat16, device="meta"),
    "missing": None,
    "list": [[0.0] * 24] * 2,
}


@pytest.mark.parametrize("bad", BAD_TENSORS)
def test_stash_never_broadcasts(machine, fields, bad):
    """Guards against one row, or one column, spread over all: another shape, dtype or device is refused."""
    future_map = poisoned_map(fields, machine=machine)
    draft_input = draft_input_of(fields, random_rows(fields, 2), [1, 2])
    draft_input.hidden_states = BAD_TENSORS[bad]
    with pytest.raises(dg.RelayError, match=r"hidden_states is .*expected"):
        future_map.stash(torch.tensor([1, 2]), draft_input)
    assert_poisoned(*relay_tensors(future_map).values())


OTHER_FIELDS = {
    "width": (dg.eagle_fields(4, 25), "hidden_states: the rows are 24 torch.bfloat16, the future map's 25"),
    "dtype": (dg.eagle_fields(4, 24, torch.float16), "the future map's 24 torch.float16"),
    "topk": (dg.eagle_fields(8, 24), "topk_p: the rows are 4 torch.float32, the future map's 8"),
    "more": ((*dg.eagle_fields(4, 24), dg.Field("seed", 1, torch.int8)), "relays 'seed', which is not one of"),
}


@pytest.mark.parametrize("other", OTHER_FIELDS)
@pytest.mark.parametrize("num_rows", [0, 2])
def test_fused_launch_into_another_map_is_refused(machine, fields, other, num_rows):
    """Guards against rows cut or widened to the map's: refused, also when the batch happens to be empty."""
    map_fields, message = OTHER_FIELDS[other]
    future_map = poisoned_map(map_fields, machine=machine)
    assembler = dg.DraftAssembler(fields, machine=machine)
    relay = relay_to(future_map, range(1, num_rows + 1))
    with pytest.raises(dg.RelayError, match=message):
        assembler.assemble_rows(relay=relay, **random_rows(fields, num_rows))
    assert_poisoned(*relay_tensors(future_map).values())


def test_optional_for_the_rows_only(machine):
    """Guards against an absent seed that the map has no way to mark."""
    strict = (SEEDED[0], dg.Field("seed", 3, torch.int32))
    future_map = poisoned_map(strict, machine=machine)
    with pytest.raises(dg.RelayError, match="seed is optional for the rows, but not for the future map"):
        dg.DraftAssembler(SEEDED, machine=machine).assemble_rows(
            relay=relay_to(future_map, [1]), **random_rows(SEEDED, 1)
        )
    assert_poisoned(*relay_tensors(future_map).values())


def test_map_of_fewer_fields(machine, fields):
    """Guards a map that relays a part of the row: the rest goes to the batch only."""
    future_map = poisoned_map(fields[1:2], machine=machine)
    rows = random_rows(fields, 2)
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(relay=relay_to(future_map, [7, 3]), **rows)
    assert_relayed(future_map, [7, 3], [10, 11], [500, 501], rows)
    assert_bytes(batch.tensors["hidden_states"], stacked(fields[2], rows["hidden_states"], 2))


def test_one_assembler_two_maps(machine, fields):
    """Guards against the tables of the first map remembered for the second."""
    assembler = dg.DraftAssembler(fields, machine=machine)
    maps = [poisoned_map(fields, machine=machine) for _ in range(2)]
    rows = [random_rows(fields, 1, seed) for seed in range(2)]
    for future_map, given in zip(maps, rows, strict=True):
        assembler.assemble_rows(relay=relay_to(future_map, [5]), **given)
    for future_map, given in zip(maps, rows, strict=True):
        assert_relayed(future_map, [5], [10], [500], given)


def test_map_on_another_device(fields):
    """Guards against a map that the launch cannot reach."""
    future_map = dg.FutureMap(fields, 4)
    future_map.device = torch.device("cuda", 1)
    with pytest.raises(dg.RelayError, match="future map is on cuda:1, the assembler on cpu"):
        dg.DraftAssembler(fields).assemble_rows(relay=relay_to(future_map, [1]), **random_rows(fields, 1))


# -- optional fields


@pytest.mark.parametrize("mode", ["fused", "two calls"])
def test_absent_field_is_not_the_former_owners(machine, mode):
    """Guards against the former owner's seed in a reused row: invalid at once, and None where the batch says absent."""
    future_map = dg.FutureMap(SEEDED, 8, machine=machine)
    former, later = random_rows(SEEDED, 2), random_rows(SEEDED, 2, seed=1)
    publish_and_stash(future_map, former, [3, 4], [1, 1], [1, 1])
    assert future_map.valid["seed"].tolist() == [False, False, False, True, True, False, False, False]
    later["seed"] = [None, None]
    if mode == "fused":
        batch = dg.DraftAssembler(SEEDED, machine=machine).assemble_rows(relay=relay_to(future_map, [3, 5]), **later)
        assert not batch.present["seed"]
        present = dict(batch.present)
    else:
        publish_and_stash(future_map, later, [3, 5], [1, 1], [1, 1])
        present = {"seed": False}
    assert future_map.valid["seed"].tolist() == [False, False, False, False, True, False, False, False]
    batch = resolved(future_map, [5, 3], present=present)
    assert batch.spec_info.rows("seed") is None
    assert batch.spec_info.valid["seed"].tolist() == [False, False]
    batch = resolved(future_map, [4, 3])
    assert batch.spec_info.valid["seed"].tolist() == [True, False]


def test_validity_is_per_row(machine):
    """Guards one launch in which some rows have a seed and others have none."""
    rows = random_rows(SEEDED, 4)
    rows["seed"][0] = rows["seed"][2] = None
    future_map = poisoned_map(SEEDED, machine=machine)
    batch = dg.DraftAssembler(SEEDED, machine=machine).assemble_rows(relay=relay_to(future_map, [6, 2, 9, 1]), **rows)
    assert_relayed(future_map, [6, 2, 9, 1], [10, 11, 12, 13], [500, 501, 502, 503], rows)
    assert not batch.present["seed"]
    batch = resolved(future_map, [1, 6, 2])
    assert batch.spec_info.valid["seed"].tolist() == [True, False, True]
    assert_bytes(batch.spec_info.rows("seed")[[0, 2]], stacked(SEEDED[1], [rows["seed"][3], rows["seed"][1]], 2))


def test_valid_again_after_a_new_owner_brings_it(machine):
    """Guards against a validity that sticks at False."""
    future_map = dg.FutureMap(SEEDED, 4, machine=machine)
    absent = {**random_rows(SEEDED, 1), "seed": [None]}
    publish_and_stash(future_map, absent, [1], [1], [1])
    publish_and_stash(future_map, random_rows(SEEDED, 1), [1], [1], [1])
    assert future_map.valid["seed"].tolist() == [False, True, False, False]


# -- debug, empty, merged


def test_debug_consumes_once(machine, fields):
    """Guards against a row that is resolved twice, never published, or never stashed: each names its index."""
    future_map = dg.FutureMap(fields, 8, debug=True, machine=machine)
    rows = random_rows(fields, 2)
    with pytest.raises(dg.RelayError, match=r"future indices \[3\] were resolved without"):
        resolved(future_map, [3])
    publish_and_stash(future_map, rows, [3, 4], [5, 0], [6, 0])
    batch = resolved(future_map, [4, 3, 0])
    assert batch.seq_lens.tolist()[:2] == [0, 5]
    with pytest.raises(dg.RelayError, match=r"future indices \[4\]"):
        resolved(future_map, [4])
    future_map.publish(torch.tensor([3]), torch.tensor([5]))
    with pytest.raises(dg.RelayError, match=r"future indices \[3\]"):
        resolved(future_map, [3])
    future_map.stash(torch.tensor([4]), draft_input_of(fields, random_rows(fields, 1), [5]))
    with pytest.raises(dg.RelayError, match=r"future indices \[4\]"):
        resolved(future_map, [4])


def test_without_debug_a_row_may_be_read_again(machine, fields):
    """Guards against the poison of the debug mode in normal use."""
    future_map = dg.FutureMap(fields, 8, machine=machine)
    publish_and_stash(future_map, random_rows(fields, 1), [3], [5], [6])
    assert [resolved(future_map, [3]).seq_lens.tolist() for _ in range(2)] == [[5], [5]]


def test_empty_batch(machine, fields):
    """Guards an idle rank: nothing is written or launched, and resolve leaves the typed empty tensors."""
    future_map = poisoned_map(fields, machine=machine)
    publish_and_stash(future_map, {field.name: [] for field in fields}, [], [], [])
    batch = SimpleNamespace(spec_info=dg.EagleDraftInput(future_indices=torch.empty(0, dtype=torch.int64)), seq_lens=1)
    future_map.resolve(batch)
    future_map.resolve(SimpleNamespace(spec_info=None))
    future_map.resolve(SimpleNamespace(spec_info=dg.EagleDraftInput()))
    assert batch.seq_lens == 1
    assert_poisoned(*relay_tensors(future_map).values())


def test_rows_stay_aligned_through_filter_and_merge(machine, fields):
    """Guards against a row of another request after the batch changed between stash and resolve."""
    future_map = dg.FutureMap(fields, 32, machine=machine)
    first, second = random_rows(fields, 4, seed=1), random_rows(fields, 3, seed=2)
    publish_and_stash(future_map, first, [9, 3, 12, 4], [10, 11, 12, 13], [20, 21, 22, 23])
    publish_and_stash(future_map, second, [1, 30, 8], [30, 31, 32], [40, 41, 42])
    running = draft_input_of(fields, first, [20, 21, 22, 23], [9, 3, 12, 4])
    arriving = draft_input_of(fields, second, [40, 41, 42], [1, 30, 8])
    running.filter_batch(torch.tensor([3, 1]))
    arriving.filter_batch(torch.tensor([True, False, True]))
    running.merge_batch(arriving)
    batch = SimpleNamespace(spec_info=running, seq_lens=None)
    future_map.resolve(batch)
    assert batch.seq_lens.tolist() == [13, 11, 30, 32]
    assert running.bonus_tokens.tolist() == [23, 21, 40, 42]
    for field in fields:
        a, b = first[field.name], second[field.name]
        assert_bytes(running.rows(field.name), stacked(field, [a[3], a[1], b[0], b[2]], 4), field.name)


def test_resolved_tensors_are_the_batchs_own(machine, fields):
    """Guards against a resolved batch that changes when the map or a later resolve is written."""
    future_map = dg.FutureMap(fields, 8, machine=machine)
    rows = random_rows(fields, 1, seed=1)
    publish_and_stash(future_map, rows, [3], [5], [6])
    batch = resolved(future_map, [3])
    publish_and_stash(future_map, random_rows(fields, 1, seed=2), [3], [50], [60])
    resolved(future_map, [3])
    assert (batch.seq_lens.tolist(), batch.spec_info.bonus_tokens.tolist()) == ([5], [6])
    for field in fields:
        assert_bytes(batch.spec_info.rows(field.name), stacked(field, rows[field.name], 1), field.name)


def test_buffers_keep_their_addresses(machine, fields):
    """Guards consumers that captured the map's addresses."""
    future_map = dg.FutureMap(fields, 8, machine=machine)
    addresses = [table.data_ptr() for table in relay_tensors(future_map).values()]
    for turn in range(3):
        publish_and_stash(future_map, random_rows(fields, 2, turn), [turn, 4], [1, 2], [3, 4])
        resolved(future_map, [4, turn])
    assert [table.data_ptr() for table in relay_tensors(future_map).values()] == addresses


def test_map_without_fields(machine):
    """Guards DFLASH: a map of lengths and tokens only."""
    future_map = dg.FutureMap((), 4, machine=machine)
    publish_and_stash(future_map, {}, [2, 1], [20, 10], [21, 11])
    batch = resolved(future_map, [1, 2])
    assert batch.seq_lens.tolist() == [10, 20]
    assert batch.spec_info.bonus_tokens.tolist() == [11, 21]


@pytest.mark.parametrize("num_slots", [1, 0, -3, 2.0, True])
def test_number_of_slots(fields, num_slots):
    """Guards against a map with no slot beside the padding sink."""
    with pytest.raises(ValueError, match="num_slots"):
        dg.FutureMap(fields, num_slots)


def test_field_names_repeat():
    """Guards against one buffer for two fields."""
    with pytest.raises(ValueError, match="repeat"):
        dg.FutureMap([dg.Field("a", 1, torch.int8)] * 2, 4)


def test_foreign_draft_input(machine):
    """Guards draft inputs of other classes: bonus_tokens and an attribute a field are all that stash needs."""
    field = dg.Field("anything", 3, torch.int16)
    future_map = dg.FutureMap([field], 4, machine=machine)
    foreign = SimpleNamespace(
        bonus_tokens=torch.tensor([9]),
        anything=torch.tensor([[1, 2, 3]], dtype=torch.int16),
        future_indices=torch.tensor([2]),
    )
    future_map.stash(torch.tensor([2]), foreign)
    foreign.anything = None
    future_map.resolve(SimpleNamespace(spec_info=foreign))
    assert foreign.anything.tolist() == [[1, 2, 3]]
    assert np.array_equal(future_map.buffers["anything"][2], [1, 2, 3])
