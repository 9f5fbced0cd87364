"""EAGLE with an optional seed for sparse attention, whose positions become the decode node's own slots.

Prefill knows which tokens a request's attention looked at, and sends their positions in the sequence. The same tokens
lie elsewhere in this node's KV pool: `req_to_token` [request pool index, position] tells where. The mapping fails
closed. A row with one position that cannot be mapped is -1 throughout, for the attention would read another request's
KV; a batch in which some request has no seed goes on without seeds, and `present` says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import draftgather as dg

SEED_WIDTH = 8
NO_SEED = -1


def fields(server_args: Any) -> tuple[dg.Field, ...]:
    """EAGLE's rows and the seed. sglang's top-k rows are 16 wide whatever the top-k, so they may be wider.

    server_args: `speculative_eagle_topk`, and `draft_hidden_size`.
    """
    eagle = dg.eagle_fields(server_args.speculative_eagle_topk, server_args.draft_hidden_size)
    rows = tuple(replace(f, leading=f.name != "hidden_states") for f in eagle)
    return (*rows, dg.Field("seed", SEED_WIDTH, torch.int32, optional=True, exact=True))


def map_seeds(positions: torch.Tensor, batch: Any) -> torch.Tensor:
    """Slots [b, width] int32 for the seeds' positions [b, width] int32; -1 throughout a row that cannot be mapped.

    batch: `req_to_token` [request pool indices, max_len] int32, a slot each, 0 where none is allocated;
    `req_pool_indices` [b], `seq_lens` [b].

    Tensor operations only: to look at a seed on the host would wait for the device.
    """
    lengths = batch.seq_lens.clamp(max=batch.req_to_token.shape[1])[:, None]
    is_known = (positions >= 0) & (positions < lengths)
    # Positions that are not known are looked up at 0, and what is found there is not used.
    slots = batch.req_to_token[batch.req_pool_indices[:, None], torch.where(is_known, positions, 0).long()]
    is_mapped = (is_known & (slots > 0)).all(dim=1, keepdim=True)
    return torch.where(is_mapped, slots, NO_SEED).to(torch.int32)


class Seeded(dg.CustomSpecAlgo):
    """EAGLE's hand-off, with the seed."""

    def build_disagg_draft_input(
        self, batch: Any, server_args: Any, last_tokens_tensor: torch.Tensor, future_map: Any
    ) -> dg.EagleDraftInput:
        """EAGLE's rows, and in `extras` seed [b, width] int32: slots of this node, where every request brought one."""
        return dg.build_disagg_draft_input(
            batch, last_tokens_tensor, future_map, fields(server_args), post_gather={"seed": map_seeds}
        )


def make_worker(server_args: Any) -> Any:
    """The class of the draft worker. This example ends where the draft worker begins."""
    raise NotImplementedError("the example has no draft worker")


def register() -> None:
    """As a plug-in does when it is loaded, in every process: a second time changes nothing."""
    dg.SpeculativeAlgorithm.register("EAGLE_SEEDED", supports_overlap=True, spec_class=Seeded)(make_worker)
