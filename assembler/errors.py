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

When one is raised nothing has been written: not the outputs, not the future map. Each class's `remedy`, one
sentence, goes into the log line about it, not into its message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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

    remedy: ClassVar[str] = "abort these requests, or leave them out; `check_slots` and `check_rows` name them before"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        shown = "; ".join(str(problem) for problem in self.problems[:8])
        more = len(self.problems) - 8
        super().__init__(shown + (f"; and {more} more" if more > 0 else ""))

    def __reduce__(self) -> tuple[type[DraftRowError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class MissingRowError(DraftRowError):
    """A row that must be there is not, or was never written."""

    remedy: ClassVar[str] = (
        "let a request into a batch only when its hand-off is complete, or make the field `optional`"
    )


class RowShapeError(DraftRowError):
    """A row has another width or rank than its field."""

    remedy: ClassVar[str] = "compare top-k, number of steps and hidden size of the prefill and the decode node"


class RowDtypeError(DraftRowError):
    """A row has another dtype than its field, and converting it would not be exact."""

    remedy: ClassVar[str] = (
        "compare the dtypes of the prefill and the decode node, or allow the conversion by Field(..., allow_cast=True)"
    )


class RowDeviceError(DraftRowError):
    """A row lies where the assembler cannot read it."""

    remedy: ClassVar[str] = "bring the row to the CPU or to the assembler's device before"


class RowValueError(DraftRowError):
    """Debug mode only: an id outside the vocabulary, or a probability that is not finite."""

    remedy: ClassVar[str] = (
        "look for what writes into a row after it was handed over, and compare `vocab_size` with the model's"
    )


class SlotError(DraftRowError):
    """A slot is out of range, not written, torn, of another layout or of another owner."""

    remedy: ClassVar[str] = (
        "put or accept a slot before its batch, release it only after, and pass the owner that it was put for"
    )


class RelayError(ValueError):
    """What is to be relayed does not fit the future map."""

    remedy: ClassVar[str] = (
        "make the future map of the assembler's fields on its device, and give each row a future index of its own"
    )


class LayoutError(ValueError):
    """The two sides of a transfer lay out their records differently."""

    remedy: ClassVar[str] = "start the prefill and the decode node with the same field list, in the same order"


class CapacityError(ValueError):
    """More rows than the assembler was made for."""

    remedy: ClassVar[str] = "make the assembler with a larger `max_batch_size`, or split the batch"


class MailboxFullError(RuntimeError):
    """No slot is free. The caller keeps its own copy of the row; nothing waits here."""

    remedy: ClassVar[str] = (
        "make the mailbox with a larger `num_slots`, or release slots earlier; this row can be kept as a copy"
    )


class CaptureError(RuntimeError):
    """Called while a CUDA graph is being captured: slots and addresses would be frozen into the graph."""

    remedy: ClassVar[str] = 'call before the capture, with outputs="fixed", and let the graph read those tensors'


class AlgorithmError(ValueError):
    """A speculative algorithm is registered incompletely, or its hand-off yielded nothing."""

    remedy: ClassVar[str] = "register the algorithm with all that its hand-off needs"


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
