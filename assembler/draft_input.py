"""`EagleDraftInput`: what the draft worker of the decode node takes, with sglang's names and call shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch


class CaptureHiddenMode(IntEnum):
    """Which hidden states a forward pass keeps: none, the last token's, or all."""

    NULL = 0
    LAST = 1
    FULL = 2


_EAGLE_ROWS = ("topk_p", "topk_index", "hidden_states")


@dataclass
class EagleDraftInput:
    """Row i of each tensor is the i-th request's.

    Under overlap (`future_indices` set) `filter_batch` and `merge_batch` change only the indices and
    the flags; the rows of another batch would be misaligned, and so they are dropped until
    `FutureMap.resolve` fills them again.
    """

    topk_p: torch.Tensor | None = None  # [b, topk * steps] float32; the builder, resolve
    topk_index: torch.Tensor | None = None  # [b, topk * steps] int64; the builder, resolve
    hidden_states: torch.Tensor | None = None  # [b, hidden]; the builder, resolve
    bonus_tokens: torch.Tensor | None = None  # [b] the target's own next token; the builder, resolve
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.LAST
    future_indices: torch.Tensor | None = None  # [b] request pool indices under overlap; the builder
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # [b, width] fields beyond EAGLE's three
    present: dict[str, bool] = field(default_factory=dict)  # an optional field: every row has it (host)
    valid: dict[str, torch.Tensor] = field(default_factory=dict)  # [b] bool an optional field; resolve

    def rows(self, name: str) -> torch.Tensor | None:
        """The tensor of a field, EAGLE's or an extra one."""
        rows: torch.Tensor | None = getattr(self, name) if name in _EAGLE_ROWS else self.extras.get(name)
        return rows

    def set_rows(self, name: str, rows: torch.Tensor | None) -> None:
        if name in _EAGLE_ROWS:
            setattr(self, name, rows)
        elif rows is None:
            self.extras.pop(name, None)
        else:
            self.extras[name] = rows

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: Sequence[int] | None = None) -> None:
        """Keep the rows `new_indices` (positions or a mask), in that order."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            self._drop_rows()
            return
        for name in (*_EAGLE_ROWS, *self.extras):
            rows = self.rows(name)
            self.set_rows(name, None if rows is None else rows[new_indices])
        self.bonus_tokens = None if self.bonus_tokens is None else self.bonus_tokens[new_indices]
        self.valid = {name: valid[new_indices] for name, valid in self.valid.items()}

    def merge_batch(self, spec_info: EagleDraftInput) -> None:
        """Append the rows of `spec_info`. A field that only one side's rows have is a ValueError."""
        if spec_info.num_rows == 0:
            return
        if self.num_rows == 0:
            self._become(spec_info)
            return
        if (self.future_indices is None) != (spec_info.future_indices is None):
            raise ValueError("one draft input is under overlap (it has future_indices), the other is not")
        present = {
            name: self.present.get(name, True) and spec_info.present.get(name, True)
            for name in (*self.present, *spec_info.present)
        }
        if self.future_indices is not None:
            assert spec_info.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, spec_info.future_indices])
            self.present = present
            self._drop_rows()
            return
        # All is computed before anything is set: a failed merge changes nothing.
        merged = {
            name: _cat(name, self.rows(name), spec_info.rows(name), present.get(name, True))
            for name in dict.fromkeys((*_EAGLE_ROWS, *self.extras, *spec_info.extras))
        }
        bonus_tokens = _cat("bonus_tokens", self.bonus_tokens, spec_info.bonus_tokens, True)
        valid = {
            name: torch.cat([_valid(side, name, known.device) for side in (self, spec_info)])
            for name, known in {**self.valid, **spec_info.valid}.items()
        }
        for name, rows in merged.items():
            self.set_rows(name, rows)
        self.bonus_tokens, self.present, self.valid = bonus_tokens, present, valid

    @property
    def num_rows(self) -> int:
        """The number of requests."""
        rows = (self.rows(name) for name in (*_EAGLE_ROWS, *self.extras))
        return next(
            (len(tensor) for tensor in (self.future_indices, self.bonus_tokens, *rows) if tensor is not None), 0
        )

    @classmethod
    def create_idle_input(
        cls,
        device: torch.device | str,
        hidden_size: int | None,
        dtype: torch.dtype | None,
        topk: int,
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
    ) -> EagleDraftInput:
        """Typed zero-row tensors, for an idle data-parallel rank. hidden_size None: the draft reads none."""
        return cls(
            topk_p=torch.empty((0, topk), dtype=torch.float32, device=device),
            topk_index=torch.empty((0, topk), dtype=torch.int64, device=device),
            hidden_states=None if hidden_size is None else torch.empty((0, hidden_size), dtype=dtype, device=device),
            bonus_tokens=torch.empty((0,), dtype=torch.int64, device=device),
            capture_hidden_mode=capture_hidden_mode,
        )

    def _become(self, other: EagleDraftInput) -> None:
        self.topk_p, self.topk_index, self.hidden_states = other.topk_p, other.topk_index, other.hidden_states
        self.bonus_tokens, self.future_indices = other.bonus_tokens, other.future_indices
        self.extras, self.present, self.valid = dict(other.extras), dict(other.present), dict(other.valid)

    def _drop_rows(self) -> None:
        self.topk_p = self.topk_index = self.hidden_states = self.bonus_tokens = None
        self.extras, self.valid = {}, {}


def _valid(draft_input: EagleDraftInput, name: str, device: torch.device) -> torch.Tensor:
    """[b] bool: which rows have the field; all, where nothing else is known."""
    known = draft_input.valid.get(name)
    return torch.ones(draft_input.num_rows, dtype=torch.bool, device=device) if known is None else known


def _cat(name: str, first: torch.Tensor | None, second: torch.Tensor | None, is_present: bool) -> torch.Tensor | None:
    if not is_present or (first is None and second is None):
        return None
    if first is None or second is None:
        raise ValueError(f"{name} is there for the rows of one draft input only")
    if (first.shape[1:], first.dtype) != (second.shape[1:], second.dtype):
        raise ValueError(
            f"{name}: rows of {tuple(first.shape[1:])} {first.dtype} and of {tuple(second.shape[1:])} {second.dtype}"
        )
    return torch.cat([first, second])
