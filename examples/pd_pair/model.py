"""The model of both nodes: a tiny causal target with a KV cache, and an EAGLE-style draft head fitted to it.

All of it is float64. Another batch sums in another order, which moves a logit by about 1e-14; the two best logits
of a position are farther apart by orders of magnitude (`test_no_choice_is_close` looks). So nothing that is chosen
depends on who else is in the batch, and acceptance lengths can be compared one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

VOCAB_SIZE = 256
HIDDEN_SIZE = 64
NUM_LAYERS = 2
NUM_HEADS = 4
MAX_LENGTH = 128  # tokens of a sequence, rejected drafts included
DTYPE = torch.float64

# How much attention adds to a hidden state: the more, the harder the next one is to draft.
_ATTENTION_SCALE = 0.5
_NUM_FEATURES = 384


@dataclass(frozen=True)
class Model:
    embedding: torch.Tensor  # [vocab, hidden]
    qkv: torch.Tensor  # [layers, hidden, 3 * hidden]
    out: torch.Tensor  # [layers, hidden, hidden]
    up: torch.Tensor  # [layers, hidden, 4 * hidden]
    down: torch.Tensor  # [layers, 4 * hidden, hidden]
    lm_head: torch.Tensor  # [hidden, vocab], the draft's too
    draft_features: torch.Tensor  # [2 * hidden, features]
    draft_head: torch.Tensor  # [2 * hidden + features, hidden]

    def forward(
        self, tokens: torch.Tensor, past: torch.Tensor, past_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's hidden states [b, n, hidden] and KV [b, n, layers, 2, hidden] of `tokens` [b, n].

        They follow past_lens [b] earlier tokens, whose KV is the beginning of `past` [b, length, layers, 2, hidden].
        """
        batch, n = tokens.shape
        hidden = self.embedding[tokens] + _POSITIONS[past_lens[:, None] + torch.arange(n)]
        is_past = (torch.arange(past.shape[1]) < past_lens[:, None])[:, None, :].expand(batch, n, -1)
        mask = torch.cat([is_past, torch.ones(n, n, dtype=torch.bool).tril().expand(batch, n, n)], dim=2)
        kv = []
        for layer in range(NUM_LAYERS):
            query, key, value = (_normed(hidden) @ self.qkv[layer]).chunk(3, dim=2)
            kv.append(torch.stack([key, value], dim=2))
            keys, values = torch.cat([past[:, :, layer], kv[layer]], dim=1).unbind(dim=2)
            attended = scaled_dot_product_attention(_heads(query), _heads(keys), _heads(values), mask[:, None])
            hidden = hidden + attended.transpose(1, 2).flatten(2) @ self.out[layer]
            hidden = hidden + torch.relu(_normed(hidden) @ self.up[layer]) @ self.down[layer]
        return _normed(hidden), torch.stack(kv, dim=2)

    def draft(self, hidden: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """The next hidden states [b, hidden], guessed from those of a position and the tokens [b] that follow it."""
        return self.features(hidden, next_tokens) @ self.draft_head

    def features(self, hidden: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """[b, 2 * hidden + features]: what the draft head is linear in."""
        both = torch.cat([hidden, self.embedding[next_tokens]], dim=1)
        return torch.cat([both, torch.relu(both @ self.draft_features)], dim=1)

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Model:
        return cls(**torch.load(path))


def make_model(seed: int = 0) -> Model:
    """A target of random weights, and a draft head fitted to its own trajectories by ridge regression."""
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=DTYPE, generator=generator) * scale

    fan_in = HIDDEN_SIZE**-0.5
    target = Model(
        embedding=weights(VOCAB_SIZE, HIDDEN_SIZE),
        qkv=weights(NUM_LAYERS, HIDDEN_SIZE, 3 * HIDDEN_SIZE, scale=1.2 * fan_in),
        out=weights(NUM_LAYERS, HIDDEN_SIZE, HIDDEN_SIZE, scale=_ATTENTION_SCALE * fan_in),
        up=weights(NUM_LAYERS, HIDDEN_SIZE, 4 * HIDDEN_SIZE, scale=fan_in),
        down=weights(NUM_LAYERS, 4 * HIDDEN_SIZE, HIDDEN_SIZE, scale=fan_in / 2),
        lm_head=weights(HIDDEN_SIZE, VOCAB_SIZE),
        draft_features=weights(2 * HIDDEN_SIZE, _NUM_FEATURES, scale=fan_in),
        draft_head=torch.zeros(2 * HIDDEN_SIZE + _NUM_FEATURES, HIDDEN_SIZE, dtype=DTYPE),
    )
    prompts = torch.randint(VOCAB_SIZE, (192, 12), generator=generator)
    hidden, tokens = trajectories(target, prompts, 48)
    inputs = target.features(hidden[:, :-1].flatten(0, 1), tokens[:, :-1].flatten())
    outputs = hidden[:, 1:].flatten(0, 1)
    ridge = 1e-3 * len(inputs) * torch.eye(inputs.shape[1], dtype=DTYPE)
    return replace(target, draft_head=torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ outputs))


def trajectories(model: Model, prompts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain greedy decoding of `prompts` [b, n]: hidden states [b, num_tokens, hidden], and the tokens made of them."""
    past, past_lens = no_past(len(prompts))
    tokens, all_hidden, all_tokens = prompts, [], []
    for _ in range(num_tokens):
        hidden, kv = model.forward(tokens, past, past_lens)
        past, past_lens = torch.cat([past, kv], dim=1), past_lens + tokens.shape[1]
        tokens = (hidden[:, -1:] @ model.lm_head).argmax(dim=2)
        all_hidden.append(hidden[:, -1])
        all_tokens.append(tokens[:, 0])
    return torch.stack(all_hidden, dim=1), torch.stack(all_tokens, dim=1)


def no_past(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The KV and the lengths of `batch` sequences that have not begun."""
    return torch.zeros(batch, 0, NUM_LAYERS, 2, HIDDEN_SIZE, dtype=DTYPE), torch.zeros(batch, dtype=torch.int64)


def _normed(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-6)


def _heads(rows: torch.Tensor) -> torch.Tensor:
    """[b, n, hidden] as [b, heads, n, hidden / heads]."""
    return rows.view(*rows.shape[:2], NUM_HEADS, -1).transpose(1, 2)


def _positions() -> torch.Tensor:
    """[length, hidden] sines and cosines."""
    rates = 1e-4 ** (torch.arange(0, HIDDEN_SIZE, 2, dtype=DTYPE) / HIDDEN_SIZE)
    angles = torch.arange(MAX_LENGTH, dtype=DTYPE)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


_POSITIONS = _positions()
