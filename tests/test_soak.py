"""The soak: that it is well where all is well, and that it sees what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import draftgather as dg
from draftgather import draft_assembler, mailbox
from draftgather.bench import soak as soak_module
from draftgather.bench.cli import app
from draftgather.bench.demo import same_bytes
from draftgather.bench.soak import DRIFT_BOUND_BYTES, NUM_SAMPLES, Reference, SoakOptions, soak
from draftgather.machine import Machine

# As short as can be: until each fault has had its turn.
SMALL = SoakOptions(minutes=0.0, hidden_size=24, num_slots=16, max_batch_size=4, fault_every=1)


def spoil(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[[Any], None], nth: int) -> None:
    """Change what the nth call of a method has returned."""
    original, calls = getattr(owner, name), 0

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = original(*args, **kwargs)
        calls += 1
        if calls == nth:
            change(args if result is None else result)
        return result

    monkeypatch.setattr(owner, name, spoiled)


def test_all_is_well(machine: Machine) -> None:
    """Guards against a wrong byte, a fault that is not refused and a lost slot, on every implementation."""
    seen: list[int] = []
    report = soak(replace(SMALL, machine=machine), seen.append)
    assert report.problems == []
    assert report.mismatches == report.leaked_slots == 0
    assert len(report.faults) == 14
    assert all(fault.injected == fault.refused >= 1 for fault in report.faults.values())
    assert min(report.rows_own_copy, report.rows_resolved, report.rows_stashed, report.batches, report.overflows) > 0
    assert report.rows_assembled > report.rows_own_copy
    assert sum(seen) == NUM_SAMPLES
    assert (report.staging_buffers > 0) == machine.has_kernel


@pytest.mark.parametrize(
    "options",
    [
        replace(SMALL, hidden_size=1, topk=1, seed=3),
        replace(SMALL, topk=20, num_slots=64, max_batch_size=64, fault_every=8),
        SoakOptions(minutes=0.01, hidden_size=64),
    ],
    ids=["one wide", "more slots", "defaults"],
)
def test_other_sizes(options: SoakOptions) -> None:
    report = soak(options)
    assert report.problems == []


def test_all_ways_of_life() -> None:
    """Guards against a soak in which nobody aborts, is retracted or comes back, and no slot is used again."""
    report = soak(replace(SMALL, num_slots=64, max_batch_size=32, fault_every=20))
    assert min(report.aborts, report.retractions, report.resumes, report.slot_reuses) > 10
    assert report.resumes <= report.retractions


def flip_a_bit(batch: dg.DraftBatch) -> None:
    batch.tensors["hidden_states"].view(torch.int16)[-1, -1] ^= 1


def swap_a_row(batch: dg.DraftBatch) -> None:
    batch.tensors["topk_index"][0] = batch.tensors["topk_index"][0].flip(0)


# The warm-up makes the first calls, which nobody looks at.
@pytest.mark.parametrize(("name", "nth"), [("assemble_slots", 40), ("assemble_rows", 9)])
@pytest.mark.parametrize("change", [flip_a_bit, swap_a_row])
def test_a_wrong_byte_is_counted(
    monkeypatch: pytest.MonkeyPatch, name: str, nth: int, change: Callable[[dg.DraftBatch], None]
) -> None:
    """Guards against a soak that cannot fail."""
    spoil(monkeypatch, dg.DraftAssembler, name, change, nth)
    report = soak(replace(SMALL, fault_every=4))
    assert report.mismatches == 1
    assert "1 of" in report.problems[0]


@pytest.mark.parametrize("name", ["stash", "publish", "resolve"])
def test_a_wrong_relay_row_is_counted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards against a future map that nobody looks at."""

    def change(args: tuple[Any, ...]) -> None:
        future_map, given = args[:2]
        if name == "stash":
            future_map.buffers["topk_p"][given] = 2.0
        elif name == "publish":
            future_map.new_seq_lens_buf[given] += 1
        else:
            given.spec_info.bonus_tokens[-1] += 1

    spoil(monkeypatch, dg.FutureMap, name, change, nth=20)
    report = soak(replace(SMALL, num_slots=64, fault_every=4))
    assert report.mismatches > 0
    [problem] = report.problems
    assert "resolve" in problem


def test_a_filter_in_the_wrong_order_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverse(self: dg.EagleDraftInput, kept: torch.Tensor) -> None:
        assert self.future_indices is not None
        self.future_indices = self.future_indices[kept].flip(0)

    monkeypatch.setattr(dg.EagleDraftInput, "filter_batch", reverse)
    assert soak(SMALL).mismatches > 0


def test_a_leaked_slot_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a slot that a release forgets."""
    release, calls = dg.DraftMailbox.release, 0

    def forgetful(self: dg.DraftMailbox, slots: Any) -> None:
        nonlocal calls
        is_batch = isinstance(slots, list) and len(slots) > 0
        calls += is_batch
        release(self, slots[1:] if is_batch and calls == 2 else slots)

    monkeypatch.setattr(dg.DraftMailbox, "release", forgetful)
    report = soak(SMALL)
    assert report.leaked_slots == 1
    assert report.problems[-1].endswith("1 slots leaked")


def test_a_slot_that_is_freed_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a count that sees only slots that are held too long."""
    spoil(monkeypatch, dg.DraftMailbox, "accept", lambda args: args[0].release(args[1][0]), nth=2)
    assert "which is free" in soak(SMALL).problems[0]


def accept_anything(self: Any, slot: int, owner: int) -> None:
    return None


@pytest.mark.parametrize(
    ("owner", "name", "broken", "faults"),
    [
        (dg.DraftMailbox, "_tag_fault", accept_anything, ["former generation", "torn record", "foreign layout"]),
        (mailbox, "raise_problems", lambda problems: None, ["torn record", "double release"]),
        (draft_assembler, "are_slots_good", lambda *_: True, ["wrong owner", "unwritten slot"]),
        (draft_assembler, "check_relay", lambda *_: None, ["duplicate future index"]),
    ],
)
def test_a_fault_that_is_not_refused_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any, faults: list[str]
) -> None:
    """Guards against checks that are no longer made."""
    monkeypatch.setattr(owner, name, broken)
    report = soak(SMALL)
    assert report.problems
    for fault in faults:
        assert report.faults[fault].injected > report.faults[fault].refused
    assert any(f"{fault}: expected" in problem for problem in report.problems for fault in faults)


def test_a_refusal_that_has_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error that comes too late: the sentinels must show it."""
    original = draft_assembler.check_relay

    def late(relay: dg.Relay, *args: Any) -> None:
        try:
            original(relay, *args)
        except dg.RelayError:
            relay.future_map.new_seq_lens_buf[relay.future_indices[0]] = relay.seq_lens[0]
            raise

    monkeypatch.setattr(draft_assembler, "check_relay", late)
    report = soak(SMALL)
    assert report.faults["duplicate future index"].refused == 0
    assert "duplicate future index: memory was changed" in report.problems[0]


def test_something_unexpected_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback instead of a report."""

    def broken(self: Any, *args: Any) -> None:
        raise dg.RelayError("no such thing")

    monkeypatch.setattr(dg.FutureMap, "publish", broken)
    report = soak(SMALL)
    [problem] = report.problems
    assert report.leaked_slots is None
    assert problem.startswith("tick ") and "RelayError: no such thing (test_soak.py:" in problem


def test_drift_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against memory that grows; and against a drift of 0 where nothing was measured."""
    samples = iter(range(0, 1 << 62, DRIFT_BOUND_BYTES // 10))
    monkeypatch.setattr(soak_module, "_resident_bytes", lambda: 1 + next(samples))
    report = soak(replace(SMALL, minutes=0.01, num_slots=64))
    assert report.drift_bytes is not None and report.drift_bytes > DRIFT_BOUND_BYTES
    assert "resident memory grew" in report.problems[-1]
    monkeypatch.setattr(soak_module, "_resident_bytes", lambda: 0)
    assert soak(SMALL).drift_bytes is None


def test_the_reference_tells_requests_apart() -> None:
    """Guards against rows so alike that a stale or swapped one goes unnoticed."""
    reference, numbers = Reference(topk=4, hidden_size=24, seed=2), list(range(1000))
    rows = reference.relayed(numbers, torch.device("cpu"))
    for tensor in rows.values():
        assert len({bytes(row.view(torch.uint8)) for row in tensor.view(1000, -1)}) == 1000
    for name, row in reference.row(7).items():
        assert same_bytes(row, rows[name][7])
        assert not same_bytes(row, Reference(topk=4, hidden_size=24, seed=3).row(7)[name])


def call(*args: object) -> Any:
    arguments = ("soak", "--minutes", 0.001, "--hidden-size", 16, "--num-slots", 64, *args)
    return CliRunner().invoke(app, [str(arg) for arg in arguments])


def test_the_command(tmp_path: Path) -> None:
    result = call("--seed", 5, "--topk", 2, "--json", tmp_path / "report.json")
    assert result.exit_code == 0
    assert result.stderr == ""
    cells = [line.split("│")[1:3] for line in result.stdout.splitlines() if "│" in line]
    lines = {name.strip(): value.strip() for name, value in cells}
    assert lines["mismatches"] == lines["slots leaked"] == "0"
    report = json.loads((tmp_path / "report.json").read_text())
    assert lines["rows assembled, compared"] == f"{report['rows_assembled']:,}"
    torn = report["faults"]["torn record"]
    assert lines["torn record"] == f"{torn['injected']} injected, {torn['refused']} refused"
    assert (report["options"]["seed"], report["options"]["topk"], report["problems"]) == (5, 2, [])


def test_a_mismatch_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, dg.DraftAssembler, "assemble_slots", flip_a_bit, nth=40)
    result = call("--json", "-")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["mismatches"] == 1
    assert "rows differ" in result.stderr


@pytest.mark.parametrize("args", [("--minutes", "nan"), ("--minutes", 0), ("--num-slots", 2), ("--device", "tpu")])
def test_bad_options_are_exit_code_2(args: Iterable[object]) -> None:
    assert call(*args).exit_code == 2
