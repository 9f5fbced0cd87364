"""The replay: that it is right where all is right, and that it sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from draftgather import future_map, launch
from draftgather.arrivals import Arrival, generate
from draftgather.demo import DemoFigures, DemoOptions, PoolIndices, RowSource, replay, same_bytes
from draftgather.draft_input import EagleDraftInput
from draftgather.kernels.gather_rows import LaunchDescriptor, gather_rows_torch

SMALL = DemoOptions(hidden_size=24, num_slots=64)


def run(options: DemoOptions = SMALL, num_requests: int = 300) -> DemoFigures:
    return replay(generate(num_requests, options.seed), options)


@pytest.fixture()
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[LaunchDescriptor], None], int], None]:
    """Change what the nth relaying launch of a batch has written."""

    def install(change: Callable[[LaunchDescriptor], None], nth: int) -> None:
        seen = 0

        def spoiled(descriptor: LaunchDescriptor) -> None:
            nonlocal seen
            gather_rows_torch(descriptor)
            if descriptor.relay is not None and descriptor.num_rows > 1:
                seen += 1
                if seen == nth:
                    change(descriptor)

        monkeypatch.setattr(launch, "gather_rows_torch", spoiled)

    return install


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


def swap_rows(descriptor: LaunchDescriptor) -> None:
    output = descriptor.outputs[2]
    assert output is not None
    output.tensor[:2] = output.tensor[:2].flip(0)


def flip_a_bit(descriptor: LaunchDescriptor) -> None:
    output = descriptor.outputs[0]
    assert output is not None
    output.tensor.view(torch.int32)[0, -1] ^= 1


def change_a_length(descriptor: LaunchDescriptor) -> None:
    assert descriptor.relay is not None
    descriptor.relay.seq_lens_buf[descriptor.relay.future_indices[0]] += 1


def change_a_foreign_row(descriptor: LaunchDescriptor) -> None:
    """Row 0 is in no batch: only the last look at the whole map sees it."""
    assert descriptor.relay is not None
    descriptor.relay.bonus_tokens_buf[0] = 1


@pytest.mark.parametrize("change", [swap_rows, flip_a_bit, change_a_length, change_a_foreign_row])
def test_what_is_spoiled_is_counted(spoil: Any, change: Callable[[LaunchDescriptor], None]) -> None:
    """Guards against a demo that cannot fail."""
    spoil(change, nth=3)
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
    from draftgather import draft_assembler

    once = draft_assembler.DraftAssembler.assemble_slots

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        once(self, *args, **kwargs)
        return once(self, *args, **kwargs)

    monkeypatch.setattr(draft_assembler.DraftAssembler, "assemble_slots", twice)
    figures = run()
    assert figures.launches == 2 * figures.batches


def test_resolve_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither are launches outside of the assembler."""
    calls = []
    resolve = future_map.FutureMap.resolve
    monkeypatch.setattr(future_map.FutureMap, "resolve", lambda self, batch: (calls.append(1), resolve(self, batch)))
    figures = run()
    assert len(calls) == figures.launches == figures.batches


def test_threads_and_launch_are_restored() -> None:
    from draftgather import draft_assembler

    torch.set_num_threads(2)
    run(num_requests=3)
    assert torch.get_num_threads() == 2
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
