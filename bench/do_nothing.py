"""A driver under Triton that does nothing: the host side of a launch, timed and counted without a GPU.

Everything above the driver is Triton's own and ours: checks, description, the look-up of the compiled
kernel, hooks. What would reach the C launcher is counted and dropped. **Figures taken on it end before
the C launcher and the CUDA driver.**
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from draftgather.completion import DONE, CompletionMarker
from draftgather.kernels.gather_rows import LaunchPlan
from draftgather.kernels.row_tables import LaunchDescriptor
from draftgather.machine import Machine

CPU = torch.device("cpu")


@dataclass(slots=True)
class Counts:
    """What a GPU would have been asked for."""

    launches: int = 0
    uploads: int = 0
    events: int = 0
    waits: int = 0
    last: tuple[Any, ...] = field(default=(), repr=False)  # grid, stream, function, metadata, hooks and arguments


class _Utils:
    def load_binary(self, *arguments: object) -> tuple[int, ...]:
        return (1, 2, 24, 0, 1024)  # module, function, registers, spills, most threads

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class DoNothingDriver:
    """Triton's view of a GPU of one kind, below which nothing is there."""

    utils = _Utils()

    def __init__(self, counts: Counts, target: GPUTarget) -> None:
        self._target = target

        class Launcher:
            def __init__(self, source: object, metadata: object) -> None:
                pass

            def __call__(self, *arguments: Any) -> None:
                counts.launches += 1
                counts.last = arguments
                # As the C launcher does: it is given metadata and hooks beside the kernel's own arguments.
                metadata, enter, leave = arguments[6:9]
                if enter is not None:
                    enter(metadata)
                if leave is not None:
                    leave(metadata)

        self.launcher_cls = Launcher

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


class _Marker:
    """Of a launch that is done; to wait for it would be counted."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def query(self) -> bool:
        return True

    def wait(self, stream: object = None) -> None:
        self._counts.waits += 1


class DoNothingMachine(Machine):
    """A machine whose launches reach the do-nothing driver. Its device is called "cpu", and is not written to."""

    counts: Counts
    reads_rows: bool

    @classmethod
    def of(cls, counts: Counts, *, zero_copy: bool = True, reads_rows: bool = True) -> DoNothingMachine:
        """zero_copy: staging buffers are read in place; reads_rows: rows and records are."""
        machine = cls(CPU, has_kernel=True, pins=False, zero_copy=zero_copy)
        object.__setattr__(machine, "counts", counts)
        object.__setattr__(machine, "reads_rows", reads_rows)
        return machine

    def can_read(self, tensor: torch.Tensor) -> bool:
        return self.reads_rows

    def run(self, descriptor: LaunchDescriptor, plan: LaunchPlan | None = None) -> CompletionMarker:
        super().run(descriptor, plan)
        self.counts.events += 1
        return _Marker(self.counts)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self.counts.uploads += 1
        return torch.empty_like(tensor)

    def zero(self, tensors: Sequence[torch.Tensor]) -> CompletionMarker:
        return DONE


@contextmanager
def do_nothing(target: GPUTarget | None = None) -> Iterator[Counts]:
    """Put the driver in place; what is launched meanwhile is counted."""
    counts = Counts()
    before = driver._active
    driver.set_active(DoNothingDriver(counts, target or GPUTarget("cuda", 90, 32)))
    try:
        yield counts
    finally:
        driver._active = before
