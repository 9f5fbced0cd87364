"""What the pair served, held against plain greedy decoding and against the same model in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pd_pair.decoder import Output, decode_all_alone, greedy
from pd_pair.model import Model
from pd_pair.workload import ROW_KINDS, Request, RowKind

# A wrong first row must cost so many accepted tokens at the least, or the comparison would not see one.
LEAST_DROP = 0.5


class Reference(NamedTuple):
    """Of one list of requests, in one process."""

    tokens: list[list[int]]  # plain greedy decoding
    outputs: dict[RowKind, list[Output]]

    @classmethod
    def of(cls, model: Model, requests: Sequence[Request]) -> Reference:
        return cls(
            [greedy(model, request) for request in requests],
            {kind: decode_all_alone(model, requests, kind) for kind in ROW_KINDS},
        )


def wrong_tokens(outputs: Sequence[Output], tokens: Sequence[list[int]]) -> list[str]:
    """Requests whose tokens are not those of plain greedy decoding."""
    return [
        f"request {number}: tokens are {output.tokens}, expected {expected}"
        for number, (output, expected) in enumerate(zip(outputs, tokens, strict=True))
        if output.tokens != expected
    ]


def wrong_steps(outputs: Sequence[Output], expected: Sequence[Output]) -> list[str]:
    """Requests whose acceptance lengths are not, step by step, those of one process."""
    return [
        f"request {number}: (position, accepted) are {list(map(tuple, output.steps))}, "
        f"expected {list(map(tuple, alone.steps))}"
        for number, (output, alone) in enumerate(zip(outputs, expected, strict=True))
        if output.steps != alone.steps
    ]


class LaterSteps(NamedTuple):
    """Steps after the first that begin at a position where one of the right run begins, too."""

    num_compared: int
    num_steps: int
    wrong: list[str]


def later_steps(outputs: Sequence[Output], right: Sequence[Output]) -> LaterSteps:
    """A handed-over row matters for the first step only: from then on, equal positions accept as many tokens."""
    compared, num_steps, wrong = 0, 0, []
    for number, (output, other) in enumerate(zip(outputs, right, strict=True)):
        accepted = dict(other.steps[1:])
        num_steps += len(output.steps[1:])
        for position, num_accepted in output.steps[1:]:
            compared += position in accepted
            if accepted.get(position, num_accepted) != num_accepted:
                wrong.append(
                    f"request {number}: {num_accepted} tokens accepted at position {position}, "
                    f"expected {accepted[position]}"
                )
    return LaterSteps(compared, num_steps, wrong)


def mean_accepted(outputs: Iterable[Output]) -> float:
    accepted = [step.num_accepted for output in outputs for step in output.steps]
    return sum(accepted) / len(accepted)


def mean_first(outputs: Iterable[Output]) -> float:
    """Of the first step after the hand-over, the only one that a handed-over row takes part in."""
    accepted = [output.steps[0].num_accepted for output in outputs if output.steps]
    return sum(accepted) / len(accepted)


def problems(outputs: dict[RowKind, list[Output]], reference: Reference) -> list[str]:
    """All that is wrong with what was served of one mix."""
    found = []
    for kind in ROW_KINDS:
        wrong = wrong_tokens(outputs[kind], reference.tokens) + wrong_steps(outputs[kind], reference.outputs[kind])
        if kind != "right":
            later = later_steps(outputs[kind], outputs["right"])
            wrong += later.wrong
            if later.num_compared < later.num_steps / 2:
                wrong.append(f"only {later.num_compared} of {later.num_steps} later steps could be compared")
            drop = mean_first(outputs["right"]) - mean_first(outputs[kind])
            if drop < LEAST_DROP:
                wrong.append(f"the first step accepts {drop} tokens less than with right rows, expected {LEAST_DROP}")
        found += [f"{kind} rows: {text}" for text in wrong]
    return found
