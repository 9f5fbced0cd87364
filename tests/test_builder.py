"""The builder of sglang's name and call shape: requests in, an EAGLE draft input and relay rows out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import draftgather as dg
import draftgather.builder as builder
import draftgather.draft_assembler as draft_assembler
from helpers import (
    FakeMarker,
    assert_bytes,
    assert_poisoned,
    assert_relayed,
    make_request,
    make_settings,
    poisoned_map,
    random_rows,
    raw,
    relay_tensors,
    row_of,
    stacked,
)

HIDDEN = 24
METADATA = 16  # sglang's top-k rows are 16 wide, whatever the top-k


@pytest.fixture(autouse=True)
def _no_mailbox():
    """The builder's mailbox is the process's: none before and after each test."""
    dg.use_mailbox(None)
    yield
    dg.use_mailbox(None)


def metadata_rows(num_rows: int, hidden_dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    """Rows as sglang's metadata buffers hold them."""
    return random_rows(
        (
            dg.Field("topk_p", METADATA, torch.float32),
            dg.Field("topk_index", METADATA, torch.int64),
            dg.Field("hidden_states", HIDDEN, hidden_dtype),
        ),
        num_rows,
        seed,
    )


def make_batch(rows, overlap: bool = True, **of_request) -> SimpleNamespace:
    """A prebuilt batch: request i has pool index 3 i + 2, length 10 + i and bonus token 500 + i."""
    num_rows = len(rows["topk_p"])
    reqs = [
        make_request(f"r{i}", row_of(rows, i), **{name: values[i] for name, values in of_request.items()})
        for i in range(num_rows)
    ]
    count = torch.arange(num_rows)
    return SimpleNamespace(
        reqs=reqs, device="cpu", enable_overlap=overlap, req_pool_indices=3 * count + 2, seq_lens=10 + count
    )


def build(batch, future_map, **settings) -> dg.EagleDraftInput:
    tokens = 500 + torch.arange(len(batch.reqs))
    return dg.build_eagle_disagg_draft_input(batch, make_settings(**settings), tokens, future_map)


def expected_stacks(rows, num_states: int) -> dict[str, torch.Tensor]:
    """What a decode node did before: slice every row, and torch.stack."""
    if not rows["topk_p"]:
        return {
            "topk_p": torch.empty(0, num_states),
            "topk_index": torch.empty(0, num_states, dtype=torch.int64),
            "hidden_states": torch.empty(0, HIDDEN, dtype=torch.bfloat16),
        }
    return {
        "topk_p": torch.stack([row[:num_states] for row in rows["topk_p"]]),
        "topk_index": torch.stack([row[:num_states] for row in rows["topk_index"]]),
        "hidden_states": torch.stack(rows["hidden_states"]),
    }


CONFIGURATIONS = {
    "topk 1": {"topk": 1},
    "topk 4": {"topk": 4},
    "topk 8": {"topk": 8},
    "steps without layers": {"topk": 4, "steps": 3},
    "3 layers": {"topk": 4, "steps": 3, "multi_layer": True},
    "16 states": {"topk": 8, "steps": 2, "multi_layer": True},
}


@pytest.mark.parametrize("num_rows", [0, 1, 3, 64])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_equals_torch_stack(configuration, overlap, num_rows):
    """Guards the drop-in: the same tensors as slices and torch.stack, and under overlap the same relay rows."""
    settings = CONFIGURATIONS[configuration]
    num_states = settings["topk"] * (settings["steps"] if settings.get("multi_layer") else 1)
    rows = metadata_rows(num_rows)
    future_map = poisoned_map(dg.eagle_fields(num_states, HIDDEN), 200)
    batch = make_batch(rows, overlap)
    draft_input = build(batch, future_map, **settings)
    expected = expected_stacks(rows, num_states)
    for name, tensor in expected.items():
        got = getattr(draft_input, name)
        assert (got.dtype, got.shape, got.device) == (tensor.dtype, tensor.shape, tensor.device)
        assert_bytes(got, raw(tensor), name)
    assert draft_input.bonus_tokens.tolist() == [500 + i for i in range(num_rows)]
    assert draft_input.capture_hidden_mode is dg.CaptureHiddenMode.LAST
    if not overlap:
        assert draft_input.future_indices is None
        assert_poisoned(*relay_tensors(future_map).values())
        return
    assert draft_input.future_indices is batch.req_pool_indices
    count = range(num_rows)
    relayed = {name: list(tensor) for name, tensor in expected.items()}
    assert_relayed(future_map, [3 * i + 2 for i in count], [10 + i for i in count], [500 + i for i in count], relayed)


def test_without_overlap_no_map_is_needed_or_touched():
    """Guards batches with overlap off: the map may be None, or an object that allows nothing."""
    rows = metadata_rows(2)
    for future_map in (None, object()):
        draft_input = build(make_batch(rows, overlap=False), future_map)
        assert draft_input.future_indices is None
        assert_bytes(draft_input.topk_index, raw(expected_stacks(rows, 4)["topk_index"]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_hidden_dtype_of_the_rows_without_a_map(dtype):
    """Guards width and dtype where only the rows tell them: with overlap off and no map."""
    rows = metadata_rows(2, dtype)
    draft_input = build(make_batch(rows, overlap=False), None)
    assert_bytes(draft_input.hidden_states, raw(torch.stack(rows["hidden_states"])))
    assert draft_input.hidden_states.dtype is dtype


def test_settings_are_read_at_each_call():
    """Guards adaptive settings: another top-k, then more steps, on the next call of one process."""
    rows = metadata_rows(2)
    batch = make_batch(rows, overlap=False)
    settings = make_settings(topk=1)
    widths = []
    for change in ({}, {"speculative_eagle_topk": 4}, {"speculative_num_steps": 3}, {"enable_multi_layer_eagle": True}):
        vars(settings).update(change)
        draft_input = dg.build_eagle_disagg_draft_input(batch, settings, torch.tensor([1, 2]), None)
        widths.append(draft_input.topk_p.shape[1])
        assert_bytes(draft_input.topk_p, raw(expected_stacks(rows, widths[-1])["topk_p"]))
    assert widths == [1, 4, 4, 12]


def test_one_assembler_a_configuration():
    """Guards against an assembler made anew for each batch."""
    rows = metadata_rows(2)
    for _ in range(3):
        build(make_batch(rows, overlap=False), None, topk=4)
    assert builder.eagle_rows.cache_info().currsize == 1
    build(make_batch(rows, overlap=False), None, topk=1)
    assert builder.eagle_rows.cache_info().currsize == 2


def test_larger_batch_than_any_before():
    """Guards a batch of more than 512: the builder's assembler grows with it."""
    rows = metadata_rows(600)
    draft_input = build(make_batch(rows, overlap=False), None, topk=1)
    assert_bytes(draft_input.hidden_states, raw(torch.stack(rows["hidden_states"])))


# -- refusals: the class, the request and the numbers; and the map untouched


def test_more_states_than_a_row_holds():
    """Guards a read past the metadata row, into the next request's."""
    future_map = poisoned_map(dg.eagle_fields(20, HIDDEN))
    with pytest.raises(
        dg.RowShapeError, match=r"request 'r0': topk_p has shape \(16,\), expected \(20,\) or wider"
    ) as error:
        build(make_batch(metadata_rows(2)), future_map, topk=5, steps=4, multi_layer=True)
    assert len(error.value.problems) == 4
    assert_poisoned(*relay_tensors(future_map).values())


BAD_REQUESTS = {
    "no probabilities": ("topk_p", None, dg.MissingRowError, "topk_p is missing"),
    "no hidden state": ("hidden_states", None, dg.MissingRowError, "hidden_states is missing"),
    "other width": (
        "hidden_states",
        torch.zeros(25, dtype=torch.bfloat16),
        dg.RowShapeError,
        r"\(25,\), expected \(24,\)",
    ),
    "wide hidden": ("hidden_states", torch.zeros(72, dtype=torch.bfloat16), dg.RowShapeError, "three times"),
    "other dtype": ("hidden_states", torch.zeros(24), dg.RowDtypeError, "torch.float32, expected torch.bfloat16"),
    "ids as floats": ("topk_index", torch.zeros(16), dg.RowDtypeError, "torch.float32, expected torch.int64"),
}


@pytest.mark.parametrize("bad", BAD_REQUESTS)
@pytest.mark.parametrize("position", [0, 2])
def test_bad_requests(bad, position):
    """Guards every request's row, the first as the last: named, and nothing relayed."""
    name, value, error_class, message = BAD_REQUESTS[bad]
    rows = metadata_rows(3)
    rows[name][position] = value
    future_map = poisoned_map(dg.eagle_fields(4, HIDDEN))
    with pytest.raises(error_class, match=f"request 'r{position}': .*{message}") as error:
        build(make_batch(rows), future_map)
    assert [problem.position for problem in error.value.problems] == [position]
    assert_poisoned(*relay_tensors(future_map).values())


def test_request_without_the_attributes():
    """Guards a request object that never had the rows: missing, and not an AttributeError."""
    batch = make_batch(metadata_rows(1))
    del batch.reqs[0].output_topk_p
    with pytest.raises(dg.MissingRowError, match="request 'r0': topk_p is missing"):
        build(batch, dg.FutureMap(dg.eagle_fields(4, HIDDEN), 8))


@pytest.mark.parametrize("num_rows", [0, 2])
def test_map_of_another_width(num_rows):
    """Guards a map of another top-k: refused and never broadcast, where there are rows to relay."""
    future_map = poisoned_map(dg.eagle_fields(1, HIDDEN))
    batch = make_batch(metadata_rows(num_rows))
    if num_rows:
        with pytest.raises(dg.RelayError, match=r"topk_p: the rows are 4 torch.float32, the future map's 1"):
            build(batch, future_map, topk=4)
    else:
        assert build(batch, future_map, topk=4).topk_p.shape == (0, 4)
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("name", ["req_pool_indices", "seq_lens"])
def test_vectors_of_another_length(name):
    """Guards lengths and indices that are another batch's."""
    future_map = poisoned_map(dg.eagle_fields(4, HIDDEN))
    batch = make_batch(metadata_rows(2))
    setattr(batch, name, torch.tensor([1, 2, 3]))
    with pytest.raises(dg.RelayError, match=r"has shape \(3,\), expected \(2,\)"):
        build(batch, future_map)
    assert_poisoned(*relay_tensors(future_map).values())


# -- another's future map


class ForeignMap:
    """sglang's own map, as far as the builder may know it: publish and stash."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple]] = []

    def publish(self, *arguments) -> None:
        self.calls.append(("publish", arguments))

    def stash(self, *arguments) -> None:
        self.calls.append(("stash", arguments))


@pytest.mark.parametrize("num_rows", [0, 2])
def test_foreign_map(num_rows):
    """Guards sglang's own fence: exactly publish, then stash, with the batch's own tensors."""
    rows = metadata_rows(num_rows)
    batch, future_map = make_batch(rows), ForeignMap()
    draft_input = build(batch, future_map)
    assert [name for name, _ in future_map.calls] == ["publish", "stash"]
    (published_at, seq_lens), (stashed_at, stashed) = (arguments for _, arguments in future_map.calls)
    assert published_at is stashed_at is draft_input.future_indices is batch.req_pool_indices
    assert seq_lens is batch.seq_lens
    assert stashed is draft_input
    if num_rows:
        for name, tensor in expected_stacks(rows, 4).items():
            assert_bytes(getattr(stashed, name), raw(tensor), name)


def test_foreign_map_and_bad_rows():
    """Guards sglang's map from a publish without its stash: the rows are checked before either."""
    rows = metadata_rows(2)
    rows["topk_index"][1] = None
    future_map = ForeignMap()
    with pytest.raises(dg.MissingRowError, match="request 'r1'"):
        build(make_batch(rows), future_map)
    assert not future_map.calls


def test_foreign_map_outside_overlap():
    """Guards overlap off: sglang's map is not called at all."""
    future_map = ForeignMap()
    build(make_batch(metadata_rows(2), overlap=False), future_map)
    assert not future_map.calls


# -- rows in the mailbox


def mailbox_with(rows, fields=None) -> tuple[dg.DraftMailbox, list[int]]:
    """Row i in slot 7 - i, of owner 100 + i."""
    mailbox = dg.DraftMailbox(fields or dg.eagle_fields(4, HIDDEN), 8, pin_memory=False)
    slots = [7 - i for i in range(len(rows["topk_p"]))]
    for i, slot in enumerate(slots):
        row = row_of(rows, i)
        width = mailbox.fields[0].width
        mailbox.put(slot, 100 + i, **{**row, "topk_p": row["topk_p"][:width], "topk_index": row["topk_index"][:width]})
    dg.use_mailbox(mailbox)
    return mailbox, slots


NO_ROWS = {"topk_p": [None] * 3, "topk_index": [None] * 3, "hidden_states": [None] * 3}
OTHER_MAILBOXES = {
    "same": dg.eagle_fields(4, HIDDEN),
    "metadata wide": (
        dg.Field("topk_p", METADATA, torch.float32),
        dg.Field("topk_index", METADATA, torch.int64),
        dg.Field("hidden_states", HIDDEN, torch.bfloat16),
    ),
}


@pytest.mark.parametrize("which", OTHER_MAILBOXES)
@pytest.mark.parametrize("overlap", [True, False])
def test_requests_with_a_slot(which, overlap):
    """Guards the mailbox route: requests bring a slot and nothing else, the records may be wider."""
    rows = metadata_rows(3)
    _, slots = mailbox_with(rows, OTHER_MAILBOXES[which])
    future_map = poisoned_map(dg.eagle_fields(4, HIDDEN))
    batch = make_batch(NO_ROWS, overlap, draft_slot=slots, draft_owner=[100, 101, 102])
    draft_input = build(batch, future_map if overlap else None)
    expected = expected_stacks(rows, 4)
    for name, tensor in expected.items():
        assert_bytes(getattr(draft_input, name), raw(tensor), name)
    if overlap:
        relayed = {name: list(tensor) for name, tensor in expected.items()}
        assert_relayed(future_map, [2, 5, 8], [10, 11, 12], [500, 501, 502], relayed)


def test_mixed_batch():
    """Guards a batch in which one request fell back to its own copies: each row is its request's."""
    rows = metadata_rows(3)
    _, slots = mailbox_with(rows)
    own = {name: [None, given[1], None] for name, given in rows.items()}
    batch = make_batch(own, draft_slot=[slots[0], None, slots[2]], draft_owner=[100, None, 102])
    future_map = poisoned_map(dg.eagle_fields(4, HIDDEN))
    draft_input = build(batch, future_map)
    expected = expected_stacks(rows, 4)
    for name, tensor in expected.items():
        assert_bytes(getattr(draft_input, name), raw(tensor), name)
    relayed = {name: list(tensor) for name, tensor in expected.items()}
    assert_relayed(future_map, [2, 5, 8], [10, 11, 12], [500, 501, 502], relayed)


# The slots and owners of three requests, the third bad; what is said of it.
BAD_SLOTS = {
    "owner": (5, 999, "slot is 5, which is owned by 102, expected owner 999"),
    "owner 0": (5, 0, "slot is 5, which is owned by 102, expected owner 0"),
    "not written": (3, 102, "slot is 3, which is free"),
    "minus one": (-1, 102, "slot is -1, expected 0 to 7"),
    "out of range": (8, 102, "slot is 8, expected 0 to 7"),
}


@pytest.mark.parametrize("others", ["slots", "mixed", "without owners", "wide records"])
@pytest.mark.parametrize("bad", BAD_SLOTS)
def test_bad_slots(bad, others):
    """Guards against another request's record, whatever the batch's other requests bring."""
    slot, owner, message = BAD_SLOTS[bad]
    rows = metadata_rows(3)
    fields = OTHER_MAILBOXES["metadata wide" if others == "wide records" else "same"]
    _, slots = mailbox_with(rows, fields)
    own = NO_ROWS if others != "mixed" else {name: [None, given[1], None] for name, given in rows.items()}
    batch = make_batch(
        own,
        draft_slot=[slots[0], None if others == "mixed" else slots[1], slot],
        draft_owner=[100, None if others in ("mixed", "without owners") else 101, owner],
    )
    future_map = poisoned_map(dg.eagle_fields(4, HIDDEN))
    with pytest.raises(dg.SlotError, match=f"request 'r2': {message}") as error:
        build(batch, future_map)
    assert [problem.position for problem in error.value.problems] == [2]
    assert_poisoned(*relay_tensors(future_map).values())


def test_owner_is_checked_only_where_it_is_given():
    """Guards requests without draft_owner: their slots must be written, by whomever."""
    rows = metadata_rows(3)
    _, slots = mailbox_with(rows)
    draft_input = build(make_batch(NO_ROWS, draft_slot=slots), dg.FutureMap(dg.eagle_fields(4, HIDDEN), 16))
    assert_bytes(draft_input.topk_index, raw(expected_stacks(rows, 4)["topk_index"]))


def test_slot_without_a_mailbox():
    """Guards a process that was given no mailbox: the request's own rows count, or are missing."""
    rows = metadata_rows(3)
    future_map = poisoned_map(dg.eagle_fields(4, HIDDEN))
    draft_input = build(make_batch(rows, overlap=False, draft_slot=[0, 1, 2]), future_map)
    assert_bytes(draft_input.topk_index, raw(expected_stacks(rows, 4)["topk_index"]))
    with pytest.raises(dg.MissingRowError, match="request 'r0': topk_p is missing"):
        build(make_batch(NO_ROWS, draft_slot=[0, 1, 2]), future_map)
    assert_poisoned(*relay_tensors(future_map).values())


def test_another_mailbox():
    """Guards against the first mailbox remembered for the second."""
    first, second = metadata_rows(1, seed=1), metadata_rows(1, seed=2)
    for rows in (first, second):
        _, slots = mailbox_with(rows)
        batch = make_batch({name: [None] for name in rows}, overlap=False, draft_slot=slots)
        draft_input = build(batch, None)
        assert_bytes(draft_input.hidden_states, stacked(dg.eagle_fields(4, HIDDEN)[2], rows["hidden_states"], 1))


@pytest.mark.parametrize("which", OTHER_MAILBOXES)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_slots_are_not_freed_while_they_are_read(monkeypatch, which, is_mixed):
    """Guards a record that is released right after the call: it has a reader, by each way to the rows."""
    rows = metadata_rows(2)
    mailbox, slots = mailbox_with(rows, OTHER_MAILBOXES[which])
    reader, real_launch = FakeMarker(), draft_assembler.launch
    # The twin, but done only when the test says so.
    monkeypatch.setattr(draft_assembler, "launch", lambda *arguments: real_launch(*arguments) and reader)
    own = {name: [None, given[1] if is_mixed else None] for name, given in rows.items()}
    batch = make_batch(own, overlap=False, draft_slot=[slots[0], None if is_mixed else slots[1]])
    build(batch, None)
    mailbox.release([slots[0]])
    assert mailbox.num_free == 6
    reader.is_done = True
    assert mailbox.num_free == 7


@pytest.mark.parametrize("spoil", ["shape", "dtype", "missing", "list"])
def test_short_way_leaves_the_rest_to_the_long_one(spoil):
    """Without a relay plain rows are stacked at once; any other is refused, or converted, as ever."""
    rows = metadata_rows(3)
    if spoil == "list":
        ids = rows["topk_index"][1]
        rows["topk_index"][1] = ids.tolist()
        draft_input = build(make_batch(rows, overlap=False), None)
        assert torch.equal(draft_input.topk_index[1], ids[: draft_input.topk_index.shape[1]])
        return
    row = rows["hidden_states"][1]
    rows["hidden_states"][1] = {"shape": row[:-1], "dtype": row.double(), "missing": None}[spoil]
    error = {"shape": dg.RowShapeError, "dtype": dg.RowDtypeError, "missing": dg.MissingRowError}[spoil]
    batch = make_batch(rows, overlap=False)
    with pytest.raises(error, match=str(batch.reqs[1].rid)):
        build(batch, None)


# -- any fields: build_disagg_draft_input

ANY_FIELDS = (
    dg.Field("hidden_states", 6, torch.bfloat16),
    dg.Field("counts", 3, torch.int32),
    dg.Field("seed", 5, torch.int32, optional=True),
)
ATTRIBUTES = {"seed": "prefill_seed"}


def any_batch(num_rows: int = 3, overlap: bool = True, lacking=(), **of_request):
    """The rows, and a batch of requests that bring them; those of `lacking` have no seed."""
    rows = random_rows(ANY_FIELDS, num_rows)
    for i in lacking:
        rows["seed"][i] = None
    names = ("hidden_states_tensor", "counts", "prefill_seed")
    reqs = [
        SimpleNamespace(
            rid=f"r{i}",
            **dict(zip(names, row_of(rows, i).values(), strict=True)),
            **{name: values[i] for name, values in of_request.items()},
        )
        for i in range(num_rows)
    ]
    count = torch.arange(num_rows)
    batch = SimpleNamespace(
        reqs=reqs, device="cpu", enable_overlap=overlap, req_pool_indices=3 * count + 2, seq_lens=10 + count
    )
    return rows, batch


def build_any(batch, future_map, fields=ANY_FIELDS, attributes=ATTRIBUTES, **more) -> dg.EagleDraftInput:
    tokens = 500 + torch.arange(len(batch.reqs))
    return dg.build_disagg_draft_input(batch, tokens, future_map, fields, attributes, **more)


def assert_any_relayed(future_map, rows) -> None:
    count = range(len(rows["counts"]))
    assert_relayed(future_map, [3 * i + 2 for i in count], [10 + i for i in count], [500 + i for i in count], rows)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_any_fields(num_rows, overlap):
    """Guards field lists that are not EAGLE's: EAGLE's names in their places, the others in extras."""
    rows, batch = any_batch(num_rows, overlap)
    future_map = poisoned_map(ANY_FIELDS)
    draft_input = build_any(batch, future_map, capture_hidden_mode=dg.CaptureHiddenMode.FULL)
    for field in ANY_FIELDS:
        assert draft_input.rows(field.name).dtype is field.dtype
        assert_bytes(draft_input.rows(field.name), stacked(field, rows[field.name], num_rows), field.name)
    assert draft_input.extras.keys() == {"counts", "seed"}
    assert (draft_input.topk_p, draft_input.topk_index) == (None, None)
    assert draft_input.capture_hidden_mode is dg.CaptureHiddenMode.FULL
    assert draft_input.present == {"seed": True}
    if overlap:
        assert draft_input.future_indices is batch.req_pool_indices
        assert_any_relayed(future_map, rows)
    else:
        assert draft_input.future_indices is None
        assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("overlap", [True, False])
def test_optional_row_of_one_request_is_absent(overlap):
    """Guards a mixed batch: None and present, no made-up row; the others' relay rows are valid, its own is not."""
    rows, batch = any_batch(3, overlap, lacking=[1])
    future_map = poisoned_map(ANY_FIELDS)
    draft_input = build_any(batch, future_map)
    assert draft_input.present == {"seed": False}
    assert draft_input.rows("seed") is None
    assert_bytes(draft_input.rows("counts"), stacked(ANY_FIELDS[1], rows["counts"], 3))
    if overlap:
        assert_any_relayed(future_map, rows)


def doubled(rows: torch.Tensor, batch) -> torch.Tensor:
    return rows * 2 + batch.req_pool_indices[:, None].to(rows.dtype)


@pytest.mark.parametrize("overlap", [True, False])
def test_post_gather_sees_the_final_layout_and_its_result_is_relayed(overlap):
    """Guards the hook (O13): rows [b, width] in the batch's order, once a batch, and what it gives is relayed."""
    rows, batch = any_batch(3, overlap)
    future_map, seen = poisoned_map(ANY_FIELDS), []

    def hook(given, given_batch):
        seen.append((given.clone(), given_batch))
        return doubled(given, given_batch)

    draft_input = build_any(batch, future_map, post_gather={"seed": hook})
    ((given, given_batch),) = seen
    assert given_batch is batch
    assert_bytes(given, stacked(ANY_FIELDS[2], rows["seed"], 3))
    rows["seed"] = list(doubled(given, batch))
    assert_bytes(draft_input.rows("seed"), stacked(ANY_FIELDS[2], rows["seed"], 3))
    if overlap:
        assert draft_input.future_indices is batch.req_pool_indices
        assert_any_relayed(future_map, rows)
    else:
        assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("lacking", [[0], [1], [0, 1, 2]])
def test_post_gather_of_a_field_that_some_lack(lacking):
    """Guards the hook from rows that are not there: not called, and the batch and the map go on without the field."""
    rows, batch = any_batch(3, lacking=lacking)
    future_map = poisoned_map(ANY_FIELDS)
    draft_input = build_any(batch, future_map, post_gather={"seed": lambda rows, batch: pytest.fail("called")})
    assert draft_input.present == {"seed": False}
    assert draft_input.rows("seed") is None
    assert_any_relayed(future_map, {**rows, "seed": [None] * 3})


def test_post_gather_of_an_empty_batch():
    """Guards an idle rank: no hook is called, the tensors are typed, nothing is relayed."""
    _, batch = any_batch(0)
    future_map = poisoned_map(ANY_FIELDS)
    draft_input = build_any(batch, future_map, post_gather={"counts": lambda rows, batch: pytest.fail("called")})
    assert (draft_input.rows("counts").shape, draft_input.rows("counts").dtype) == ((0, 3), torch.int32)
    assert_poisoned(*relay_tensors(future_map).values())


BAD_HOOKS = {
    "nothing": (lambda rows, batch: None, "gave None, expected"),
    "a list": (lambda rows, batch: rows.tolist(), r"gave \[\[.*expected \[3, 5\] torch.int32 on cpu"),
    "narrower": (lambda rows, batch: rows[:, :4], r"gave \[3, 4\] torch.int32 on cpu, expected \[3, 5\] torch.int32"),
    "one row": (lambda rows, batch: rows[:1], r"gave \[1, 5\] torch.int32 on cpu, expected \[3, 5\]"),
    "dtype": (lambda rows, batch: rows.long(), r"gave \[3, 5\] torch.int64 on cpu, expected \[3, 5\] torch.int32"),
    "device": (
        lambda rows, batch: rows.to("meta"),
        r"gave \[3, 5\] torch.int32 on meta, expected \[3, 5\] torch.int32 on cpu",
    ),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bad", BAD_HOOKS)
def test_post_gather_that_gives_other_rows(bad, overlap):
    """Guards the relay from rows of another kind: refused with the field's name, and nothing written."""
    hook, words = BAD_HOOKS[bad]
    _, batch = any_batch(3, overlap)
    future_map = poisoned_map(ANY_FIELDS)
    with pytest.raises(ValueError, match=f"post_gather of seed {words}"):
        build_any(batch, future_map, post_gather={"seed": hook})
    assert_poisoned(*relay_tensors(future_map).values())


def test_post_gather_that_raises():
    """Guards the map from a publish without its stash: a hook's own error comes before both."""
    _, batch = any_batch()
    future_map = poisoned_map(ANY_FIELDS)
    with pytest.raises(ZeroDivisionError):
        build_any(batch, future_map, post_gather={"seed": lambda rows, batch: 1 // 0})
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("more", [{"attributes": {"sead": "x"}}, {"post_gather": {"sead": doubled}}])
def test_names_that_are_no_fields(more):
    """Guards against a misspelt field, whose hook or attribute would be left out in silence."""
    _, batch = any_batch()
    with pytest.raises(ValueError, match=r"name \['sead'\], but the fields are \['hidden_states', 'counts', 'seed'\]"):
        build_any(batch, poisoned_map(ANY_FIELDS), **more)


@pytest.mark.parametrize("post_gather", [None, {"seed": doubled}])
@pytest.mark.parametrize("bad", ["lengths", "indices", "repeated", "out of range", "map", "no map"])
def test_relay_errors_come_before_anything_is_written(bad, post_gather):
    """Guards the batch with a hook, which is published and then stashed: what stash refuses, publish never saw."""
    _, batch = any_batch()
    fields = ANY_FIELDS if bad != "map" else (*ANY_FIELDS[:1], dg.Field("counts", 4, torch.int32), ANY_FIELDS[2])
    future_map = poisoned_map(fields)
    if bad == "lengths":
        batch.seq_lens = batch.seq_lens[:2]
    elif bad in ("indices", "repeated", "out of range"):
        wrong = {"indices": [2, 5], "repeated": [2, 5, 2], "out of range": [2, 5, 32]}[bad]
        batch.req_pool_indices = torch.tensor(wrong)
    with pytest.raises(dg.RelayError):
        build_any(batch, None if bad == "no map" else future_map, post_gather=post_gather)
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("post_gather", [None, {"seed": doubled}])
@pytest.mark.parametrize("name", ["hidden_states_tensor", "counts"])
def test_missing_rows_of_any_fields(name, post_gather):
    """Guards required fields of any name: the request is named, and nothing is written."""
    _, batch = any_batch()
    delattr(batch.reqs[2], name)
    future_map = poisoned_map(ANY_FIELDS)
    with pytest.raises(dg.MissingRowError, match="request 'r2'"):
        build_any(batch, future_map, post_gather=post_gather)
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("post_gather", [None, {"seed": doubled}])
def test_foreign_map_of_any_fields(post_gather):
    """Guards an engine's own map: exactly publish, then stash, with the rows that the hook gave."""
    rows, batch = any_batch()
    future_map = ForeignMap()
    draft_input = build_any(batch, future_map, post_gather=post_gather)
    assert [name for name, _ in future_map.calls] == ["publish", "stash"]
    (published_at, seq_lens), (stashed_at, stashed) = (arguments for _, arguments in future_map.calls)
    assert published_at is stashed_at is draft_input.future_indices is batch.req_pool_indices
    assert seq_lens is batch.seq_lens
    assert stashed is draft_input
    expected = torch.stack(rows["seed"])
    assert torch.equal(stashed.rows("seed"), expected if post_gather is None else doubled(expected, batch))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("post_gather", [None, {"seed": doubled}])
def test_slots_of_any_fields(is_mixed, overlap, post_gather):
    """Guards the mailbox with any fields: by slots, or a slot beside a request with its own rows."""
    rows, batch = any_batch(3, overlap, draft_slot=[5, None if is_mixed else 6, 7])
    mailbox = dg.DraftMailbox(ANY_FIELDS, 8, pin_memory=False)
    for i, req in enumerate(batch.reqs):
        if req.draft_slot is not None:
            mailbox.put(req.draft_slot, 100 + i, **row_of(rows, i))
            req.hidden_states_tensor = req.counts = req.prefill_seed = None
    dg.use_mailbox(mailbox)
    future_map = poisoned_map(ANY_FIELDS)
    draft_input = build_any(batch, future_map, post_gather=post_gather)
    if post_gather is not None:
        rows["seed"] = list(doubled(torch.stack(rows["seed"]), batch))
    for field in ANY_FIELDS:
        assert_bytes(draft_input.rows(field.name), stacked(field, rows[field.name], 3), field.name)
    if overlap:
        assert_any_relayed(future_map, rows)


def test_bad_slot_of_any_fields():
    """Guards against another request's record, with any fields and a hook."""
    rows, batch = any_batch(3, draft_slot=[5, 6, 7], draft_owner=[100, 101, 999])
    mailbox = dg.DraftMailbox(ANY_FIELDS, 8, pin_memory=False)
    for i, req in enumerate(batch.reqs):
        mailbox.put(req.draft_slot, 100 + i, **row_of(rows, i))
    dg.use_mailbox(mailbox)
    future_map = poisoned_map(ANY_FIELDS)
    with pytest.raises(dg.SlotError, match="request 'r2': slot is 7, which is owned by 102, expected owner 999"):
        build_any(batch, future_map, post_gather={"seed": doubled})
    assert_poisoned(*relay_tensors(future_map).values())
