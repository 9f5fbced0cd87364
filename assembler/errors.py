"""What draftgather raises.

    DraftRowError(ValueError)      one or more rows of the batch are bad; `.problems` lists them all
      MissingRowError              a field that must be there is not, or was never written
      RowShapeError                another width or rank than the field's
      RowDtypeError                another dtype, and the conversion is not exact
      RowDeviceError               a row lies where the assembler cannot read it
      RowValueError                debug mode: an id outside the vocabulary, a probability not finite
      SlotError                    a slot out of range, not written, torn, or of another owner
    RelayError(ValueError)         future indices, lengths, tokens or the future map do not fit
    LayoutError(ValueError)        a transfer's two sides have different field lists
    CapacityError(ValueError)      more rows than the assembler was made for
    MailboxFullError(RuntimeError) no free slot: fall back to your own copies, nothing waits
    CaptureError(RuntimeError)     called while a CUDA graph is being captured
    AlgorithmError(ValueError)     a speculative algorithm's registration or hand-off is incomplete

When one is raised nothing has been written: not the outputs, not the future map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Problem:
    """One bad row."""

    position: int  # place of the request in the batch
    request_id: object  # the caller's id of it, or None
    field: str  # name of the field, or "slot"
    got: str
    expected: str
    error: type[DraftRowError]

    def __str__(self) -> str:
        request = f"row {self.position}" if self.request_id is None else f"request {shown(self.request_id)}"
        return f"{request}: {self.field} {self.got}, expected {self.expected}"


class DraftRowError(ValueError):
    """Rows of a batch are bad. `problems` has one entry a bad row and field."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        shown = "; ".join(str(problem) for problem in self.problems[:8])
        more = len(self.problems) - 8
        super().__init__(shown + (f"; and {more} more" if more > 0 else ""))

    def __reduce__(self) -> tuple[type[DraftRowError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class MissingRowError(DraftRowError):
    """A row that must be there is not, or was never written."""


class RowShapeError(DraftRowError):
    """A row has another width or rank than its field."""


class RowDtypeError(DraftRowError):
    """A row has another dtype than its field, and converting it would not be exact."""


class RowDeviceError(DraftRowError):
    """A row lies where the assembler cannot read it."""


class RowValueError(DraftRowError):
    """Debug mode only: an id outside the vocabulary, or a probability that is not finite."""


class SlotError(DraftRowError):
    """A slot is out of range, not written, torn, of another layout or of another owner."""


class RelayError(ValueError):
    """What is to be relayed does not fit the future map."""


class LayoutError(ValueError):
    """The two sides of a transfer lay out their records differently."""


class CapacityError(ValueError):
    """More rows than the assembler was made for."""


class MailboxFullError(RuntimeError):
    """No slot is free. The caller keeps its own copy of the row; nothing waits here."""


class CaptureError(RuntimeError):
    """Called while a CUDA graph is being captured: slots and addresses would be frozen into the graph."""


class AlgorithmError(ValueError):
    """A speculative algorithm is registered incompletely, or its hand-off yielded nothing."""


def shown(value: object) -> str:
    """`value` in an error's text: short, and without a look into a tensor, whose memory may be gone."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {value.dtype}"
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise the one class that all `problems` share, else their root; return when there are none."""
    if not problems:
        return
    kinds = {problem.error for problem in problems}
    raise (kinds.pop() if len(kinds) == 1 else DraftRowError)(problems)
