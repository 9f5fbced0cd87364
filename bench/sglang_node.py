"""The part of a real sglang's decode node that draft rows pass through, without a model and without a GPU.

Everything that touches a row is sglang's own: `MetadataBuffers.get_buf`, `ScheduleBatch.process_prebuilt`,
`FutureMap`, `resolve_forward_inputs`. Only the requests, which carry rows and nothing else, are stand-ins.
For benchmarks and contract tests; needs an importable sglang, 0.5.13 to 0.5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, MetadataBuffers
from sglang.srt.managers import overlap_utils
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How the node is configured."""

    topk: int = 4
    hidden_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    num_steps: int = 1  # above 1: multi-layer EAGLE
    enable_overlap: bool = True
    algorithm: str = "EAGLE"
    max_requests: int = 64


class Request(SimpleNamespace):
    """A request as far as draft rows are concerned; unlike its base it can be referred to weakly."""


class Node:
    """One decode node. Its settings are those of the process (sglang's are global)."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.server_args = _publish_settings(options)
        self.algorithm = SpeculativeAlgorithm.from_string(options.algorithm)
        extra = {"max_sampling_mask_tokens": 1} if _takes(MetadataBuffers, "max_sampling_mask_tokens") else {}
        self.metadata = MetadataBuffers(options.max_requests, options.hidden_size, options.dtype, **extra)
        pool = SimpleNamespace(req_to_token=torch.zeros((options.max_requests + 1, 1), dtype=torch.int32))
        self.future_map = overlap_utils.FutureMap(torch.device("cpu"), self.algorithm, pool)
        self._takes_server_args = _takes(ScheduleBatch.process_prebuilt, "server_args")

    def write_row(self, slot: int, row: dict[str, torch.Tensor], room: int) -> None:
        """What the transfer engine does: prefill's row lands in metadata slot `slot`, the room last."""
        self.metadata.output_topk_p[slot, : len(row["topk_p"])] = row["topk_p"]
        self.metadata.output_topk_index[slot, : len(row["topk_index"])] = row["topk_index"]
        self.metadata.output_hidden_states[slot] = row["hidden_states"]
        self.metadata.output_ids[slot, 0] = room
        self.metadata.bootstrap_room[slot, 0] = room

    def commit(self, slot: int, pool_index: int, *, is_fake: bool = False) -> Any:
        """A request, and what `_commit_transfer_to_req` does with the rows of `slot`: it carries its clones."""
        req = self.request(pool_index, 0 if is_fake else int(self.metadata.bootstrap_room[slot, 0]), is_fake=is_fake)
        self.take_rows(req, slot)
        return req

    def take_rows(self, req: Any, slot: int) -> None:
        got = self.metadata.get_buf(slot)
        rows = got[9:13] if len(got) == 14 else (*got[6:9], None)
        req.output_ids = [int(got[0][0])]
        req.output_topk_p, req.output_topk_index, req.hidden_states_tensor, req.output_dsa_topk_indices = rows

    def request(self, pool_index: int, room: int, *, is_fake: bool = False) -> Any:
        """A request that waits for its transfer."""
        return Request(
            rid=f"request-{pool_index}",
            bootstrap_room=room,
            bootstrap_host=FAKE_BOOTSTRAP_HOST if is_fake else "prefill",
            output_ids=[],
            hidden_states_tensor=None,
            req_pool_idx=pool_index,
            # What process_prebuilt looks at besides.
            grammar=None,
            swa_branching_seqlen=None,
            skip_radix_cache_insert=True,
            extend_end=0,
            prefix_len=0,
            finished=lambda: False,
        )

    def prebuilt(self, reqs: Sequence[Any], seq_lens: Sequence[int] | None = None) -> Any:
        """A batch of arrived requests, as `prepare_for_prebuilt` leaves it."""
        indices = torch.tensor([req.req_pool_idx for req in reqs], dtype=torch.int64)
        lengths = torch.tensor([1000 + i for i in range(len(reqs))] if seq_lens is None else seq_lens)
        batch = ScheduleBatch(reqs=list(reqs))
        batch.device = "cpu"
        batch.enable_overlap = self.options.enable_overlap
        batch.spec_algorithm = self.algorithm
        batch.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]), vocab_size=1 << 17, is_encoder_decoder=False
        )
        batch.tree_cache = SimpleNamespace(checkpoint=lambda *args, **kwargs: None)
        batch.sampling_info = SimpleNamespace(merge_batch=lambda other: None)
        batch.req_pool_indices, batch.req_pool_indices_cpu = indices, indices.clone()
        batch.seq_lens, batch.seq_lens_cpu, batch.orig_seq_lens = lengths, lengths.clone(), lengths.int()
        batch.return_logprob = batch.has_grammar = batch.is_prefill_only = False
        batch.multimodal_inputs = None
        return batch

    def process(self, batch: Any) -> None:
        """`process_prebuilt`: the builder is called in here."""
        if self._takes_server_args:
            batch.process_prebuilt(self.server_args, self.future_map)
        else:
            batch.process_prebuilt(self.future_map)

    def build(self, batch: Any, last_tokens_tensor: torch.Tensor) -> Any:
        """The polymorphic call in `process_prebuilt` alone."""
        settings = (self.server_args,) if self._takes_server_args else ()
        return self.algorithm.build_disagg_draft_input(batch, *settings, last_tokens_tensor, self.future_map)

    def resolve(self, batch: Any) -> None:
        """The next iteration's forward entry: spec_info is filled from the future map."""
        batch.prefill_input_ids_cpu = None
        self.future_map.resolve_seq_lens_cpu(batch)
        overlap_utils.resolve_forward_inputs(batch, self.future_map)

    @contextmanager
    def settings(self, **values: Any) -> Iterator[None]:
        """Other speculative settings for a while, as adaptive speculation changes them."""
        if self._takes_server_args:
            before = {name: getattr(self.server_args, name) for name in values}
            vars(self.server_args).update(values)
            yield
            vars(self.server_args).update(before)
        else:
            from sglang.srt.runtime_context import get_spec

            with get_spec().override(**values):
                yield


def relay_buffers(future_map: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a FutureMap, by name: what two runs must agree on."""
    return {name: value for name, value in vars(future_map).items() if isinstance(value, torch.Tensor)}


def _publish_settings(options: NodeOptions) -> Any:
    server_args = ServerArgs(model_path="none")
    server_args.device = "cpu"
    server_args.speculative_algorithm = options.algorithm if options.algorithm != "NONE" else None
    server_args.speculative_eagle_topk = options.topk
    server_args.speculative_num_steps = options.num_steps
    server_args.enable_multi_layer_eagle = options.num_steps > 1
    server_args.disaggregation_transfer_backend = "mooncake"
    try:
        from sglang.srt import runtime_context
    except ImportError:
        pass
    else:
        if hasattr(runtime_context, "get_spec"):
            runtime_context._CONTEXT.set_server_args(server_args)
            return server_args
    from sglang.srt import server_args as module

    module._global_server_args = server_args
    return server_args


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters
