"""What one call of the assembler yields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from draftgather.completion import CompletionMarker
from draftgather.routes import Route


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Batched draft rows: row i is the i-th request's.

    tensors: [num_padded, width] a field, on the assembler's device; a field that is not present in
        every row is left out, and so are all with batch_outputs=False. With outputs="fresh" they
        are the caller's; with "fixed" the next call overwrites them, and the caller orders that.
    present: a field, whether every row has it: known on the host, without a device read. The relay keeps an
        optional field of each row that has it; `FutureMap.resolve` tells by `valid` which rows do.
    done: the launch's completion marker; `tensors` may be used at once on the same stream.
    """

    tensors: Mapping[str, torch.Tensor]
    route: Route  # which way the rows came: a string; its `reason` says why
    present: Mapping[str, bool]
    done: CompletionMarker
    num_rows: int  # b: rows of requests
    num_padded: int  # rows of the tensors; b.. are zero

    def __repr__(self) -> str:
        shapes = {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in self.tensors.items()}
        return f"DraftBatch({self.num_rows} rows, route={self.route!r}, tensors={shapes})"
