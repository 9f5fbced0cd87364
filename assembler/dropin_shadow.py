"""Shadow mode's second half: where the shadowed batch is written, and how it is compared without a host wait."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch

from draftgather.completion import CompletionMarker, mark
from draftgather.dropin_relay import BUFFERS

_VECTORS = ("new_seq_lens_buf", "output_tokens_buf")


class Comparison(NamedTuple):
    """What one batch's two results were found to be, once `marker` is done."""

    names: list[str]  # of the tensors
    flags: torch.Tensor  # [len(names)] bool on the host: it differs
    unequal: list[str]  # what the host saw at once: shapes, dtypes, plain values
    request_ids: list[object]
    marker: CompletionMarker

    def different(self) -> list[str]:
        return self.unequal + [name for name, flag in zip(self.names, self.flags.tolist(), strict=True) if flag]


class ShadowMap:
    """A copy of a FutureMap with buffers of its own, as large again: what is written there is only compared."""

    def __init__(self, future_map: Any) -> None:
        self._buffers = _existing(future_map)
        self._of = future_map
        self.copy = copy.copy(future_map)
        for name, buffer in self._buffers.items():
            setattr(self.copy, name, buffer.clone())
        # An event of its own: the scheduler waits for the real map's.
        if future_map.publish_ready is not None:
            self.copy.publish_ready = torch.get_device_module(future_map.device).Event()

    def shadows(self, future_map: Any) -> bool:
        """Whether it still has a copy of every buffer of `future_map`."""
        existing = _existing(future_map)
        return (
            self._of is future_map
            and existing.keys() == self._buffers.keys()
            and all(buffer is self._buffers[name] for name, buffer in existing.items())
        )

    def spoil(self, indices: torch.Tensor) -> None:
        """Turn over every bit of the rows at `indices`: only a write makes them equal again."""
        for name in self._buffers:
            buffer = getattr(self.copy, name)
            rows = buffer.view(len(buffer), -1).view(torch.uint8)
            rows[indices] = ~rows[indices]


def compare(served: Any, ours: Any, future_map: Any, shadowed: Any, batch: Any) -> Comparison:
    """Compare two draft inputs, and the rows that were relayed, byte for byte on their device."""
    pairs = (
        {f.name: (getattr(served, f.name), getattr(ours, f.name)) for f in fields(served)}
        if is_dataclass(served)
        else {}
    )
    if batch.enable_overlap:
        indices = batch.req_pool_indices
        for name in (*BUFFERS.values(), *_VECTORS):
            theirs, mine = getattr(future_map, name, None), getattr(shadowed, name, None)
            pairs[name] = (
                None if theirs is None else theirs[indices],
                None if mine is None else mine[indices],
            )
    names, flags, unequal = [], [], []
    for name, (theirs, mine) in pairs.items():
        if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
            if theirs is not mine and (isinstance(theirs, torch.Tensor) or theirs != mine):
                unequal.append(name)
        elif (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
            unequal.append(name)
        elif theirs is not mine:
            names.append(name)
            flags.append((_bytes(theirs) != _bytes(mine)).any())
    on_device = torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool)
    on_host = torch.empty(len(flags), dtype=torch.bool, pin_memory=on_device.is_cuda)
    on_host.copy_(on_device, non_blocking=True)
    return Comparison(names, on_host, unequal, [req.rid for req in batch.reqs], mark(on_device.device))


def _existing(future_map: Any) -> dict[str, torch.Tensor]:
    buffers = {name: getattr(future_map, name, None) for name in (*BUFFERS.values(), *_VECTORS)}
    return {name: buffer for name, buffer in buffers.items() if buffer is not None}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
