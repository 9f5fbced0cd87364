"""Rows of arriving requests in the mailbox: real `_commit_transfer_to_req`, `get_buf`, builder and relay of sglang."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from nodes import Twins, assert_same, assert_same_inputs
from sglang.srt.disaggregation import decode

import draftgather as dg
from draftgather import draft_assembler
from draftgather.dropin import Mode
from helpers import FakeMarker

ROWS = ("output_topk_p", "output_topk_index", "hidden_states_tensor")


@pytest.fixture
def arrivals(drop_in, choose):
    """Two nodes; ours keeps rows in a mailbox of 8 slots."""
    choose(mailbox_slots=8)
    twins = Arrivals(drop_in)
    drop_in.check_arrivals([], [], twins.ours.metadata, lambda req: False)
    return twins


class Arrivals(Twins):
    """Two nodes whose transfer queues are sglang's own."""

    def __init__(self, drop_in, **options) -> None:
        super().__init__(drop_in, **options)
        self.settle()
        self.queues = {id(node): queue_of(node) for node in self.nodes}

    def commit(self, node, slot, *, room=None, is_fake=False, req=None):
        """One finished transfer; the request, new or given."""
        if req is None:
            req = node.request(slot + 1, 0 if is_fake else slot + 1 if room is None else room, is_fake=is_fake)
            req.vocab_size, req.return_logprob, req.return_sampling_mask = 1 << 17, False, False
            req.finished_reason = None
            req.time_stats = req.sampling_params = Anything()
            req.pd_rebootstrap_forced_output_id = None
        decode_req = Anything(req=req, metadata_buffer_index=slot, is_rebootstrap=False, hicache_restore_status=None)
        self.queues[id(node)]._commit_transfer_to_req(decode_req)
        return req

    def commit_both(self, slot, **how):
        return self.both(lambda node: self.commit(node, slot, **how))

    def process_reqs(self, stock_reqs, our_reqs):
        """Both nodes process a batch of their requests; the batches."""

        def process(node):
            reqs = stock_reqs if node is self.stock else our_reqs
            batch = node.prebuilt(reqs, [1000 + req.req_pool_idx for req in reqs])
            node.process(batch)
            return batch

        return self.both(process)

    @property
    def num_used(self) -> int:
        self.drop_in.arrivals.free_ended()
        return 8 - self.drop_in.arrivals.mailbox.num_free


class Anything(SimpleNamespace):
    """Takes every call, and unlike a mock keeps no reference to what it was given."""

    def __getattr__(self, name):
        return Anything()

    def __call__(self, *given, **named):
        return Anything()


def queue_of(node):
    queue = decode.DecodeTransferQueue.__new__(decode.DecodeTransferQueue)
    vars(queue).update(
        queue=[],
        metadata_buffers=node.metadata,
        scheduler=Anything(enable_decode_hicache=False, enable_hisparse=False, server_args=node.server_args),
        tree_cache=Anything(),
        tp_rank=0,
        spec_algorithm=node.algorithm,
        enable_staging=False,
        enable_deferred_kv_release=False,
        enable_host_receive=False,
        _commit_hicache_local_restore_to_req=lambda decode_req: None,
    )
    queue.scheduler.kv_checksum_computer = None
    return queue


def assert_same_rows(stock, ours) -> None:
    for name in ROWS:
        assert_same(getattr(stock, name), getattr(ours, name), name)


def test_arriving_rows_are_views_of_a_record(drop_in, arrivals):
    """Guards whoever else reads the request's rows: the same shapes and bytes as sglang's clones."""
    stock, ours = arrivals.commit_both(3)
    assert_same_rows(stock, ours)
    mailbox = drop_in.arrivals.mailbox
    info = mailbox.buffer_info()
    for name in ROWS:
        assert info.address <= getattr(ours, name).data_ptr() < info.address + info.num_bytes
    assert (ours.draft_owner, mailbox.owners[ours.draft_slot]) == (4, 4)
    assert not hasattr(stock, "draft_slot") and ours.output_ids == stock.output_ids
    # The metadata slot is the next one's at once.
    arrivals.ours.metadata.output_hidden_states[3] = -1
    assert_same_rows(stock, ours)
    assert (drop_in.stats.kept, arrivals.num_used) == (1, 1)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two-calls"])
@pytest.mark.parametrize("mixed", [False, True], ids=["slots", "mixed"])
def test_builder_takes_the_slots(drop_in, choose, arrivals, monkeypatch, fused, mixed):
    """Guards the bytes of batch and relay; mixed: some rows came before the mailbox, or found it full."""
    choose(fused=fused)
    pairs = [arrivals.commit_both(slot) for slot in (5, 2, 7)]
    if mixed:
        drop_in.mode = Mode.OFF
        pairs.insert(1, arrivals.commit_both(6))
        drop_in.mode = Mode.ON
    routes = []
    real = draft_assembler.DraftAssembler._batch

    def seen(self, located, *given):
        routes.append(located.route)
        return real(self, located, *given)

    monkeypatch.setattr(draft_assembler.DraftAssembler, "_batch", seen)
    stock, ours = arrivals.process_reqs(*map(list, zip(*pairs, strict=True)))
    assert_same_inputs(stock.spec_info, ours.spec_info)
    arrivals.assert_equal_relays()
    assert routes == ["pointers" if mixed else "slots"]
    assert (drop_in.stats.batches, drop_in.stats.fused) == (1, int(fused))


@pytest.mark.parametrize("multi_layer", [False, True])
def test_the_number_of_states_is_read_at_each_call(drop_in, arrivals, multi_layer):
    """Guards records as wide as metadata rows: adaptive speculation asks for other columns of the same record."""
    pairs = [arrivals.commit_both(slot) for slot in (1, 2)]
    reqs = list(map(list, zip(*pairs, strict=True)))
    arrivals.options = arrivals.options
    changed = {"speculative_eagle_topk": 4, "speculative_num_steps": 3, "enable_multi_layer_eagle": multi_layer}
    for node in arrivals.nodes:
        node.future_map.topk_p_buf = node.future_map.topk_index_buf = None

    def process(node):
        node.options = node.options
        batch = node.prebuilt(reqs[node is arrivals.ours])
        batch.enable_overlap = False
        with node.settings(**changed):
            node.process(batch)
        return batch

    stock, ours = arrivals.both(process)
    assert ours.spec_info.topk_p.shape == (2, 12 if multi_layer else 4)
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert drop_in.stats.batches == 1


def test_an_aborted_transfer_leaves_no_record(drop_in, arrivals, monkeypatch):
    """Guards against a leak: the metadata of another room, and a room that is not there."""
    monkeypatch.setattr(decode, "prepare_abort", lambda *given, **named: None)
    for room in (999, 1234):
        ours = arrivals.run(arrivals.ours, Mode.ON, lambda node, room=room: arrivals.commit(node, 3, room=room))
        assert not hasattr(ours, "draft_slot") and ours.hidden_states_tensor is None
    arrivals.ours.metadata.bootstrap_room[3, 0] = 0
    arrivals.commit(arrivals.ours, 3)
    assert (arrivals.num_used, drop_in.stats.kept) == (0, 0)


def test_fake_transfers_have_an_owner_too(drop_in, arrivals):
    """Guards owner 0: sglang's warm-up and health requests use room 0, several at once."""
    pairs = [arrivals.commit_both(slot, is_fake=True) for slot in (3, 4)]
    for stock, ours in pairs:
        assert_same_rows(stock, ours)
        assert ours.draft_owner == 0
    stock, ours = arrivals.process_reqs(*map(list, zip(*pairs, strict=True)))
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert arrivals.num_used == 2


def test_retracted_requests_are_read_again(drop_in, arrivals):
    """Guards a resumed request: pool index and metadata slot are others' by now, its record is its own."""
    pairs = [arrivals.commit_both(slot) for slot in (1, 2)]
    first = arrivals.process_reqs(*map(list, zip(*pairs, strict=True)))[1].spec_info
    others = [arrivals.commit_both(slot) for slot in (3, 4, 1, 2)]
    arrivals.process_reqs(*map(list, zip(*others, strict=True)))
    for stock, ours in pairs:
        for req in (stock, ours):
            req.req_pool_idx += 20
    stock, ours = arrivals.process_reqs(*map(list, zip(*pairs, strict=True)))
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert ours.spec_info.hidden_states.equal(first.hidden_states)
    arrivals.assert_equal_relays()


def test_a_rebootstrap_replaces_the_record(drop_in, arrivals):
    """Guards the new row of a request, and against the old record's leak."""
    stock, ours = arrivals.commit_both(1)
    former = ours.draft_slot
    arrivals.both(lambda node: arrivals.commit(node, 6, req=adopt(stock if node is arrivals.stock else ours, 7)))
    assert_same_rows(stock, ours)
    assert ours.draft_slot != former and ours.draft_owner == 7
    assert (arrivals.num_used, drop_in.stats.kept) == (1, 2)
    ours = None
    gc.collect()
    assert arrivals.num_used == 0


@pytest.mark.parametrize("why", ["full", "off"])
def test_a_rebootstrap_without_a_record_forgets_the_former(drop_in, arrivals, why):
    """Guards the stale row: the request has clones of the new one now, and is not read from its old record."""
    pair = arrivals.commit_both(1)
    others = [arrivals.commit_both(slot) for slot in range(20, 27)] if why == "full" else []
    mode = Mode.ON if why == "full" else Mode.OFF
    arrivals.run(arrivals.stock, Mode.OFF, lambda node: arrivals.commit(node, 6, req=adopt(pair[0], 7)))
    arrivals.run(arrivals.ours, mode, lambda node: arrivals.commit(node, 6, req=adopt(pair[1], 7)))
    assert_same_rows(*pair)
    assert drop_in.stats.mailbox_full == len(others) // 7 and arrivals.num_used == len(others)
    stock, ours = arrivals.process_reqs(*map(list, zip(pair, *others, strict=True)))
    assert_same_inputs(stock.spec_info, ours.spec_info)
    arrivals.assert_equal_relays()
    assert drop_in.stats.batches == 1


def adopt(req, room):
    req.bootstrap_room = room
    return req


def test_a_full_mailbox_falls_back_to_clones(drop_in, arrivals, caplog):
    """Guards the scheduler's thread: it neither waits nor fails; the row is sglang's clone, and counted."""
    pairs = [arrivals.commit_both(slot) for slot in range(10)]
    assert (drop_in.stats.kept, drop_in.stats.mailbox_full, drop_in.stats.fallbacks) == (8, 2, 0)
    for stock, ours in pairs:
        assert_same_rows(stock, ours)
    assert [hasattr(ours, "draft_slot") for _, ours in pairs] == [True] * 8 + [False] * 2
    stock, ours = arrivals.process_reqs(*map(list, zip(*pairs, strict=True)))
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert caplog.text.count("the mailbox is full") == 1
    pairs.clear()
    del stock, ours
    gc.collect()
    assert arrivals.num_used == 0


def test_no_leak_over_ten_thousand_lives(drop_in, arrivals):
    """Guards the pool: requests that end in any order, some of them without ever being built."""
    living: dict[int, object] = {}
    for i in range(10_000):
        slot = i % 60
        living[i * 7 % 5] = arrivals.commit(arrivals.ours, slot)
        if i % 100 == 0:
            batch = arrivals.ours.prebuilt([living[i * 7 % 5]])
            arrivals.ours.process(batch)
            del batch
    assert drop_in.stats.kept == 10_000 and drop_in.stats.mailbox_full == 0
    assert arrivals.num_used == len(living) == 5
    living.clear()
    gc.collect()
    assert arrivals.num_used == 0


def test_a_record_is_not_freed_while_a_launch_reads_it(drop_in, choose, arrivals, monkeypatch):
    """Guards the bytes of a request that ends while its batch is in flight."""
    marker, real = FakeMarker(), draft_assembler.launch
    monkeypatch.setattr(draft_assembler, "launch", lambda *given: real(*given) and marker)
    ours = arrivals.commit(arrivals.ours, 3)
    batch = arrivals.ours.prebuilt([ours])
    arrivals.ours.process(batch)
    del ours, batch
    gc.collect()
    assert arrivals.num_used == 1
    marker.is_done = True
    assert arrivals.num_used == 0


def test_another_requests_record_is_refused(drop_in, arrivals):
    """Guards a request that outlives its record, copied by hand: sglang would read another's row."""
    ours = arrivals.commit(arrivals.ours, 3)
    copied = type(ours)(**vars(ours))
    slot = ours.draft_slot
    del ours
    gc.collect()
    assert arrivals.num_used == 0
    others = [arrivals.commit(arrivals.ours, s) for s in range(10, 18)]
    assert slot in [other.draft_slot for other in others]
    with pytest.raises(dg.SlotError, match=r"'request-4'.*which is owned by \d+, expected owner 4"):
        arrivals.ours.process(arrivals.ours.prebuilt([copied]))
    assert drop_in.stats.refused == 1


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.SHADOW])
def test_only_in_mode_on(drop_in, arrivals, mode):
    """Guards the other modes: off and shadow leave the requests as sglang makes them."""
    drop_in.mode = mode
    assert not hasattr(arrivals.commit(arrivals.ours, 3), "draft_slot")
    assert drop_in.stats.kept == 0


def test_our_failure_leaves_sglangs_clones(drop_in, arrivals, monkeypatch, caplog):
    """Guards live traffic, and the slot that the failed row had."""
    stock = arrivals.run(arrivals.stock, Mode.OFF, lambda node: arrivals.commit(node, 3))
    for owner, name in ((dg.DraftMailbox, "admit"), (drop_in.arrivals, "free_ended")):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, lambda *given, **named: 1 / 0)
            ours = arrivals.commit(arrivals.ours, 3)
        assert_same_rows(stock, ours)
    assert (drop_in.stats.fallbacks, drop_in.stats.kept, arrivals.num_used) == (2, 0, 0)
    assert caplog.text.count("failed at an arriving row") == 1


def test_other_algorithms_keep_no_rows(drop_in, arrivals):
    """Guards requests that bring no draft rows."""
    queue = arrivals.queues[id(arrivals.ours)]
    queue.spec_algorithm = type(queue.spec_algorithm).from_string(None)
    arrivals.commit(arrivals.ours, 3)
    assert (drop_in.stats.kept, arrivals.num_used) == (0, 0)


def test_records_are_as_wide_as_metadata_rows(drop_in, arrivals):
    fields = {f.name: (f.width, f.dtype) for f in drop_in.arrivals.mailbox.fields}
    assert fields == {
        "topk_p": (16, torch.float32),
        "topk_index": (16, torch.int64),
        "hidden_states": (64, torch.bfloat16),
    }


def test_doctor_says_what_it_takes(monkeypatch):
    from draftgather import sglang_plugin

    monkeypatch.setenv("DRAFTGATHER_SGLANG_MAILBOX", "1")
    assert (
        "4096 slots of 14592 bytes (hidden 7168 torch.bfloat16), 57.0 MiB a rank" in sglang_plugin.describe_installed()
    )
    monkeypatch.setenv("DRAFTGATHER_SGLANG_MAILBOX", "yes")
    assert "DRAFTGATHER_SGLANG_MAILBOX is 'yes', expected one of 0, 1" in sglang_plugin.describe_installed()
    monkeypatch.setenv("DRAFTGATHER_SGLANG_MAILBOX", "0")
    assert "mailbox" not in sglang_plugin.describe_installed()


def test_rows_of_another_kind_are_not_kept(drop_in, choose, caplog):
    """Guards metadata that lies on a device, or is not EAGLE's: sglang goes on as it was."""
    choose(mailbox_slots=8)
    twins = Arrivals(drop_in)
    twins.ours.metadata.output_topk_index = twins.ours.metadata.output_topk_index.int()
    for _ in range(3):
        drop_in.check_arrivals([], [], twins.ours.metadata, lambda req: False)
    assert drop_in.arrivals is None and drop_in._hidden == (64, torch.bfloat16)
    assert drop_in.stats.fallbacks == 1
    assert not hasattr(twins.commit(twins.ours, 3), "draft_slot")
