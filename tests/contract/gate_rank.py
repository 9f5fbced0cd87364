# ruff: noqa: E402
"""One tensor-parallel rank of a decode node: real transfer queue, real gate, real all-reduce over gloo.

    python gate_rank.py RANK WORLD STORE POLICY FAULT

Metadata slot 1 is the bad one, on the last rank only; with the fault "full" all are good, and that rank's
mailbox has one slot. Prints what became of the requests as JSON.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

rank, world, store, policy, fault = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
os.environ.update(TRITON_INTERPRET="1", DRAFTGATHER_SGLANG="on", DRAFTGATHER_SGLANG_BAD_ROWS=policy)
if fault == "full":
    os.environ.update(
        DRAFTGATHER_SGLANG_MAILBOX="1", DRAFTGATHER_SGLANG_MAILBOX_SLOTS="1" if rank == world - 1 else "8"
    )
sys.path.append(str(Path(__file__).parent / "stubs"))

import torch
import torch.distributed as dist
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator
from sglang.srt.plugins import load_plugins

from draftgather import sglang_plugin
from draftgather.bench.sglang_node import Node, NodeOptions

load_plugins()
drop_in = sglang_plugin.drop_in()
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
)

torch.manual_seed(0)
node = Node(NodeOptions(max_requests=8))
row = {"topk_p": torch.rand(4), "topk_index": torch.arange(4), "hidden_states": torch.randn(64)}
zero = {name: torch.zeros_like(tensor) for name, tensor in row.items()}
is_bad = fault in ("unwritten", "owner") and rank == world - 1
node.write_row(0, row, room=100)
node.write_row(1, zero if is_bad and fault == "unwritten" else row, room=999 if is_bad and fault == "owner" else 101)
node.write_row(2, zero, room=0)  # a fake transfer's

failures: dict = {}


class Receiver:
    """A receiver whose transfer is over."""

    require_staging = False
    abort_notified = False
    kv_mgr = SimpleNamespace(
        record_failure=failures.__setitem__, enable_deferred_decode_kv_release=False, update_status=lambda *given: None
    )

    def __init__(self, room):
        self.room = room

    def poll(self):
        return KVPoll.Success

    def failure_exception(self):
        raise RuntimeError(failures.get(self.room, "another rank"))

    def clear(self):
        pass

    abort = clear


def request(slot, room, host="prefill"):
    req = MagicMock()
    req.rid, req.bootstrap_room, req.bootstrap_host, req.finished_reason = f"r{slot}", room, host, None
    req.return_logprob = req.return_sampling_mask = False
    req.output_ids, req.vocab_size = [], 1 << 17
    return MagicMock(
        req=req,
        kv_receiver=Receiver(room),
        metadata_buffer_index=slot,
        hicache_restore_status=None,
        is_rebootstrap=False,
        host_staged=False,
        draftgather_fault=None,
    )


queue = decode.DecodeTransferQueue.__new__(decode.DecodeTransferQueue)
vars(queue).update(
    queue=[request(0, 100), request(1, 101), request(2, 0, decode.FAKE_BOOTSTRAP_HOST)]
    if hasattr(decode, "FAKE_BOOTSTRAP_HOST")
    else [request(0, 100), request(1, 101), request(2, 0, "2.2.2.2")],
    gloo_group=dist.group.WORLD,
    metadata_buffers=node.metadata,
    req_to_metadata_buffer_idx_allocator=ReqToMetadataIdxAllocator(8),
    scheduler=MagicMock(enable_decode_hicache=False, enable_hisparse=False, server_args=node.server_args),
    tree_cache=MagicMock(),
    tp_rank=rank,
    spec_algorithm=node.algorithm,
    enable_staging=False,
    enable_deferred_kv_release=False,
    enable_host_receive=False,
    _commit_hicache_local_restore_to_req=lambda decode_req: None,
)
queue.scheduler.kv_checksum_computer = None
decode.release_kv_cache = MagicMock()
entries = list(queue.queue)
transferred = queue.pop_transferred()
print(
    json.dumps(
        {
            "transferred": [req.rid for req in transferred],
            "aborted": {
                e.req.rid: str(getattr(e.req.finished_reason or e.req.to_finish, "message", ""))
                for e in entries
                if e.req not in transferred
            },
            "left": [e.req.rid for e in queue.queue],
            "bad_rows": dict(drop_in.stats.bad_rows),
            "fallbacks": drop_in.stats.fallbacks,
            "kept": drop_in.stats.kept,
            "full": drop_in.stats.mailbox_full,
            "rows": [req.hidden_states_tensor.tolist() for req in transferred],
            "released": [call.args[0].rid for call in decode.release_kv_cache.call_args_list],
        }
    )
)
dist.destroy_process_group()
