"""The prebuilt batch's last step before its first decode: one polymorphic call, two outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftgather.algorithms import CustomSpecAlgo, SpeculativeAlgorithm
from draftgather.errors import AlgorithmError, MissingRowError, Problem, raise_problems


@dataclass
class ScheduleBatch:
    """As much of a scheduler's batch as the hand-off reads and sets."""

    reqs: Sequence[Any]  # b requests, each with rid and output_ids
    device: torch.device | str
    req_pool_indices: torch.Tensor  # [b] int64 keys of the future map
    seq_lens: torch.Tensor  # [b] int64
    spec_algorithm: SpeculativeAlgorithm | CustomSpecAlgo = SpeculativeAlgorithm.NONE
    enable_overlap: bool = True
    spec_info: Any = None  # the draft input; process_prebuilt, where the algorithm has one
    input_ids: torch.Tensor | None = None  # [b] the decode input; process_prebuilt, where it has none

    def process_prebuilt(self, server_args: Any, future_map: Any) -> None:
        """Seed the first decode step: set `spec_info`, or let the last tokens be the decode input.

        Raises AlgorithmError where an algorithm that is not stateless yields no draft input,
        MissingRowError where a request has no output token; then the batch is unchanged.
        """
        raise_problems(
            [
                Problem(i, req.rid, "output_ids", "is empty", "the token that prefill sampled", MissingRowError)
                for i, req in enumerate(self.reqs)
                if not len(req.output_ids)
            ]
        )
        last_tokens = torch.tensor([req.output_ids[-1] for req in self.reqs], dtype=torch.int64, device="cpu")
        if torch.device(self.device).type == "cuda":
            last_tokens = last_tokens.pin_memory()
        last_tokens_tensor = last_tokens.to(self.device, non_blocking=True)
        spec_info = self.spec_algorithm.build_disagg_draft_input(self, server_args, last_tokens_tensor, future_map)
        if spec_info is not None:
            self.spec_info = spec_info
        elif getattr(self.spec_algorithm, "stateless", False):
            self.input_ids = last_tokens_tensor
        else:
            raise AlgorithmError(
                f"{self.spec_algorithm.name} yielded no draft input and does not say that it is stateless: "
                "the first decode step would find none"
            )
