"""The plain way: what a decode node does with torch.stack alone, as sglang's own builder does.

Slice every request's metadata rows, stack each field, upload each stack, then publish and stash by
one index_put a buffer. It is the baseline of every figure, and the reference of the demo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

METADATA_WIDTH = 16  # sglang's metadata rows: 16 wide, whatever the top-k


@dataclass(frozen=True, slots=True)
class ArrivedRow:
    """One request's draft row as sglang hands it over: separate pageable tensors."""

    topk_p: torch.Tensor  # [METADATA_WIDTH or more] float32
    topk_index: torch.Tensor  # [METADATA_WIDTH or more] int64
    hidden_states: torch.Tensor  # [hidden]


@dataclass(frozen=True, slots=True)
class StackedBatch:
    """The batch's own tensors."""

    topk_p: torch.Tensor  # [b, num_states] float32
    topk_index: torch.Tensor  # [b, num_states] int64
    hidden_states: torch.Tensor  # [b, hidden]


class StackRelay:
    """The future map by index_put: a buffer a field, keyed by request pool index."""

    def __init__(
        self, num_slots: int, num_states: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.topk_p = torch.zeros((num_slots, num_states), device=device)
        self.topk_index = torch.zeros((num_slots, num_states), dtype=torch.int64, device=device)
        self.hidden_states = torch.zeros((num_slots, hidden_size), dtype=dtype, device=device)
        self.bonus_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def publish(self, indices: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self.seq_lens[indices] = seq_lens

    def stash(self, indices: torch.Tensor, batch: StackedBatch, bonus_tokens: torch.Tensor) -> None:
        self.bonus_tokens[indices] = bonus_tokens
        self.topk_p[indices] = batch.topk_p
        self.topk_index[indices] = batch.topk_index
        self.hidden_states[indices] = batch.hidden_states


def stack_rows(rows: Sequence[ArrivedRow], num_states: int, device: torch.device) -> StackedBatch:
    """2N slices, three stacks into (where there is a GPU) pinned memory, three uploads."""
    return StackedBatch(
        _upload([torch.as_tensor(row.topk_p[:num_states], dtype=torch.float32) for row in rows], device),
        _upload([torch.as_tensor(row.topk_index[:num_states], dtype=torch.int64) for row in rows], device),
        _upload([row.hidden_states for row in rows], device),
    )


def _upload(rows: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    pin = device.type == "cuda"
    out = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=pin)
    return torch.stack(rows, out=out).to(device, non_blocking=pin)
