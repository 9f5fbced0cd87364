"""Speculative decoding, one step a function: what both nodes run, and the reference that runs it in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pd_pair.model import Model, no_past, trajectories
from pd_pair.workload import Request, RowKind

TOPK = 4
NUM_PATHS = 2  # of the top-k, those with the most probability begin a path each
NUM_STEPS = 4  # draft tokens of a path


class DraftRows(NamedTuple):
    """What the next draft step starts from, the fields of `dg.eagle_fields`."""

    topk_p: torch.Tensor  # [b, topk] float32
    topk_index: torch.Tensor  # [b, topk] int64, candidates for the token after the bonus token
    hidden_states: torch.Tensor  # [b, hidden] float64, the draft head's own, at the bonus token


class Prefilled(NamedTuple):
    first_token: int
    rows: DraftRows  # of one
    kv: torch.Tensor  # [1, n, layers, 2, hidden] of the prompt


class Verified(NamedTuple):
    num_accepted: torch.Tensor  # [b] draft tokens
    tokens: torch.Tensor  # [b, steps + 1]: the first num_accepted, then the new bonus token, count
    bonus_tokens: torch.Tensor  # [b]
    hidden: torch.Tensor  # [b, hidden] the target's, at the last position before the bonus token
    kv: torch.Tensor  # [b, steps + 1, layers, 2, hidden]: the first num_accepted + 1 count


class Step(NamedTuple):
    position: int  # tokens generated before it
    num_accepted: int


class Output(NamedTuple):
    tokens: list[int]
    steps: list[Step]


def prefill(model: Model, prompt: Sequence[int]) -> Prefilled:
    hidden, kv = model.forward(torch.tensor([prompt]), *no_past(1))
    first_token = (hidden[:, -1] @ model.lm_head).argmax(dim=1)
    return Prefilled(int(first_token), next_rows(model, hidden[:, -1], first_token), kv)


def next_rows(model: Model, hidden: torch.Tensor, bonus_tokens: torch.Tensor) -> DraftRows:
    """The draft rows after the target's hidden states [b, hidden] and the bonus tokens [b] made of them."""
    drafted = model.draft(hidden, bonus_tokens)
    topk_p, topk_index = torch.softmax(drafted @ model.lm_head, dim=1).topk(TOPK)
    return DraftRows(topk_p.float(), topk_index, drafted)


def draft_paths(model: Model, rows: DraftRows) -> torch.Tensor:
    """[b, paths, steps] draft tokens: candidates of the rows, then what follows from the rows' hidden states."""
    likeliest = rows.topk_p.topk(NUM_PATHS).indices
    tokens = rows.topk_index.gather(1, likeliest).flatten()
    hidden = rows.hidden_states.repeat_interleave(NUM_PATHS, dim=0)
    path = [tokens]
    for _ in range(NUM_STEPS - 1):
        hidden = model.draft(hidden, tokens)
        tokens = (hidden @ model.lm_head).argmax(dim=1)
        path.append(tokens)
    return torch.stack(path, dim=1).view(-1, NUM_PATHS, NUM_STEPS)


def verify(
    model: Model, bonus_tokens: torch.Tensor, paths: torch.Tensor, past: torch.Tensor, past_lens: torch.Tensor
) -> Verified:
    """One target pass over the bonus token [b] and each path [b, paths, steps]; the longest correct beginning wins.

    Paths are verified side by side, as sequences of their own: this small target has no tree mask.
    """
    begin, past, past_lens = (x.repeat_interleave(NUM_PATHS, dim=0) for x in (bonus_tokens, past, past_lens))
    drafted = paths.flatten(0, 1)
    hidden, kv = model.forward(torch.cat([begin[:, None], drafted], dim=1), past, past_lens)
    targets = (hidden @ model.lm_head).argmax(dim=2)
    num_correct = (drafted == targets[:, :-1]).cumprod(dim=1).sum(dim=1)
    num_accepted, winner = num_correct.view(-1, NUM_PATHS).max(dim=1)
    winner += torch.arange(len(winner)) * NUM_PATHS
    return Verified(
        num_accepted,
        targets[winner],
        targets[winner, num_accepted],
        hidden[winner, num_accepted],
        kv[winner],
    )


def packed_rows(model: Model, requests: Sequence[Request], number: int, own: DraftRows, kind: RowKind) -> DraftRows:
    """What a prefill node packs for request `number`, whose own draft row is `own`."""
    if kind == "stale":
        return prefill(model, requests[(number + 1) % len(requests)].prompt).rows
    return DraftRows(*map(torch.zeros_like, own)) if kind == "zeroed" else own


# -- the reference: one process, one request at a time, no hand-over, no draftgather


def decode_alone(model: Model, request: Request, prefilled: Prefilled, rows: DraftRows) -> Output:
    """Decode one request from `rows` on."""
    tokens, steps, past = [prefilled.first_token], [], prefilled.kv
    while len(tokens) < request.num_tokens:
        verified = verify(
            model, torch.tensor(tokens[-1:]), draft_paths(model, rows), past, torch.tensor([past.shape[1]])
        )
        num_new = int(verified.num_accepted) + 1
        steps.append(Step(len(tokens), num_new - 1))
        tokens += verified.tokens[0, :num_new].tolist()
        past = torch.cat([past, verified.kv[:, :num_new]], dim=1)
        rows = next_rows(model, verified.hidden, verified.bonus_tokens)
    return Output(tokens[: request.num_tokens], steps)


def decode_all_alone(model: Model, requests: Sequence[Request], kind: RowKind) -> list[Output]:
    prefilled = [prefill(model, request.prompt) for request in requests]
    return [
        decode_alone(model, request, one, packed_rows(model, requests, number, one.rows, kind))
        for number, (request, one) in enumerate(zip(requests, prefilled, strict=True))
    ]


def greedy(model: Model, request: Request) -> list[int]:
    """Without speculation: what every output must be."""
    return trajectories(model, torch.tensor([request.prompt]), request.num_tokens)[1][0].tolist()
