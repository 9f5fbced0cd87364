"""What the pair is given to do: requests, and how they come in."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from pd_pair.model import VOCAB_SIZE

# What prefill packs: the request's own draft row, that of the request after it, or nothing but zeros.
RowKind = Literal["right", "stale", "zeroed"]
ROW_KINDS: tuple[RowKind, ...] = ("right", "stale", "zeroed")
NUM_REQUESTS = 48


class Request(NamedTuple):
    prompt: tuple[int, ...]
    num_tokens: int  # to generate


class Mix(NamedTuple):
    name: str
    requests: tuple[Request, ...]
    arrivals: tuple[int, ...]  # of each request: the decode node's iteration, ascending
    max_running: int


class Run(NamedTuple):
    mix: Mix
    kind: RowKind


def make_mixes(num_requests: int = NUM_REQUESTS, seed: int = 0) -> tuple[Mix, ...]:
    generator = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    def request(prompt_length: int, num_tokens: int) -> Request:
        prompt = torch.randint(VOCAB_SIZE, (prompt_length,), generator=generator)
        return Request(tuple(prompt.tolist()), num_tokens)

    even = tuple(request(16, 24) for _ in range(num_requests))
    mixed = tuple(request(between(1, 60), between(1, 48)) for _ in range(num_requests))
    one_by_one = tuple(3 * i for i in range(num_requests))
    bursts = tuple(12 * (i // 8) for i in range(num_requests))
    at_once = (0,) * num_requests
    return (
        Mix("one by one", even, one_by_one, max_running=1),
        Mix("one by one", even, one_by_one, max_running=4),
        Mix("bursts of 8", even, bursts, max_running=4),
        Mix("bursts of 8", even, bursts, max_running=16),
        Mix("mixed lengths, bursts of 8", mixed, bursts, max_running=16),
        Mix("mixed lengths, all at once", mixed, at_once, max_running=16),
    )
