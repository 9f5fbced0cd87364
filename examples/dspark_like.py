"""An algorithm without top-k: a hidden state, a mask that says which of its blocks count, and warm-up counters.

DSPARK hands over rows of this kind. The draft row is a list of fields, and so it takes no code for the gathering:
which attribute of a request holds which field, and the settings that give the widths, is all there is to say.

    dg.SpeculativeAlgorithm.from_string("DSPARK_LIKE")      # after `register()`
"""

from __future__ import annotations

from typing import Any

import torch

import draftgather as dg

# Blocks of the hidden state that are valid or not, one flag each.
NUM_BLOCKS = 8

# A field's attribute of a request, where it is not the field's own name.
ATTRIBUTES = {"block_mask": "draft_block_mask", "warmup_steps": "draft_warmup_steps"}


def fields(server_args: Any) -> tuple[dg.Field, ...]:
    """The draft row.

    server_args: `draft_hidden_size`, the draft model's own width, and `speculative_num_steps`. A request may bring more
    counters than there are steps now, as the step count may change while serving: the first ones count.
    """
    return (
        dg.Field("hidden_states", server_args.draft_hidden_size, torch.bfloat16, exact=True),
        dg.Field("block_mask", NUM_BLOCKS, torch.bool),
        dg.Field("warmup_steps", server_args.speculative_num_steps, torch.int32, leading=True),
    )


class DsparkLike(dg.CustomSpecAlgo):
    """The hand-off from prefill to decode; the worker is whatever `register` is given."""

    def build_disagg_draft_input(
        self, batch: Any, server_args: Any, last_tokens_tensor: torch.Tensor, future_map: Any
    ) -> dg.EagleDraftInput:
        """hidden_states [b, hidden] bf16; in `extras` block_mask [b, 8] bool and warmup_steps [b, steps] int32.

        The settings are read at each call. A request without one of the rows is a MissingRowError that names it.
        """
        return dg.build_disagg_draft_input(batch, last_tokens_tensor, future_map, fields(server_args), ATTRIBUTES)


def make_worker(server_args: Any) -> Any:
    """The class of the draft worker. This example ends where the draft worker begins."""
    raise NotImplementedError("the example has no draft worker")


def register() -> None:
    """As a plug-in does when it is loaded, in every process: a second time changes nothing."""
    dg.SpeculativeAlgorithm.register("DSPARK_LIKE", supports_overlap=True, spec_class=DsparkLike)(make_worker)
