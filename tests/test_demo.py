"""The replay: that it is right where all is right, and that it sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from draftgather import draft_assembler, launch
from draftgather.bench.arrivals import Arrival, generate
from draftgather.bench.demo import DemoFigures, DemoOptions, PoolIndices, RowSource, replay, same_bytes
from draftgather.draft_assembler import DraftAssembler
from draftgather.draft_batch import DraftBatch
from draftgather.draft_input import EagleDraftInput
from draftgather.future_map import FutureMap, Relay

SMALL = DemoOptions(hidden_size=24, num_slots=64)


def run(options: DemoOptions = SMALL, num_requests: int = 300) -> DemoFigures:
    return replay(generate(num_requests, options.seed), options)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[DraftBatch, Relay], None], nth: int) -> None:
    """Change what the nth batch of more than one row has written."""
    assemble, seen = DraftAssembler.assemble_slots, 0

    def spoiled(self: DraftAssembler, slots: Any, *args: Any, relay: Relay | None = None, **kwargs: Any) -> DraftBatch:
        nonlocal seen
        batch = assemble(self, slots, *args, relay=relay, **kwargs)
        if relay is not None and len(slots) > 1:
            seen += 1
            if seen == nth:
                change(batch, relay)
        return batch

    monkeypatch.setattr(DraftAssembler, "assemble_slots", spoiled)


@pytest.mark.parametrize(
    "options",
    [
        SMALL,
        replace(SMALL, topk=7, num_steps=3, dtype=torch.float32),
        replace(SMALL, hidden_size=1, topk=1, dtype=torch.float16),
        replace(SMALL, max_batch_size=4),
        replace(SMALL, num_slots=2),
        replace(SMALL, tick_ms=1000.0, speed_up=100.0),
    ],
    ids=["small", "multi-layer", "one wide", "split", "one slot", "mailbox overflows"],
)
def test_every_byte_agrees(options: DemoOptions) -> None:
    """Guards against a fault of either path, and against requests lost where slots or indices run out."""
    figures = run(options)
    assert figures.mismatches == 0
    assert figures.requests == 300
    assert figures.launches == figures.batches
    assert figures.route == "slots"
    assert 1 <= figures.batch_size_p50 <= figures.batch_size_max <= min(options.max_batch_size, options.num_slots - 1)
    assert figures.batches * figures.batch_size_max >= 300
    assert min(figures.ours_us_p50, figures.torch_stack_us_p50, figures.put_us_p50, figures.clone_us_p50) > 0
    assert figures.speedup_p50 == pytest.approx(figures.torch_stack_us_p50 / figures.ours_us_p50, abs=0.001)


def test_a_batch_is_what_arrived_in_a_tick() -> None:
    """Ticks of 20 ms: two requests, one, none, then three that are split in two and one."""
    times = (1.0, 19.9, 20.0, 65.0, 66.0, 67.0)
    sizes: list[int] = []
    options = replace(SMALL, max_batch_size=2)
    figures = replay((Arrival(time, 5, 10) for time in times), options, sizes.append)
    assert sizes == [2, 1, 2, 1]
    assert (figures.batches, figures.launches, figures.batch_size_max) == (4, 4, 2)


def test_extreme_times_end() -> None:
    """Guards against a walk through every empty tick, where indices run out too."""
    arrivals = [Arrival(time, 1, 2**31 - 1) for time in (0.0, 1.0, 2.0**53)]
    figures = replay(iter(arrivals), replace(SMALL, num_slots=2, tick_ms=0.001, speed_up=0.001))
    assert (figures.batches, figures.mismatches) == (3, 0)


def test_a_replay_depends_on_the_seed_alone() -> None:
    def untimed(figures: DemoFigures) -> dict[str, Any]:
        return {name: value for name, value in asdict(figures).items() if "_us_" not in name and name != "speedup_p50"}

    assert untimed(run()) == untimed(run())
    assert untimed(run()) != untimed(run(replace(SMALL, seed=1)))


def swap_rows(batch: DraftBatch, relay: Relay) -> None:
    batch.tensors["hidden_states"][:2] = batch.tensors["hidden_states"][:2].flip(0)


def flip_a_bit(batch: DraftBatch, relay: Relay) -> None:
    batch.tensors["topk_p"].view(torch.int32)[0, -1] ^= 1


def swap_relay_rows(batch: DraftBatch, relay: Relay) -> None:
    rows = relay.future_map.buffers["topk_index"]
    rows[relay.future_indices[:2]] = rows[relay.future_indices[:2].flip(0)]


def change_a_length(batch: DraftBatch, relay: Relay) -> None:
    relay.future_map.new_seq_lens_buf[relay.future_indices[0]] += 1


def change_a_foreign_row(batch: DraftBatch, relay: Relay) -> None:
    """Row 0 is in no batch: only the last look at the whole map sees it."""
    relay.future_map.output_tokens_buf[0] = 1


@pytest.mark.parametrize("change", [swap_rows, flip_a_bit, swap_relay_rows, change_a_length, change_a_foreign_row])
def test_what_is_spoiled_is_counted(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[DraftBatch, Relay], None]
) -> None:
    """Guards against a demo that cannot fail."""
    spoil(monkeypatch, change, nth=3)
    # A lifetime of one tick: no later batch is merged with the spoiled one.
    assert replay((Arrival(float(i), 5, 1) for i in range(200)), SMALL).mismatches == 1


def test_a_merge_in_the_wrong_order_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reference that follows our own indices wherever they lead."""

    def filter_nothing_but_reverse(self: EagleDraftInput, kept: torch.Tensor) -> None:
        assert self.future_indices is not None
        self.future_indices = self.future_indices[kept].flip(0)

    monkeypatch.setattr(EagleDraftInput, "filter_batch", filter_nothing_but_reverse)
    assert run().mismatches > 0


def test_a_second_launch_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a count that is assumed: two launches a batch must show as such."""
    once = DraftAssembler.assemble_slots

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        once(self, *args, **kwargs)
        return once(self, *args, **kwargs)

    monkeypatch.setattr(DraftAssembler, "assemble_slots", twice)
    figures = run()
    assert figures.launches == 2 * figures.batches


def test_resolve_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither are launches outside of the assembler."""
    calls = []
    resolve = FutureMap.resolve
    monkeypatch.setattr(FutureMap, "resolve", lambda self, batch: (calls.append(1), resolve(self, batch)))
    figures = run()
    # One more: the assembler's warm-up resolves once.
    assert len(calls) - 1 == figures.launches == figures.batches


def test_threads_and_launch_are_restored() -> None:
    before = torch.get_num_threads()
    run(replace(SMALL, threads=before + 1), num_requests=3)
    assert torch.get_num_threads() == before
    assert vars(draft_assembler)["launch"] is launch.launch


def test_rows_differ_from_request_to_request() -> None:
    """Guards against rows so alike that a swapped one goes unnoticed."""

    def row(number: int, seed: int = 5) -> bytes:
        pooled = RowSource(4, 24, torch.bfloat16, seed).receive(number)
        assert (len(pooled.topk_p), len(pooled.topk_index), len(pooled.hidden_states)) == (16, 16, 24)
        return bytes(pooled.topk_p.view(torch.uint8)) + bytes(pooled.hidden_states.view(torch.uint8))

    source = RowSource(20, 24, torch.bfloat16, 5)
    assert len(source.receive(0).topk_p) == 20
    hidden = {bytes(source.receive(n).hidden_states.view(torch.uint8)) for n in range(2000)}
    assert len(hidden) == 2000
    assert row(3) == row(3) != row(3, seed=6)


def test_pool_indices_are_distinct_among_the_living() -> None:
    indices = PoolIndices(4)
    assert [indices.take(end) for end in (5, 3, 4)] == [1, 2, 3]
    assert (indices.num_free, indices.next_end) == (0, 3)
    indices.free_until(4)
    assert [indices.take(9), indices.take(9)] == [2, 3]
    assert indices.num_free == 0


def test_same_bytes() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(torch.tensor([1, 2]), torch.tensor([1]))
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([0], dtype=torch.int32))
