"""The device at hand: what it can do, and what is queued on it. The one place that knows kinds of machines apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from draftgather.completion import CompletionMarker, mark
from draftgather.errors import CaptureError
from draftgather.kernels.gather_rows import LaunchPlan, gather_rows, plan_launches
from draftgather.kernels.row_tables import LaunchDescriptor
from draftgather.memory import can_pin, zero_copy_works
from draftgather.notices import notice_once

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Machine:
    """device: where the batch goes. has_kernel: rows go through the Triton kernel, else its twin."""

    device: torch.device
    has_kernel: bool
    pins: bool  # the host's side of a transfer can be page-locked
    zero_copy: bool  # the device reads pinned host memory in place, live
    name: str = ""  # of the device's kind, as CUDA has it

    def can_read(self, tensor: torch.Tensor) -> bool:
        """Whether a launch can read `tensor` where it is."""
        return tensor.device == self.device or (self.zero_copy and _is_pinned(tensor))

    def can_read_staging(self, slab: torch.Tensor) -> bool:
        """The same of the library's own buffers: where the machine pins, it may have had no more to pin."""
        return self.zero_copy and (not self.pins or slab.is_pinned())

    def refuse_capture(self) -> None:
        """CaptureError while the current stream is capturing a CUDA graph."""
        if self.has_kernel and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "a CUDA graph is being captured: the slots and addresses of this one batch would be frozen into it. "
                'Assemble before the graph, with outputs="fixed", and let the graph read those tensors'
            )

    # -- work on the caller's current stream, in its order; the host never waits for it

    def plan(self, descriptor: LaunchDescriptor) -> LaunchPlan | None:
        """For launches like this one; None where each is looked at anew."""
        with self.active():
            return plan_launches(descriptor)

    def run(self, descriptor: LaunchDescriptor, plan: LaunchPlan | None = None) -> CompletionMarker:
        """Launch the kernel."""
        with self.active():
            gather_rows(descriptor, plan)
            return mark(self.device)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on the device; until it is done the host may not write there."""
        return torch.empty_like(tensor, device=self.device).copy_(tensor, non_blocking=True)

    def zero(self, tensors: Sequence[torch.Tensor]) -> CompletionMarker:
        """Zero tensors on the device, or pinned ones that it writes to."""
        for tensor in tensors:
            if tensor.device == self.device:
                tensor.zero_()
            else:  # The host's own write would come before launches that are queued already.
                tensor.copy_(torch.zeros_like(tensor, device=self.device), non_blocking=True)
        return mark(self.device)

    def active(self) -> AbstractContextManager[object]:
        """Make `device` the current one around a launch (Triton launches on the current device)."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return _AS_IT_IS
        return torch.cuda.device(self.device)


def _is_pinned(tensor: torch.Tensor) -> bool:
    """Whether both ends are: a registration may cover a part of it only."""
    last = tuple([slice(-1, None)] * tensor.ndim)
    return tensor.is_pinned() and tensor[last].is_pinned()


@cache
def machine_for(device: torch.device) -> Machine:
    """What `device` can do, probed once a process."""
    if device.type == "cpu":
        return Machine(device, has_kernel=False, pins=False, zero_copy=False)
    if device.type != "cuda":
        raise ValueError(f"device is {device}, expected cpu or cuda")
    pins = can_pin()
    # HIP: memory may have another address on the device than on the host; copies are used there.
    if torch.version.hip is not None:
        notice_once("on ROCm rows are copied to the device: reading host memory in place is not enabled there")
    zero_copy = torch.version.hip is None and zero_copy_works(device)
    return Machine(device, True, pins, zero_copy, torch.cuda.get_device_name(device))


def as_device(device: torch.device | str) -> torch.device:
    """`device` with its index: "cuda" is the current one."""
    if not isinstance(device, (str, torch.device)):
        raise ValueError(f"device is {device!r}, expected a torch.device or its name")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}, which torch does not know") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, but torch can use no CUDA device here")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
