"""The needs O1 to O22 of shared/needs.md, one test or more for each: what users of this seam reported.

Where needs.md and design.md differ, design.md holds. The needs whose effect shows only on a GPU, or in
sglang itself, are tested here as far as a CPU can tell.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import draftgather as dg
import draftgather.draft_assembler as draft_assembler
from draftgather.machine import Machine
from helpers import (
    FIELD_LISTS,
    FakeMarker,
    Poisoned,
    assert_batch,
    assert_bytes,
    assert_poisoned,
    assert_relayed,
    make_request,
    make_settings,
    note_readers,
    poisoned_map,
    random_rows,
    raw,
    relay_tensors,
    relay_to,
    row_of,
    stacked,
    write_record,
    written_mailbox,
    zero_rows,
)

SEEDED = FIELD_LISTS["eagle+seed"]


class CountedOps(TorchDispatchMode):
    """Counts what torch does: one entry an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def batch_of(reqs, future_map=None, overlap=True, indices=None, **more) -> SimpleNamespace:
    count = torch.arange(len(reqs), dtype=torch.int64)
    indices = count + 1 if indices is None else torch.tensor(indices)
    return SimpleNamespace(
        reqs=reqs, device="cpu", enable_overlap=overlap, req_pool_indices=indices, seq_lens=count + 10, **more
    )


def build(reqs, future_map, overlap=True, indices=None, **arguments) -> dg.EagleDraftInput:
    tokens = torch.tensor([req.output_ids[-1] for req in reqs], dtype=torch.int64)
    batch = batch_of(reqs, overlap=overlap, indices=indices)
    return dg.build_eagle_disagg_draft_input(batch, make_settings(**arguments), tokens, future_map)


@pytest.mark.parametrize("way", ["rows", "slots"])
def test_o01_copies_do_not_grow_with_the_batch(machine, fields, way):
    """O1, separate pageable clones: no more copies, stacks and gathers for 64 rows than for 32.

    A few rows are moved without torch; then there are less.
    """
    is_in_place = machine.can_read(torch.zeros(1))
    route = {"rows": "pointers", "slots": "slots"}[way] if is_in_place else "staged"
    counts = {}
    for num_rows in (1, 8, 32, 64):
        rows = random_rows(fields, num_rows)
        assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, num_rows), machine=machine)
        assemble, what = {
            "rows": (assembler.assemble_rows, rows),
            "slots": (assembler.assemble_slots, {"slots": list(range(num_rows))}),
        }[way]
        relay = relay_to(dg.FutureMap(fields, 128, machine=machine), range(1, num_rows + 1))
        assemble(relay=relay, **what)
        with CountedOps() as ops:
            assert assemble(relay=relay, **what).route == route
        counts[num_rows] = ops.counts
    assert counts[32] == counts[64]
    for num_rows in (1, 8):
        assert sum(counts[num_rows].values()) <= sum(counts[64].values())


def test_o02_algorithm_without_a_draft_input_is_an_error():
    """O2, spec info before the first decode step: an algorithm whose builder yields nothing is named."""

    class Forgetful(dg.CustomSpecAlgo):
        def build_disagg_draft_input(self, batch, server_args, last_tokens_tensor, future_map):
            return None

    algorithm = Forgetful("FORGETFUL", lambda server_args: None)
    batch = dg.ScheduleBatch([make_request("a", {})], "cpu", torch.tensor([1]), torch.tensor([9]), algorithm)
    with pytest.raises(dg.AlgorithmError, match="FORGETFUL yielded no draft input"):
        batch.process_prebuilt(make_settings(), None)
    assert (batch.spec_info, batch.input_ids) == (None, None)


@pytest.mark.parametrize("name", ["topk_p", "topk_index", "hidden_states"])
def test_o03_rows_are_never_invented(machine, fields, name):
    """O3, never invent draft rows: a missing one is an error that names it, and nothing is written in its place."""
    rig = Poisoned(fields, machine)
    rows = random_rows(fields, 3)
    rows[name][1] = None
    with pytest.raises(dg.MissingRowError, match=f"request 'r1': {name} is missing"):
        rig.assembler.assemble_rows(["r0", "r1", "r2"], relay=rig.relay(3), **rows)
    rig.assert_untouched()


def test_o03_debug_mode_finds_rows_of_zeros(machine, fields):
    """O3, the same for a row that is there but was never written: debug mode names the request."""
    rig = Poisoned(fields, machine)
    rig.assembler.debug = True
    with pytest.raises(dg.MissingRowError, match="request 'r0': row is zero in every field: never written"):
        rig.assembler.assemble_rows(["r0"], relay=rig.relay(1), **zero_rows(fields, 1))
    rig.assert_untouched()


@pytest.mark.parametrize(("width", "cause"), [(72, "three times the width"), (64, r"expected \(24,\)")])
def test_o04_width_is_checked_with_the_likely_cause(machine, fields, width, cause):
    """O4, draft width against the first row: both numbers, and why it may be so, before any write."""
    rig = Poisoned(fields, machine)
    rows = random_rows(fields, 1)
    rows["hidden_states"][0] = torch.zeros(width, dtype=torch.bfloat16)
    with pytest.raises(dg.RowShapeError, match=rf"has shape \({width},\).*{cause}"):
        rig.assembler.assemble_rows(relay=rig.relay(1), **rows)
    rig.assert_untouched()


def test_o04_target_width_is_named_as_the_cause():
    """O4, the target model's width in the place of the draft's."""
    fields = dg.eagle_fields(1, 128)
    rows = random_rows(dg.eagle_fields(1, 192), 1)
    with pytest.raises(dg.RowShapeError, match=r"has shape \(192,\), expected \(128,\) \(the target model's width"):
        dg.DraftAssembler(fields).assemble_rows(**rows)


def test_o05_the_future_map_is_the_source_of_truth(fields):
    """O5, one source for width and dtype: the configured map's, whatever the first row looks like."""
    future_map = dg.FutureMap(fields, 8)
    rows = row_of(random_rows(dg.eagle_fields(4, 24, torch.float32), 1), 0)
    with pytest.raises(dg.RowDtypeError, match=r"request 'a': hidden_states has dtype torch.float32"):
        build([make_request("a", rows)], future_map)
    assert not any(raw(table).any() for table in relay_tensors(future_map).values())


@pytest.mark.parametrize("owner", [0, 8, -1])
def test_o06_another_requests_row_is_refused(machine, fields, owner):
    """O6, ownership tags: a mismatch is reported by position, and nothing is written for anybody."""
    rows = random_rows(fields, 3)
    rig = Poisoned(fields, machine, written_mailbox(fields, rows, 3))
    with pytest.raises(dg.SlotError, match=f"request 'b': slot is 1, which is owned by 101, expected owner {owner}"):
        rig.assembler.assemble_slots([0, 1, 2], [100, owner, 102], ["a", "b", "c"], relay=rig.relay(3))
    rig.assert_untouched()
    problems = rig.assembler.check_slots([0, 1, 2], [100, owner, 102])
    good = [i for i in range(3) if i not in {problem.position for problem in problems}]
    batch = rig.assembler.assemble_slots(good, [100, 102])
    assert_batch(batch, fields, {name: [given[0], given[2]] for name, given in rows.items()})


def test_o07_not_written_differs_from_wrong_owner(fields):
    """O7, two answers for two faults; by design.md *written* is a state of its own, and 0 an owner."""
    mailbox = dg.DraftMailbox(fields, 3, pin_memory=False)
    row = row_of(random_rows(fields, 1), 0)
    mailbox.put(mailbox.acquire(), 0, **row)
    mailbox.acquire()
    problems = dg.DraftAssembler(fields, mailbox=mailbox).check_slots([0, 1, 2, 0], [0, 0, 0, 5])
    assert [(problem.position, problem.got) for problem in problems] == [
        (1, "is 1, which is not written yet"),
        (2, "is 2, which is free: nothing was written since it was released"),
        (3, "is 0, which is owned by 0"),
    ]


def test_o07_late_write_into_a_freed_slot(fields):
    """O7, a freed slot's old tag: a late write looks like what it is, not like corruption."""
    mailbox = dg.DraftMailbox(fields, 1, pin_memory=False)
    row = row_of(random_rows(fields, 1), 0)
    write_record(mailbox, 0, 5, row)
    mailbox.accept([0], [5])
    mailbox.release([0])
    with pytest.raises(dg.SlotError, match="slot 0 is not written, expected a record of owner 6"):
        mailbox.accept([0], [6])
    write_record(mailbox, 0, 5, row, generation=mailbox.generation(0) - 1)
    with pytest.raises(dg.SlotError, match="slot 0 is of generation 1, expected generation 2"):
        mailbox.accept([0], [6])


def test_o08_only_rows_that_were_marked_ready(machine, fields):
    """O8, bytes that landed before the completion message: not gathered until accepted, and nobody waits for them."""
    rows = random_rows(fields, 1)
    mailbox = dg.DraftMailbox(fields, 1, pin_memory=False)
    rig = Poisoned(fields, machine, mailbox)
    write_record(mailbox, 0, 5, row_of(rows, 0))
    with pytest.raises(dg.SlotError, match="slot is 0, which is free"):
        rig.assembler.assemble_slots([0], [5], relay=rig.relay(1))
    rig.assert_untouched()
    mailbox.accept([0], [5])
    assert_batch(rig.assembler.assemble_slots([0], [5]), fields, rows)


def test_o09_a_released_row_is_not_overwritten_while_it_is_read(fields):
    """O9, late writes after an abort: the slot has no next tenant before the last launch that reads it is done."""
    mailbox = written_mailbox(fields, random_rows(fields, 1), 1)
    reader = FakeMarker()
    note_readers(mailbox, [0], reader)
    mailbox.release([0])
    with pytest.raises(dg.MailboxFullError):
        mailbox.acquire()
    with pytest.raises(dg.SlotError, match="still reads it"):
        mailbox.put(0, 6, **row_of(random_rows(fields, 1), 0))
    reader.is_done = True
    assert mailbox.acquire() == 0


def test_o09_callers_rows_are_the_callers_again(machine, fields):
    """O9, no address of a row is kept past the marker: rows that change after the call do not change the batch."""
    rows = random_rows(fields, 3)
    expected = {name: [row.clone() for row in given] for name, given in rows.items()}
    batch = dg.DraftAssembler(fields, machine=machine).assemble_rows(**rows)
    assert batch.done.query()
    for given_rows in rows.values():
        for row in given_rows:
            row.zero_()
    assert_batch(batch, fields, expected)


@pytest.mark.parametrize("way", ["rows", "slots"])
def test_o10_a_resumed_request_passes_again(machine, fields, way):
    """O10, retracted and resumed: the same request later, with other batches in between, has identical rows."""
    rows = random_rows(fields, 4)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 4), machine=machine)

    def assemble(*which: int) -> dg.DraftBatch:
        if way == "slots":
            return assembler.assemble_slots(which, [100 + i for i in which])
        return assembler.assemble_rows(**{name: [given[i] for i in which] for name, given in rows.items()})

    first = assemble(2)
    assemble(0, 1, 3)
    assemble(3, 2, 0)
    again = assemble(2)
    for field in fields:
        expected = stacked(field, [rows[field.name][2]], 1)
        assert_bytes(first.tensors[field.name], expected)
        assert_bytes(again.tensors[field.name], expected)


def test_o11_row_i_is_request_i_and_padding_comes_last(machine):
    """O11, dummy requests go last: in any batch with any padding, of every field list."""

    @settings(max_examples=10 if machine.has_kernel else 80, deadline=None)
    @given(st.sampled_from(sorted(FIELD_LISTS)), st.permutations(range(6)), st.integers(0, 6), st.integers(0, 4))
    def check(which: str, order: list[int], num_rows: int, padding: int) -> None:
        fields, order = FIELD_LISTS[which], order[:num_rows]
        rows = random_rows(fields, 6)
        batch_rows = {name: [given[i] for i in order] for name, given in rows.items()}
        assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 6), machine=machine)
        future_map = poisoned_map(fields, machine=machine)
        indices = [5 * i + 1 for i in order]
        relay = relay_to(future_map, indices)
        pad_to = num_rows + padding
        assert_batch(assembler.assemble_rows(relay=relay, pad_to=pad_to, **batch_rows), fields, batch_rows, pad_to)
        assert_batch(assembler.assemble_slots(order, pad_to=pad_to), fields, batch_rows, pad_to)
        count = range(num_rows)
        assert_relayed(future_map, indices, [10 + i for i in count], [500 + i for i in count], batch_rows)

    check()


@pytest.mark.parametrize("which", FIELD_LISTS)
def test_o12_any_field_list(machine, which):
    """O12, a field list and not three hard-wired tensors: EAGLE, with a seed, hidden and mask only, ids only."""
    fields = FIELD_LISTS[which]
    rows = random_rows(fields, 3)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 3), machine=machine)
    assert_batch(assembler.assemble_rows(**rows), fields, rows)
    assert_batch(assembler.assemble_slots([0, 1, 2]), fields, rows)


def test_o13_the_seed_is_left_to_sglangs_own_code(machine):
    """O13, a seed that fails closed: its bytes arrive as they came, rows of -1 too, in the final layout."""
    rows = random_rows(SEEDED, 2)
    rows["seed"] = [torch.full((2048,), -1, dtype=torch.int32), torch.arange(2048, dtype=torch.int32)]
    batch = dg.DraftAssembler(SEEDED, machine=machine).assemble_rows(**rows)
    assert batch.tensors["seed"].tolist() == [[-1] * 2048, list(range(2048))]


def test_o14_the_number_of_states_is_read_at_each_call():
    """O14, adaptive step count: another count than the map's is refused, also when the settings change later."""
    future_map = dg.FutureMap(dg.eagle_fields(2, 8), 8)
    rows = row_of(random_rows(dg.eagle_fields(16, 8), 1), 0)
    request = make_request("a", rows)
    assert build([request], future_map, topk=2).topk_p.shape == (1, 2)
    before = {name: raw(table) for name, table in relay_tensors(future_map).items()}
    with pytest.raises(dg.RelayError, match=r"topk_p: the rows are 6 torch.float32, the future map's 2"):
        build([request], future_map, topk=2, steps=3, multi_layer=True)
    for name, table in relay_tensors(future_map).items():
        np.testing.assert_array_equal(raw(table), before[name])
    assert build([request], None, overlap=False, topk=2, steps=3, multi_layer=True).topk_p.shape == (1, 6)
    assert build([request], None, overlap=False, topk=1).topk_p.shape == (1, 1)
    with pytest.raises(dg.RowShapeError, match=r"has shape \(16,\), expected \(20,\) or wider"):
        build([request], None, overlap=False, topk=5, steps=4, multi_layer=True)


def test_o15_debug_mode_reports_values_before_the_launch(machine, fields):
    """O15, ids inside the vocabulary and finite probabilities: reported by request, off by default."""
    rows = {f.name: [torch.ones(f.width, dtype=f.dtype) for _ in range(2)] for f in fields}
    rows["topk_index"][0][3] = 1000
    rows["topk_p"][1][0] = float("nan")
    rig = Poisoned(fields, machine)
    rig.assembler.debug = True
    with pytest.raises(dg.RowValueError) as error:
        rig.assembler.assemble_rows(["a", "b"], relay=rig.relay(2), **rows)
    assert [(problem.request_id, problem.field, problem.got) for problem in error.value.problems] == [
        ("a", "topk_index", "holds the id 1000"),
        ("b", "topk_p", "holds nan"),
    ]
    rig.assert_untouched()


def test_o15_without_debug_no_value_is_looked_at(fields, monkeypatch):
    """O15, off by default and without cost: the value check is not even called."""
    monkeypatch.setattr(draft_assembler, "value_problems", None)
    rows = zero_rows(fields, 1)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 1))
    assembler.assemble_rows(**rows)
    assembler.assemble_slots([0])


@pytest.mark.parametrize("which", FIELD_LISTS)
def test_o16_idle_rank(machine, which, monkeypatch):
    """O16, an idle rank: zero rows of the right widths, dtypes and device, nothing launched, nothing relayed."""
    fields = FIELD_LISTS[which]
    mailbox = dg.DraftMailbox(fields, 1, pin_memory=False)
    assembler = dg.DraftAssembler(fields, mailbox=mailbox, machine=machine)
    future_map = poisoned_map(fields, machine=machine)
    monkeypatch.setattr(draft_assembler, "launch", None)
    nothing = {field.name: [] for field in fields}
    for batch in (
        assembler.assemble_rows(relay=relay_to(future_map, []), **nothing),
        assembler.assemble_slots([], [], [], relay=relay_to(future_map, [])),
    ):
        assert batch.route == "empty"
        assert batch.done.query()
        for field in fields:
            tensor = batch.tensors[field.name]
            assert (tensor.shape, tensor.dtype, tensor.device.type) == ((0, field.width), field.dtype, "cpu")
    assert_poisoned(*relay_tensors(future_map).values())


@pytest.mark.parametrize("idle_first", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_o16_idle_input_merges(fields, overlap, idle_first):
    """O16, the merge after an idle step: an idle input joins a running batch, before or after it, in either mode."""
    rows = random_rows(fields, 2)
    future_map = dg.FutureMap(fields, 8)
    reqs = [make_request(i, row_of(rows, i)) for i in range(2)]
    running = build(reqs, future_map if overlap else None, overlap=overlap)
    idle = dg.EagleDraftInput.create_idle_input("cpu", 24, torch.bfloat16, 4)
    if idle_first:
        idle.merge_batch(running)
        running = idle
    else:
        running.merge_batch(idle)
    if overlap:
        batch = SimpleNamespace(spec_info=running, seq_lens=None)
        future_map.resolve(batch)
        assert batch.seq_lens.tolist() == [10, 11]
    for field in fields:
        assert_bytes(running.rows(field.name), stacked(field, rows[field.name], 2), field.name)


@pytest.mark.parametrize("way", ["rows", "slots"])
def test_o17_presence_is_known_on_the_host(machine, way):
    """O17, eligibility is visible: one flag a field, without a device read, so that ranks can agree."""
    for has_seed in ([True, True], [True, False], [False, False]):
        rows = random_rows(SEEDED, 2)
        rows["seed"] = [row if there else None for row, there in zip(rows["seed"], has_seed, strict=True)]
        assembler = dg.DraftAssembler(SEEDED, mailbox=written_mailbox(SEEDED, rows, 2), machine=machine)
        batch = assembler.assemble_rows(**rows) if way == "rows" else assembler.assemble_slots([0, 1])
        assert {type(flag) for flag in batch.present.values()} == {bool}
        assert dict(batch.present) == {**dict.fromkeys(rows, True), "seed": all(has_seed)}
        assert ("seed" in batch.tensors) == all(has_seed)


class FakeCuda:
    """Stands in for torch.cuda: one current stream, and a record of all that happens to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any]] = []
        self.stream = object()
        outer = self

        class Event:
            is_done = False

            def record(self, stream: object = None) -> None:
                outer.log.append(("record", self))
                assert stream in (None, outer.stream)

            def query(self) -> bool:
                return self.is_done

            def wait(self, stream: object = None) -> None:
                outer.log.append(("wait", self))

            def synchronize(self) -> None:
                raise AssertionError("the host waited")

        def forbidden(*_args: object, **_kwargs: object) -> None:
            raise AssertionError("a stream of the library's own, or a host wait")

        self.Event = Event
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_args: self.stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", lambda *_args: nullcontext())
        for name in ("Stream", "ExternalStream", "stream", "set_stream", "synchronize", "default_stream"):
            monkeypatch.setattr(torch.cuda, name, forbidden)
        real_launch = draft_assembler.launch

        def launch(descriptor: Any, machine: Machine, plan: object = None) -> Any:
            self.log.append(("launch", None))
            return real_launch(descriptor, machine)

        monkeypatch.setattr(draft_assembler, "launch", launch)

    @property
    def steps(self) -> list[str]:
        return [step for step, _ in self.log]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


FAKE_MACHINE = Machine(torch.device("cuda", 0), has_kernel=True, pins=False, zero_copy=True)


@pytest.mark.parametrize("way", ["rows", "slots"])
def test_o18_only_the_callers_current_stream(fields, fake_cuda, way):
    """O18, writes from two streams: one launch a call on the current stream, no stream of the library's own."""
    rows = random_rows(fields, 2)
    assembler = dg.DraftAssembler(fields, mailbox=written_mailbox(fields, rows, 2), machine=FAKE_MACHINE)
    future_map = dg.FutureMap(fields, 8)
    relay = relay_to(future_map, [1, 2])
    for _ in range(3):
        fake_cuda.log.clear()
        batch = assembler.assemble_rows(relay=relay, **rows) if way == "rows" else assembler.assemble_slots([0, 1])
        assert fake_cuda.steps == ["launch", "record"]
        assert_batch(batch, fields, rows)


def test_o19_no_event_is_recorded_twice_or_foreign(fields, fake_cuda):
    """O19, re-recording drops an event's older meaning: every record is of a new event of the library's own."""
    foreign = fake_cuda.Event()
    rows = random_rows(fields, 2)
    mailbox = written_mailbox(fields, rows, 2)
    assembler = dg.DraftAssembler(fields, mailbox=mailbox, machine=FAKE_MACHINE)
    batches = []
    for _ in range(3):
        batches += [assembler.assemble_rows(**rows), assembler.assemble_slots([0, 1])]
    recorded = [event for step, event in fake_cuda.log if step == "record"]
    assert len({id(event) for event in recorded}) == len(recorded) == 6
    assert foreign not in recorded
    assert not any(batch.done.query() for batch in batches)
    recorded[0].is_done = True
    assert [batch.done.query() for batch in batches] == [True] + [False] * 5


def test_o20_fused_relay_equals_publish_and_stash(machine):
    """O20, publish and stash have different readers: the fused launch leaves the very same bytes in every buffer."""
    rows = random_rows(SEEDED, 4)
    absent = replace(SEEDED[3], width=2048)
    assert absent == SEEDED[3]
    fused, two_calls = poisoned_map(SEEDED, machine=machine), poisoned_map(SEEDED, machine=machine)
    indices = torch.tensor([9, 3, 30, 4])
    seq_lens, tokens = torch.tensor([1, 2**40, 0, 7]), torch.tensor([5, -6, 2**35, 8])
    batch = dg.DraftAssembler(SEEDED, machine=machine).assemble_rows(
        relay=dg.Relay(fused, indices, seq_lens, tokens), **rows
    )
    draft_input = dg.EagleDraftInput(bonus_tokens=tokens)
    for name, tensor in batch.tensors.items():
        draft_input.set_rows(name, tensor)
    two_calls.publish(indices, seq_lens)
    two_calls.stash(indices, draft_input)
    for name, table in relay_tensors(fused).items():
        np.testing.assert_array_equal(raw(table), raw(relay_tensors(two_calls)[name]), err_msg=name)


def test_o20_the_fence_is_raised_once_after_the_write(machine, fields, monkeypatch):
    """O20, the fence: once a fused call and once a publish, after the write; a stash and an empty batch raise none."""
    seen: list[int] = []

    def raise_fence(future_map: dg.FutureMap) -> None:
        seen.append(int(future_map.new_seq_lens_buf[3]))

    monkeypatch.setattr(dg.FutureMap, "raise_fence", raise_fence)
    future_map = dg.FutureMap(fields, 8, machine=machine)
    assembler = dg.DraftAssembler(fields, machine=machine)
    rows = random_rows(fields, 1)
    batch = assembler.assemble_rows(relay=relay_to(future_map, [3]), **rows)
    assert seen == [10]
    future_map.publish(torch.tensor([3]), torch.tensor([77]))
    assert seen == [10, 77]
    future_map.stash(torch.tensor([3]), dg.EagleDraftInput(**batch.tensors, bonus_tokens=torch.tensor([1])))
    assembler.assemble_rows(relay=relay_to(future_map, []), **{field.name: [] for field in fields})
    assembler.assemble_rows(**rows)
    assert seen == [10, 77]


def test_o21_without_overlap_nothing_is_relayed(fields):
    """O21, overlap off: no publish, no stash, no future indices; the input is returned as it is."""
    rows = random_rows(fields, 2)
    future_map = poisoned_map(fields)
    draft_input = build([make_request(i, row_of(rows, i)) for i in range(2)], future_map, overlap=False)
    assert draft_input.future_indices is None
    assert draft_input.bonus_tokens.tolist() == [7, 7]
    for field in fields:
        assert_bytes(draft_input.rows(field.name), stacked(field, rows[field.name], 2), field.name)
    assert_poisoned(*relay_tensors(future_map).values())


def test_o22_dtype_and_shape_follow_the_configuration(machine):
    """O22, the first payload fixes nothing: a bfloat16 first row does not make the outputs or the relay bfloat16."""
    fields = dg.eagle_fields(2, 6, torch.float32)
    assembler = dg.DraftAssembler(fields, machine=machine)
    future_map = dg.FutureMap(fields, 8, machine=machine)
    low = {**random_rows(fields, 1), "hidden_states": [torch.tensor([1.5, 2, -0.0, 4, 5, 6], dtype=torch.bfloat16)]}
    first = assembler.assemble_rows(relay=relay_to(future_map, [1]), **low)
    rows = random_rows(fields, 2)
    later = assembler.assemble_rows(relay=relay_to(future_map, [2, 3]), **rows)
    assert first.tensors["hidden_states"].dtype == later.tensors["hidden_states"].dtype == torch.float32
    assert first.tensors["hidden_states"].view(torch.int32).tolist()[0][:3] == [0x3FC00000, 0x40000000, -(2**31)]
    assert_batch(later, fields, rows)
    assert_bytes(future_map.buffers["hidden_states"][2:4], stacked(fields[2], rows["hidden_states"], 2))


def test_o23_the_hot_path_reads_nothing_back(fields, monkeypatch):
    """O23, no hidden host waits: item, tolist, cpu and synchronize are never called on the way."""
    rows = random_rows(fields, 8)
    mailbox = written_mailbox(fields, rows, 8)
    assembler = dg.DraftAssembler(fields, mailbox=mailbox)
    future_map = dg.FutureMap(fields, 32)
    relay = relay_to(future_map, range(1, 9))
    draft_input = dg.EagleDraftInput(future_indices=relay.future_indices)

    def waited(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("the host waited")

    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__index__"):
            patched.setattr(torch.Tensor, name, waited)
        patched.setattr(torch.cuda, "synchronize", waited)
        batches = [
            assembler.assemble_rows(relay=relay, **rows),
            assembler.assemble_slots(list(range(8)), relay=relay, pad_to=9),
        ]
        future_map.publish(relay.future_indices, relay.seq_lens)
        future_map.stash(relay.future_indices, dg.EagleDraftInput(**batches[0].tensors, bonus_tokens=relay.seq_lens))
        future_map.resolve(SimpleNamespace(spec_info=draft_input, seq_lens=None))
    assert_batch(batches[0], fields, rows)
