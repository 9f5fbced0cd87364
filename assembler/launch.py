"""Step 4 of a row's path: one launch, on the caller's current stream."""

from __future__ import annotations

from draftgather.completion import DONE, CompletionMarker
from draftgather.kernels.gather_rows import LaunchPlan
from draftgather.kernels.gather_rows_torch import gather_rows_torch
from draftgather.kernels.row_tables import LaunchDescriptor
from draftgather.machine import Machine


def launch(descriptor: LaunchDescriptor, machine: Machine, plan: LaunchPlan | None = None) -> CompletionMarker:
    """Run the kernel, or its twin where there is no kernel; the marker tells when it is done."""
    if machine.has_kernel:
        return machine.run(descriptor, plan)
    gather_rows_torch(descriptor)
    return DONE
