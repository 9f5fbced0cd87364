"""The builder beside sglang's own, on the real process_prebuilt, FutureMap and resolve: every byte the same."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from nodes import Twins, assert_same, assert_same_inputs, takes
from sglang.srt.managers import overlap_utils
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative import eagle_disaggregation
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import draftgather as dg
from draftgather.bench.sglang_node import Node, NodeOptions, relay_buffers
from draftgather.dropin import DropIn, Mode

# Up to 0.5.16 resolve calls record_stream on CPU tensors and cannot run here: buffers are compared instead.
_resolve_source = overlap_utils.FutureMap._resolve_spec_extras
RESOLVES_ON_CPU = "cpu" in " ".join(map(str, _resolve_source.__code__.co_consts))

CONFIGURATIONS = [
    {"topk": 1},
    {"topk": 4},
    {"topk": 8},
    {"topk": 4, "num_steps": 3},
    {"topk": 4, "dtype": torch.float32},
]


def ids(value):
    return "-".join(str(v) for v in value.values()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=ids)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two-calls"])
def test_every_output_and_buffer_is_sglangs(drop_in, choose, configuration, overlap, fused):
    choose(fused=fused)
    twins = Twins(drop_in, enable_overlap=overlap, **configuration)
    twins.settle()
    batches = [[5], [0, 1], [63, 3, 7, 11], list(range(20, 36)), list(reversed(range(64)))]
    for slots in batches:
        stock, ours = twins.process(slots)
        assert_same_inputs(stock.spec_info, ours.spec_info)
        twins.assert_equal_relays()
        assert_same(stock.input_ids, ours.input_ids, "input_ids")
        if overlap and RESOLVES_ON_CPU:
            twins_resolve(twins, stock, ours)
            twins.assert_equal_relays()
    assert drop_in.stats.batches == len(batches)
    assert drop_in.stats.fused == (len(batches) if fused and overlap else 0)
    assert not drop_in.stats.handed_over and not drop_in.stats.fallbacks and not drop_in.stats.bad_rows


def twins_resolve(twins, stock, ours):
    twins.stock.resolve(stock)
    twins.ours.resolve(ours)
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert_same(stock.seq_lens, ours.seq_lens, "seq_lens")


def test_first_batch_lays_out_the_relay_as_sglangs(drop_in, choose):
    """Guards the lazy layout: our first batch makes the same buffers, and is not fused."""
    choose(fused=True)
    twins = Twins(drop_in)
    stock, ours = twins.process(range(64))
    for node in twins.nodes:
        for buffer in relay_buffers(node.future_map).values():
            buffer[0] = 0
    twins.assert_equal_relays()
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert (drop_in.stats.batches, drop_in.stats.fused) == (1, 0)
    twins.process([1, 2])
    assert drop_in.stats.fused == 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two-calls"])
def test_merge_and_filter_afterwards(drop_in, choose, fused):
    choose(fused=fused)
    twins = Twins(drop_in)
    twins.settle()
    running = twins.process([1, 2, 3, 4])
    arrived = twins.process([10, 11])
    keep = torch.tensor([0, 3])
    for one, other in zip(running, arrived, strict=True):
        if takes(EagleDraftInput.filter_batch, "has_been_filtered"):
            one.spec_info.filter_batch(keep, has_been_filtered=False)
        else:
            one.spec_info.filter_batch(keep)
        one.spec_info.merge_batch(other.spec_info)
        one.req_pool_indices = one.spec_info.future_indices
    assert running[1].spec_info.future_indices.tolist() == [2, 5, 11, 12]
    assert_same_inputs(running[0].spec_info, running[1].spec_info)
    if RESOLVES_ON_CPU:
        twins_resolve(twins, *running)


def test_merge_and_filter_without_overlap(drop_in):
    twins = Twins(drop_in, enable_overlap=False)
    running, arrived = twins.process([1, 2, 3, 4]), twins.process([10, 11])
    for one, other in zip(running, arrived, strict=True):
        if takes(EagleDraftInput.filter_batch, "has_been_filtered"):
            one.spec_info.filter_batch(torch.tensor([3, 0]), has_been_filtered=False)
        else:
            one.spec_info.filter_batch(torch.tensor([3, 0]))
        one.spec_info.merge_batch(other.spec_info)
    assert len(running[1].spec_info.topk_p) == 4
    assert_same_inputs(running[0].spec_info, running[1].spec_info)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_idle_batch_takes_the_arrived_rows(drop_in, overlap):
    """An idle rank's stub is sglang's own; ours merges into it as sglang's does."""
    twins = Twins(drop_in, enable_overlap=overlap)
    twins.settle()
    stock, ours = twins.process([4, 9])
    stubs = []
    for batch in (stock, ours):
        stub = EagleDraftInput.create_idle_input(
            device="cpu", hidden_size=64, dtype=torch.bfloat16, topk=4, capture_hidden_mode=CaptureHiddenMode.LAST
        )
        if overlap:
            stub.future_indices = torch.empty(0, dtype=torch.int64)
        stub.merge_batch(batch.spec_info)
        stubs.append(stub)
    assert_same_inputs(*stubs)


def test_fake_transfers_pass_untouched(drop_in):
    """sglang's warm-up and health requests: room 0 and rows of zeros."""
    twins = Twins(drop_in)
    twins.settle()

    def process(node):
        zero = {name: torch.zeros_like(tensor) for name, tensor in node_row(node).items()}
        node.write_row(8, zero, room=0)
        batch = node.prebuilt([node.commit(8, 9, is_fake=True), node.commit(1, 2)])
        node.process(batch)
        return batch

    stock, ours = twins.both(process)
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert not ours.spec_info.hidden_states[0].any() and ours.spec_info.hidden_states[1].any()
    assert drop_in.stats.batches == 1 and not drop_in.stats.bad_rows


def node_row(node):
    m = node.metadata
    return {
        "topk_p": m.output_topk_p[0],
        "topk_index": m.output_topk_index[0],
        "hidden_states": m.output_hidden_states[0],
    }


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM", "STANDALONE"])
def test_other_algorithms_are_untouched(drop_in, algorithm):
    """What does not go through EAGLE's builder does not go through ours."""
    twins = Twins(drop_in, algorithm=algorithm)
    try:
        stock, ours = twins.process([1, 2])
    except Exception as error:
        # sglang's own, with the drop-in off: then also with it on, and the same.
        with pytest.raises(type(error)):
            twins.ours.process(twins.batch(twins.ours, [1, 2]))
    else:
        assert_same_inputs(stock.spec_info, ours.spec_info)
    assert drop_in.stats.batches == 0 and not drop_in.stats.handed_over


def test_keyword_call(drop_in):
    """The builder may be called by position or by keyword."""
    twins = Twins(drop_in, enable_overlap=False)
    builder = eagle_disaggregation.build_eagle_disagg_draft_input
    batch = twins.batch(twins.ours, [3, 1])
    named = {"batch": batch, "last_tokens_tensor": torch.tensor([5, 6]), "future_map": twins.ours.future_map}
    if takes(builder, "server_args"):
        named["server_args"] = twins.ours.server_args
    draft_input = builder(**named)
    assert drop_in.stats.batches == 1
    assert_same(torch.stack([req.hidden_states_tensor for req in batch.reqs]), draft_input.hidden_states, "hidden")
    assert draft_input.capture_hidden_mode == CaptureHiddenMode.LAST


# -- debug: rows are consumed once


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two-calls"])
def test_poisoned_rows_and_the_freshness_mark(drop_in, choose, monkeypatch, fused):
    """SGLANG_IS_IN_CI: consumed rows are -1, and a resolve without a fresh publish fails; the same with us."""
    choose(fused=fused)
    monkeypatch.setattr(overlap_utils, "_DEBUG_ASSERT", True)
    with torch.compiler.set_stance("force_eager"):
        twins = Twins(drop_in)
        twins.settle()
        for _ in range(2):
            stock, ours = twins.process([2, 4])
            if RESOLVES_ON_CPU:
                twins_resolve(twins, stock, ours)
                assert twins.ours.future_map.new_seq_lens_buf[[3, 5]].tolist() == [-1, -1]
                with pytest.raises(AssertionError, match="fresh"):
                    twins.ours.resolve(ours)
            twins.assert_equal_relays()
    assert drop_in.stats.fused == (2 if fused else 0)


class Recorder:
    """An event that counts."""

    def __init__(self):
        self.records = 0

    def record(self):
        self.records += 1

    def wait(self):
        pass


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two-calls"])
def test_the_publish_event_is_sglangs_and_recorded_once(drop_in, choose, fused):
    choose(fused=fused)
    twins = Twins(drop_in)
    twins.settle()
    event = twins.ours.future_map.publish_ready = Recorder()
    twins.process([2, 4])
    assert twins.ours.future_map.publish_ready is event and event.records == 1
    assert drop_in.stats.fused == int(fused)


# -- when the launch may not write sglang's buffers


RARE = {
    "adopted relay": lambda m: setattr(m, "_relay", SimpleNamespace(published_seq_lens=None, published_bonus=None)),
    "confidences": lambda m: setattr(m, "needs_confidence_relay", True),
    "probabilities": lambda m: setattr(m, "draft_probs_buf", torch.zeros(65, 8)),
    "seeds": lambda m: setattr(m, "dsa_topk_indices_buf", torch.zeros(65, 8, dtype=torch.int32)),
    "no event yet": lambda m: setattr(m, "publish_ready", None),
    "other vectors": lambda m: setattr(m, "new_seq_lens_buf", m.new_seq_lens_buf.int()),
    "a subclass": lambda m: setattr(m, "__class__", type("Other", (type(m),), {})),
}


@pytest.mark.parametrize("rare", RARE)
def test_rarer_state_is_published_by_sglang(drop_in, choose, rare):
    choose(fused=True)
    twins = Twins(drop_in)
    twins.settle()
    for node in twins.nodes:
        RARE[rare](node.future_map)
    stock, ours = twins.process([1, 2, 3])
    assert_same_inputs(stock.spec_info, ours.spec_info)
    twins.assert_equal_relays()
    assert (drop_in.stats.batches, drop_in.stats.fused) == (1, 0)


def test_few_rows_are_published_by_sglang_on_the_cpu(drop_in, choose):
    """Below 16 rows its own two calls cost less there."""
    choose(fused=True)
    drop_in.fuse_from_on_cpu = DropIn(drop_in.options, drop_in.engine).fuse_from_on_cpu
    twins = Twins(drop_in)
    twins.settle()
    for count, fused in ((1, 0), (15, 0), (16, 1), (40, 2)):
        stock, ours = twins.process(range(count))
        assert_same_inputs(stock.spec_info, ours.spec_info)
        twins.assert_equal_relays()
        assert drop_in.stats.fused == fused


def test_another_plugin_on_publish_is_not_bypassed(drop_in, choose, monkeypatch):
    """A publish that somebody wrapped is called, also when fused."""
    choose(fused=True)
    twins = Twins(drop_in)
    twins.settle()
    calls, publish = [], overlap_utils.FutureMap.publish
    monkeypatch.setattr(overlap_utils.FutureMap, "publish", lambda *given: (calls.append(1), publish(*given))[1])
    twins.process([1])
    assert len(calls) == 2 and drop_in.stats.fused == 0


def test_new_buffers_are_noticed(drop_in, choose):
    """A relay that was laid out anew is written where it is now."""
    choose(fused=True)
    twins = Twins(drop_in)
    twins.settle()
    twins.process([1])
    for node in twins.nodes:
        node.future_map.hidden_states_buf = node.future_map.hidden_states_buf.clone()
    twins.process([2, 3])
    twins.assert_equal_relays()
    assert drop_in.stats.fused == 2


# -- what is handed to sglang's own builder


def test_seeds_are_handed_over(drop_in):
    if not drop_in.engine.has_seeds:
        pytest.skip("this sglang has no sparse-attention seeds")
    twins = Twins(drop_in, topk=1, enable_overlap=False)

    def process(node):
        batch = twins.batch(node, [1, 2])
        for req in batch.reqs:
            req.output_dsa_topk_indices = torch.arange(4, dtype=torch.int32)
        batch.req_to_token_pool = SimpleNamespace(req_to_token=torch.ones(65, 16, dtype=torch.int32))
        node.process(batch)
        return batch

    stock, ours = twins.both(process)
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert drop_in.stats.handed_over == {"sparse-attention seeds": 1} and drop_in.stats.batches == 0


def test_a_model_that_needs_seeds_is_handed_over(drop_in, monkeypatch):
    """No seed came, but this model's CUDA graph needs one: cuda_graph_compatible is sglang's to decide."""
    if not hasattr(eagle_disaggregation, "_requires_dsa_seed_for_cuda_graph"):
        pytest.skip("this sglang does not ask")
    monkeypatch.setattr(eagle_disaggregation, "get_dsa_seed_metadata_dim", lambda config: 8)
    twins = Twins(drop_in, topk=1)
    stock, ours = twins.process([1, 2])
    assert ours.spec_info.cuda_graph_compatible is False
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert drop_in.stats.handed_over == {"sparse-attention seeds": 1}


def test_rejection_sampling_is_handed_over(drop_in):
    twins = Twins(drop_in, topk=1)
    if takes(eagle_disaggregation.build_eagle_disagg_draft_input, "server_args"):
        pytest.skip("this sglang's builder has no such branch")

    def process(node):
        batch = twins.batch(node, [1, 2])
        batch.model_config.vocab_size = 1 << 17
        with node.settings(speculative_use_rejection_sampling=True):
            node.process(batch)
        return batch

    stock, ours = twins.both(process)
    assert ours.spec_info.draft_probs is not None
    assert_same_inputs(stock.spec_info, ours.spec_info)
    assert drop_in.stats.handed_over == {"rejection sampling": 1}


def test_another_device_is_handed_over(drop_in):
    twins = Twins(drop_in)
    batch = twins.batch(twins.ours, [1])
    batch.device = "meta"
    eagle_builder(batch, twins.ours, torch.zeros(1, dtype=torch.int64, device="meta"))
    assert drop_in.stats.handed_over == {"device meta": 1}


def eagle_builder(batch, node, last_tokens):
    builder = eagle_disaggregation.build_eagle_disagg_draft_input
    settings = [node.server_args] if takes(builder, "server_args") else []
    batch.enable_overlap = False
    return builder(batch, *settings, last_tokens, node.future_map)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two-calls"])
def test_an_unexpected_failure_falls_back(drop_in, choose, monkeypatch, caplog, fused):
    """Guards live traffic: sglang's own builder serves that batch, counted, logged once."""
    choose(fused=fused)
    twins = Twins(drop_in)
    twins.settle()
    from draftgather import builder, draft_assembler

    def broken(*given):
        raise OSError("no space left on device")

    monkeypatch.setattr(draft_assembler, "launch", broken)
    monkeypatch.setattr(draft_assembler.DraftAssembler, "stacked", broken)
    assert builder.DraftAssembler is draft_assembler.DraftAssembler
    for slots in ([1, 2], [3]):
        stock, ours = twins.process(slots)
        assert_same_inputs(stock.spec_info, ours.spec_info)
        twins.assert_equal_relays()
    assert (drop_in.stats.fallbacks, drop_in.stats.batches) == (2, 0)
    assert len([r for r in caplog.records if "serves this batch" in r.message]) == 1
    assert "no space left" in caplog.text


# -- what sglang gets wrong in silence


def refused(drop_in, twins, slots, error, match, **settings):
    """Our node refuses the batch, says so once, and has written nothing."""
    before = {name: buffer.clone() for name, buffer in relay_buffers(twins.ours.future_map).items()}
    for _ in range(2):
        batch = twins.batch(twins.ours, slots)
        with twins.ours.settings(**settings), pytest.raises(error, match=match):
            twins.ours.process(batch)
        assert batch.spec_info is None
    for name, buffer in relay_buffers(twins.ours.future_map).items():
        assert buffer.equal(before[name]), name
    assert drop_in.stats.refused == 2


def test_more_states_than_a_row_holds_are_refused(drop_in, caplog):
    """24 states over rows of 16: sglang cuts them to 16 in silence."""
    twins = Twins(drop_in, enable_overlap=False)
    wide = {"enable_multi_layer_eagle": True, "speculative_eagle_topk": 8, "speculative_num_steps": 3}

    def process(node):
        batch = twins.batch(node, [1, 2])
        with node.settings(**wide):
            node.process(batch)
        return batch

    assert twins.run(twins.stock, Mode.OFF, process).spec_info.topk_p.shape == (2, 16)
    refused(drop_in, twins, [1, 2], dg.RowShapeError, "'request-2'.*16.*24", **wide)
    assert caplog.text.count("refused, before anything was written") == 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two-calls"])
def test_a_narrow_stash_is_refused(drop_in, choose, fused):
    """One state a row into relay rows of four: sglang broadcasts it in silence."""
    choose(fused=fused)
    twins = Twins(drop_in)
    twins.settle()

    def process(node):
        with node.settings(speculative_eagle_topk=1):
            node.process(twins.batch(node, [1]))

    twins.run(twins.stock, Mode.OFF, process)
    relayed = twins.stock.future_map.topk_p_buf[2]
    assert relayed.eq(relayed[0]).all()
    refused(drop_in, twins, [1], dg.RelayError, r"topk_p: .* are 1 torch.float32.*\(4,\)", speculative_eagle_topk=1)


def test_another_dtype_is_refused(drop_in):
    """float32 states for a bfloat16 relay: sglang converts them in silence."""
    twins = Twins(drop_in)
    twins.settle()
    for node in twins.nodes:
        node.metadata.output_hidden_states = node.metadata.output_hidden_states.float()
    stock = twins.run(twins.stock, Mode.OFF, lambda node: node.process(twins.batch(node, [1])))
    assert stock is None
    refused(drop_in, twins, [1], dg.RowDtypeError, "'request-2'.*hidden_states.*float32.*bfloat16")


@pytest.mark.parametrize("slots", [[1, 2], [2, 1], list(range(20))], ids=["second", "first", "many"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_a_narrower_dtype_is_refused_too(drop_in, overlap, slots):
    """A bfloat16 row among float32 ones: converting it would be exact, but sglang serves other bytes."""
    twins = Twins(drop_in, dtype=torch.float32, enable_overlap=overlap)
    if overlap:
        twins.settle()
    drop_in.check_arrivals([], [], twins.ours.metadata, lambda req: False)
    batch = twins.batch(twins.ours, slots)
    narrow = batch.reqs[slots.index(2)]
    narrow.hidden_states_tensor = narrow.hidden_states_tensor.bfloat16()
    with pytest.raises(dg.RowDtypeError, match=r"'request-3'.*hidden_states has dtype torch.bfloat16, .*float32$"):
        twins.ours.process(batch)
    assert drop_in.stats.refused == 1


def test_a_row_whose_memory_is_gone_is_not_handed_to_sglang(drop_in):
    """Guards against a crash of the scheduler: sglang's builder would read the address."""
    twins = Twins(drop_in)
    twins.settle()
    batch = twins.batch(twins.ours, [1, 2])
    batch.reqs[1].hidden_states_tensor.untyped_storage().resize_(0)
    with pytest.raises(dg.MissingRowError, match=r"'request-3'.*no storage"):
        twins.ours.process(batch)
    assert drop_in.stats.refused == 1


def test_another_width_is_refused(drop_in):
    """Guards against the target's width, or three times the draft's own."""
    twins = Twins(drop_in)
    twins.settle()
    twins.ours.metadata.output_hidden_states = torch.ones(64, 3 * 64, dtype=torch.bfloat16)
    refused(drop_in, twins, [1], dg.RowShapeError, r"'request-2'.*\(192,\).*\(64,\).*auxiliary")


def test_the_gate_tells_the_width_before_the_first_batch(drop_in):
    """Width and dtype are sglang's own answer, not those of whatever row comes first."""
    twins = Twins(drop_in)
    drop_in.check_arrivals([], [], twins.ours.metadata, lambda req: False)
    batch = twins.batch(twins.ours, [1])
    batch.reqs[0].hidden_states_tensor = torch.ones(128, dtype=torch.bfloat16)
    with pytest.raises(dg.RowShapeError, match=r"\(128,\).*\(64,\)"):
        twins.ours.process(batch)


def test_a_missing_row_is_named_and_left_to_sglang(drop_in, caplog):
    twins = Twins(drop_in)
    batch = twins.batch(twins.ours, [1, 2])
    batch.reqs[1].hidden_states_tensor = None
    with caplog.at_level(logging.WARNING), pytest.raises((AttributeError, TypeError)):
        twins.ours.process(batch)
    assert "'request-3'" in caplog.text and "missing" in caplog.text
    assert drop_in.stats.bad_rows == {"missing": 1}


def test_lists_are_taken_as_sglang_takes_them(drop_in):
    twins = Twins(drop_in)
    twins.settle()

    def process(node):
        batch = twins.batch(node, [1, 2])
        for req in batch.reqs:
            req.output_topk_p, req.output_topk_index = req.output_topk_p.tolist(), req.output_topk_index.tolist()
        node.process(batch)
        return batch

    stock, ours = twins.both(process)
    assert_same_inputs(stock.spec_info, ours.spec_info)
    twins.assert_equal_relays()
    assert drop_in.stats.batches == 1


def test_a_resumed_request_gives_the_same_rows_again(drop_in):
    """O10: a retracted request goes through the builder again, other batches in between."""
    twins = Twins(drop_in)
    twins.settle()
    batch = twins.batch(twins.ours, [7, 8])
    twins.ours.process(batch)
    first = batch.spec_info.hidden_states.clone()
    twins.process([1, 2, 3])
    again = twins.ours.prebuilt(batch.reqs)
    twins.ours.process(again)
    assert_same(first, again.spec_info.hidden_states, "hidden_states")


# -- shadow


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two-calls"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_shadow_serves_sglang_and_compares(drop_in, choose, caplog, fused, overlap):
    choose(fused=fused)
    drop_in.mode = Mode.SHADOW
    twins = Twins(drop_in, enable_overlap=overlap)
    twins.settle()
    with caplog.at_level(logging.INFO):
        for slots in ([1, 2], [3], list(range(30))):
            stock, ours = twins.process(slots)
            assert_same_inputs(stock.spec_info, ours.spec_info)
            twins.assert_equal_relays()
    stats = drop_in.stats
    assert (stats.batches, stats.compared, stats.different, stats.fallbacks) == (3, 3, 0, 0)
    assert stats.fused == (3 if fused and overlap else 0)
    assert len(stats.sglang_ns) == len(stats.ours_ns) == 3
    assert "1 batches, 1 compared, 0 different" in caplog.text and "median host time" in caplog.text


def test_shadow_samples(drop_in, choose):
    choose(sample=4)
    drop_in.mode = Mode.SHADOW
    twins = Twins(drop_in)
    for _ in range(9):
        twins.process([1, 2])
    assert (drop_in.stats.batches, drop_in.stats.compared) == (9, 3)


@pytest.mark.parametrize("wrong", ["topk_p", "hidden_states", "relay"])
def test_shadow_reports_a_difference_and_serves_sglang(drop_in, caplog, monkeypatch, wrong):
    """Guards the comparison itself: one flipped bit is found, named, and never served."""
    drop_in.mode = Mode.SHADOW
    twins = Twins(drop_in)
    twins.settle()
    make, payload = drop_in.engine.make_draft_input, drop_in.engine.make_payload

    def flip(tensor):
        tensor = tensor.clone()
        tensor.view(torch.uint8)[1, 3] ^= 1
        return tensor

    def make_wrong(topk_p, topk_index, hidden_states, bonus_tokens):
        if wrong == "topk_p":
            topk_p = flip(topk_p)
        if wrong == "hidden_states":
            hidden_states = flip(hidden_states)
        return make(topk_p, topk_index, hidden_states, bonus_tokens)

    def wrong_payload(draft_input):
        made = payload(draft_input)
        if wrong == "relay":
            import copy

            made = copy.copy(made)
            made.topk_index = flip(made.topk_index)
        return made

    monkeypatch.setattr(
        drop_in, "engine", drop_in.engine._replace(make_draft_input=make_wrong, make_payload=wrong_payload)
    )
    stock, ours = twins.process([1, 2])
    assert_same_inputs(stock.spec_info, ours.spec_info)
    twins.assert_equal_relays()
    assert drop_in.stats.different == 1
    assert "topk_index_buf" if wrong == "relay" else wrong in caplog.text
    assert "request-2" in caplog.text


def test_shadow_finds_a_write_that_is_missing_at_first(drop_in, caplog, monkeypatch):
    """Guards the first comparison: the copy is made after sglang's stash, and must not hold its rows already."""
    drop_in.mode = Mode.SHADOW
    twins = Twins(drop_in)
    twins.settle()
    monkeypatch.setattr(drop_in, "_publish_and_stash", lambda *given: None)
    twins.process([1, 2])
    assert drop_in.stats.different == 1
    assert "topk_p_buf" in caplog.text and "new_seq_lens_buf" in caplog.text


def test_shadow_copies_new_buffers(drop_in):
    """Guards against differences that are none: sglang laid its relay out anew, under the same names."""
    drop_in.mode = Mode.SHADOW
    twins = Twins(drop_in)
    twins.settle()
    twins.process([1, 2])
    for node in twins.nodes:
        node.future_map.topk_p_buf = torch.cat([node.future_map.topk_p_buf] * 2)
    twins.process([3, 40])
    assert (drop_in.stats.compared, drop_in.stats.different, drop_in.stats.fallbacks) == (2, 0, 0)


def test_shadow_survives_our_failure_and_our_refusal(drop_in, caplog, monkeypatch):
    drop_in.mode = Mode.SHADOW
    twins = Twins(drop_in)
    twins.settle()
    with twins.ours.settings(speculative_eagle_topk=1):
        twins.ours.process(twins.batch(twins.ours, [1]))
    assert drop_in.stats.refused == 1 and "topk_p" in caplog.text
    monkeypatch.setattr(drop_in, "_gather", lambda *given: 1 / 0)
    batch = twins.batch(twins.ours, [1])
    twins.ours.process(batch)
    assert batch.spec_info is not None and drop_in.stats.fallbacks == 1


def test_off_passes_through(drop_in):
    from draftgather import sglang_plugin

    sglang_plugin.set_mode("off")
    twins = Twins(drop_in)
    twins.ours.process(twins.batch(twins.ours, [1]))
    assert drop_in.stats.batches == 0 and not drop_in.stats.handed_over
    sglang_plugin.set_mode("on")
    twins.ours.process(twins.batch(twins.ours, [1]))
    assert drop_in.stats.batches == 1


# -- algorithms of one's own


def test_an_algorithm_of_ones_own_from_a_field_list(drop_in):
    from sglang.srt.speculative import spec_registry

    from draftgather import sglang_plugin

    class MyAlgo(sglang_plugin.CustomSpecAlgo):
        def draft_fields(self, batch, settings):
            return dg.eagle_fields(settings.speculative_eagle_topk, 64)

    try:
        SpeculativeAlgorithm.register("MY_ALGO", supports_overlap=True, spec_class=MyAlgo)(lambda server_args: object)
        algorithm = SpeculativeAlgorithm.from_string("MY_ALGO")
        assert type(algorithm) is MyAlgo and algorithm.need_topk() and algorithm.carries_draft_hidden_states()
        twins = Twins(drop_in)
        theirs = twins.batch(twins.stock, [3, 4])
        twins.run(twins.stock, Mode.OFF, lambda node: node.process(theirs))
        node = Node(NodeOptions(algorithm="MY_ALGO"))
        for name in ("output_topk_p", "output_topk_index", "output_hidden_states"):
            getattr(node.metadata, name).copy_(getattr(twins.stock.metadata, name))
        for slot in (3, 4):
            node.metadata.output_ids[slot, 0] = slot + 1
        ours = node.prebuilt([node.commit(slot, slot + 1) for slot in (3, 4)], [1003, 1004])
        node.process(ours)
        assert_same_inputs(theirs.spec_info, ours.spec_info)
        for name, buffer in relay_buffers(twins.stock.future_map).items():
            if name != "req_to_token":
                assert_same(buffer[4:6], relay_buffers(node.future_map)[name][4:6], name)
        assert drop_in.stats.batches == 0  # it does not need the drop-in
    finally:
        spec_registry._REGISTRY.pop("MY_ALGO", None)


def test_nothing_is_missing_in_our_base():
    """O48: every method that the scheduler may call on an algorithm is there; sglang's own base lacks some."""
    from sglang.srt.speculative import spec_registry

    from draftgather import sglang_plugin

    assert sglang_plugin.missing_methods(sglang_plugin.CustomSpecAlgo) == []
    lacking = sglang_plugin.missing_methods(spec_registry.CustomSpecAlgo)
    if "need_topk" in vars(SpeculativeAlgorithm):
        assert {"need_topk"} <= set(lacking)

    class Incomplete(sglang_plugin.CustomSpecAlgo):
        is_eagle = None

    assert sglang_plugin.missing_methods(Incomplete) == ["is_eagle"]


def test_an_algorithm_without_fields_is_named(drop_in):
    from draftgather import sglang_plugin

    algorithm = sglang_plugin.CustomSpecAlgo("X", lambda server_args: object)
    with pytest.raises(dg.AlgorithmError, match="CustomSpecAlgo does not override draft_fields"):
        algorithm.build_disagg_draft_input(SimpleNamespace(reqs=[], device="cpu"), *[None] * 3)
