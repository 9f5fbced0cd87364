"""Arrived rows that are not theirs: what the gate counts, and that a request fails on every rank or on none."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nodes import takes
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import KVPoll

from draftgather.bench.sglang_node import Node, NodeOptions
from draftgather.dropin import BadRows, Mode

RANK = Path(__file__).parent / "gate_rank.py"


def ranks(tmp_path, policy, fault, world=2):
    """What each rank says."""
    command = [sys.executable, "-W", "ignore", str(RANK)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store"), policy, fault],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0] * world, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("fault", ["unwritten", "owner"])
def test_abort_fails_the_request_on_every_rank(tmp_path, fault):
    """The row is bad on one rank only; both fail it, with its slot and its KV freed, and serve the others."""
    answers = ranks(tmp_path, "abort", fault)
    for answer in answers:
        assert answer["transferred"] == ["r0", "r2"]
        assert list(answer["aborted"]) == answer["released"] == ["r1"]
        assert answer["left"] == [] and answer["fallbacks"] == 0
    assert [sum(answer["bad_rows"].values()) for answer in answers] == [0, 1]
    said = "zero: prefill sent none" if fault == "unwritten" else "belongs to room 999, expected 101"
    assert said in answers[1]["aborted"]["r1"]


def test_warn_is_what_sglang_does(tmp_path):
    """An unwritten row is counted, and the request goes on: verification corrects the draft."""
    for rank, answer in enumerate(ranks(tmp_path, "warn", "unwritten")):
        assert answer["transferred"] == ["r0", "r1", "r2"]
        assert answer["bad_rows"] == ({"unwritten": 1} if rank == 1 else {})


def test_good_rows_pass(tmp_path):
    for answer in ranks(tmp_path, "abort", "none"):
        assert answer["transferred"] == ["r0", "r1", "r2"] and answer["bad_rows"] == {}


def test_a_full_mailbox_on_one_rank_changes_nothing(tmp_path):
    """Guards tensor parallelism: where a row is kept is a rank's own affair, what becomes of its request is not."""
    first, last = ranks(tmp_path, "abort", "full")
    assert ((first["kept"], first["full"]), (last["kept"], last["full"])) == ((3, 0), (1, 2))
    for name in ("transferred", "aborted", "left", "released", "rows", "bad_rows", "fallbacks"):
        assert first[name] == last[name]
    assert first["transferred"] == ["r0", "r1", "r2"]


# -- in this process: the gate alone


@pytest.fixture
def node():
    node = Node(NodeOptions(max_requests=8))
    row = {"topk_p": torch.rand(4), "topk_index": torch.arange(4), "hidden_states": torch.randn(64)}
    zero = {name: torch.zeros_like(tensor) for name, tensor in row.items()}
    node.write_row(0, row, room=1)
    node.write_row(1, zero, room=2)
    node.write_row(2, row, room=77)
    node.write_row(3, zero, room=0)
    return node


def decode_req(slot, room, host="prefill"):
    req = SimpleNamespace(rid=f"r{slot}", bootstrap_room=room, bootstrap_host=host)
    return SimpleNamespace(req=req, metadata_buffer_index=slot, kv_receiver=SimpleNamespace())


def gate(node, polls, reqs):
    settings = [node.server_args] if takes(utils._apply_metadata_gate, "server_args") else []
    utils._apply_metadata_gate(polls, reqs, node.metadata, *settings)
    return polls


@pytest.fixture
def arrivals():
    return [decode_req(0, 1), decode_req(1, 2), decode_req(2, 3), decode_req(3, 0, "2.2.2.2"), decode_req(3, 9)]


S, F, T = int(KVPoll.Success), int(KVPoll.Failed), int(KVPoll.Transferring)


def test_each_fault_is_counted_and_logged_once(drop_in, node, arrivals, caplog):
    """Requests are polled again until all ranks have them."""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert gate(node, [S] * 5, arrivals) == [S, S, S, S, T]
    assert drop_in.stats.bad_rows == {"unwritten": 1, "wrong owner": 1}
    assert caplog.text.count("request r1 (bootstrap_room=2)") == 1
    assert caplog.text.count("request r2 (bootstrap_room=3): its metadata row 2 belongs to room 77") == 1


def test_abort_marks_failed_before_the_all_reduce(drop_in, choose, node, arrivals):
    choose(bad_rows=BadRows.ABORT)
    assert gate(node, [S] * 5, arrivals) == [S, F, F, S, T]
    assert gate(node, [T] * 5, arrivals) == [T] * 5  # what has not arrived is not looked at


@pytest.mark.parametrize("mode", [Mode.SHADOW, Mode.OFF])
def test_shadow_and_off_fail_nothing(drop_in, choose, node, arrivals, mode):
    choose(bad_rows=BadRows.ABORT)
    drop_in.mode = mode
    assert gate(node, [S] * 5, arrivals) == [S, S, S, S, T]
    assert sum(drop_in.stats.bad_rows.values()) == (2 if mode is Mode.SHADOW else 0)


def test_other_algorithms_rows_are_not_looked_at(drop_in, choose, arrivals):
    """Without EAGLE nobody writes these rows."""
    choose(bad_rows=BadRows.ABORT)
    node = Node(NodeOptions(max_requests=8, algorithm="STANDALONE"))
    node.metadata.bootstrap_room[:5, 0] = 5
    assert gate(node, [S] * 3, arrivals[:3]) == [S, S, S]
    assert not drop_in.stats.bad_rows


def test_a_failure_of_ours_leaves_sglangs_polls(drop_in, choose, node, arrivals, caplog):
    choose(bad_rows=BadRows.ABORT)
    arrivals[1].metadata_buffer_index = "one"
    arrivals[1].req.bootstrap_host = "2.2.2.2"
    del arrivals[0].req.rid, arrivals[0].req.bootstrap_room
    assert gate(node, [S] * 5, arrivals) == [S, S, S, S, T]
    assert drop_in.stats.fallbacks == 1 and "failed to look at arrived rows" in caplog.text
