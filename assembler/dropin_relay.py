"""sglang's FutureMap as the memory of a fused publish and stash. Knows its attributes, does not import it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftgather.errors import RelayError
from draftgather.fields import Field
from draftgather.future_map import RelayTables
from draftgather.kernels.row_tables import RowTable
from draftgather.slot_numbers import SlotNumbers

# A field's buffer in sglang's FutureMap.
BUFFERS = {"topk_p": "topk_p_buf", "topk_index": "topk_index_buf", "hidden_states": "hidden_states_buf"}

# What one of these being set means: stash writes, or publish sends, more than EAGLE's three fields.
_RARE = ("_relay", "needs_confidence_relay", "draft_probs_buf", "dsa_topk_indices_buf", "need_verified_id")


class SglangRelay:
    """The buffers of one FutureMap, as the assembler's launch writes them: `draftgather.future_map.RelayMemory`."""

    def __init__(self, future_map: Any) -> None:
        self._map = future_map
        self._buffers = _buffers(future_map)
        self.seq_lens_table = RowTable.over(future_map.new_seq_lens_buf.unsqueeze(1))
        self.bonus_tokens_table = RowTable.over(future_map.output_tokens_buf.unsqueeze(1))
        self._tables = {
            name: RowTable.over(buffer)
            for name, buffer in zip(BUFFERS, self._buffers, strict=False)
            if buffer is not None
        }
        self.num_slots = len(future_map.new_seq_lens_buf)
        self.slot_numbers = SlotNumbers(self.num_slots)
        self.device = future_map.new_seq_lens_buf.device

    def writes(self, future_map: Any) -> bool:
        """Whether this is `future_map` still, buffer for buffer."""
        return self._map is future_map and all(
            [mine is its for mine, its in zip(self._buffers, _buffers(future_map), strict=True)]
        )

    def tables_for(self, fields: Sequence[Field]) -> RelayTables:
        """A table for each field, None for hidden states that sglang does not relay (multi-layer mode)."""
        check_relay_format(self._map, fields)
        return RelayTables(tuple(self._tables.get(field.name) for field in fields), (None,) * len(fields))

    def raise_fence(self) -> None:
        """What sglang's publish does after its write: record its event, once, and mark the lengths fresh."""
        self._map.publish_ready.record()
        if hasattr(self._map, "_publish_fresh"):
            self._map._publish_fresh = True


def can_fuse(future_map: Any, relays_hidden_states: bool) -> bool:
    """Whether a launch may write the buffers of `future_map`, and nothing that its publish and stash do is left out.

    They must exist (the first batch is sglang's own, which also makes the event), and no rarer state be in play:
    adopted relay buffers, confidences, probabilities, seeds. Any False is sglang's own two calls.
    """
    for name in _RARE:
        value = getattr(future_map, name, None)
        if value is not None and value is not False:
            return False
    if future_map.publish_ready is None or not getattr(future_map, "need_topk", True):
        return False
    topk_p, topk_index, hidden_states, seq_lens, tokens = _buffers(future_map)
    if topk_p is None or topk_index is None or (hidden_states is not None) is not relays_hidden_states:
        return False
    return bool(seq_lens.dtype is tokens.dtype is torch.int64)


def check_relay_format(future_map: Any, fields: Sequence[Field]) -> None:
    """Refuse rows of another width or dtype than the buffers'. sglang broadcasts the one and converts the other."""
    for field in fields:
        buffer = getattr(future_map, BUFFERS[field.name], None)
        if buffer is not None and (buffer.shape[1:] != (field.width,) or buffer.dtype is not field.dtype):
            raise RelayError(
                f"{field.name}: the rows of this batch are {field.width} {field.dtype}, the future map's "
                f"{tuple(buffer.shape[1:])} {buffer.dtype}: it was laid out by its first batch"
            )


def _buffers(future_map: Any) -> tuple[Any, ...]:
    names = (*BUFFERS.values(), "new_seq_lens_buf", "output_tokens_buf")
    return tuple([getattr(future_map, name, None) for name in names])
