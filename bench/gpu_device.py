"""The device of the GPU check, and its stand-ins where there is no GPU: all that needs CUDA in the check is here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol
from unittest import mock

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from triton import knobs

from draftgather.bench.do_nothing import Counts, DoNothingMachine
from draftgather.completion import DONE, CompletionMarker
from draftgather.errors import CaptureError
from draftgather.kernels.gather_rows import LaunchPlan
from draftgather.kernels.row_tables import LaunchDescriptor
from draftgather.machine import Machine, as_device, machine_for

Work = Callable[[], object]
KERNEL_NAME = "_gather_rows_kernel"
# At the highest clock of any GPU that is meant; at a lower one the device sleeps longer.
_CYCLES_A_MS = 2_000_000


class Query(Protocol):
    def query(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """What the device did meanwhile."""

    ours_us: Sequence[float]  # duration of each launch of our kernel
    other_kernels: Sequence[str]
    copies_us: Sequence[float]  # duration of each memcpy
    how: str  # who counted


class Device:
    """What the check needs of a device; this is a CUDA GPU."""

    is_dry = False

    def __init__(self) -> None:
        self.device = as_device("cuda")
        self.machine = machine_for(self.device)
        self._is_profiled: bool | None = None

    def about(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        driver = None
        with suppress(OSError, subprocess.SubprocessError, IndexError):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
        return {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": driver,
        }

    def machine_with(self, *, reads_rows: bool = True, zero_copy: bool = True) -> Machine:
        """reads_rows: that it reads the rows in place is expected; of a real device the rows decide."""
        return self.machine if zero_copy else replace(self.machine, zero_copy=False)

    # -- memory

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def view(self, pinned: torch.Tensor) -> torch.Tensor:
        """A dense pinned tensor as a tensor of the device, not copied. It does not keep its memory."""
        interface = {"shape": (pinned.nbytes,), "typestr": "|u1", "data": (pinned.data_ptr(), False), "version": 2}
        holder = type("Pinned", (), {"__cuda_array_interface__": interface})()
        view = torch.as_tensor(holder, device=self.device)
        if view.data_ptr() != pinned.data_ptr():
            raise RuntimeError("torch copied the pinned memory")
        return view.view(pinned.dtype).view(pinned.shape)

    # -- the stream

    def side_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def busy(self, milliseconds: float) -> Query:
        """Keep the current stream busy for at least so long. Gives a marker behind that work."""
        torch.cuda._sleep(int(milliseconds * _CYCLES_A_MS))  # type: ignore[no-untyped-call]
        marker = torch.cuda.Event()  # type: ignore[no-untyped-call]
        marker.record()
        return marker

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """Every operation of torch's that makes the host wait is an error."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def capture(self, record: Work, meanwhile: Work) -> Work:
        """Capture `record` in a graph, and do `meanwhile` while that is being captured. Gives its replay."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph):
                meanwhile()
                record()
        finally:
            torch.cuda.set_stream(stream)  # torch leaves its own where a capture fails
        return graph.replay

    def is_alive(self) -> bool:
        """False after an error that every later call would meet too."""
        try:
            torch.cuda.synchronize(self.device)
            return int(torch.ones(1, device=self.device).add_(1).item()) == 2
        except RuntimeError:
            return False

    # -- measuring

    def time_us(self, works: Sequence[Work], rounds: int) -> float:
        """Device time of one piece of work, by events, with all of them queued before the first begins."""
        for work in works:
            work()
        for milliseconds in (20, 200):
            self.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.busy(milliseconds)
            start.record()
            for _ in range(rounds):
                for work in works:
                    work()
            end.record()
            is_queued = not start.query()  # type: ignore[no-untyped-call]
            end.synchronize()
            if is_queued:
                return float(start.elapsed_time(end)) * 1000 / (rounds * len(works))
        raise RuntimeError("the host did not queue the work before the device began: only the host was timed")

    def profile(self, work: Work) -> Profile:
        if self._is_profiled is None:
            probe = torch.zeros(8, device=self.device)
            self._is_profiled = len(self._profiled(lambda: [probe.add_(1) for _ in range(4)]).other_kernels) == 4
        return self._profiled(work) if self._is_profiled else self._hooked(work)

    def _profiled(self, work: Work) -> Profile:
        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
            self.synchronize()
        events = [(e.name, e.time_range.elapsed_us()) for e in profiler.events() or () if _is_on_device(e)]
        kernels = [(name, us) for name, us in events if not name.startswith(("Memcpy", "Memset"))]
        return Profile(
            ours_us=[us for name, us in kernels if KERNEL_NAME in name],
            other_kernels=[name for name, _ in kernels if KERNEL_NAME not in name],
            copies_us=[us for name, us in events if name.startswith("Memcpy")],
            how="torch.profiler",
        )

    def _hooked(self, work: Work) -> Profile:
        """Where the profiler sees no kernels: Triton's launches and our uploads, counted on the host."""
        launches: list[float] = []
        copies: list[float] = []
        upload = Machine.upload

        def enter(_metadata: object) -> None:
            launches.append(float("nan"))

        def counted(machine: Machine, tensor: torch.Tensor) -> torch.Tensor:
            copies.append(float("nan"))
            return upload(machine, tensor)

        knobs.runtime.launch_enter_hook.add(enter)
        try:
            with mock.patch.object(Machine, "upload", counted):
                work()
        finally:
            knobs.runtime.launch_enter_hook.remove(enter)
        self.synchronize()
        return Profile(launches, (), copies, "on the host, as torch.profiler sees no kernels here")


def _is_on_device(event: Any) -> bool:
    is_activity = event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    return is_activity and not event.name.endswith(("Synchronize", "Sync", "Wait Event"))


@dataclass(slots=True)
class _Queue:
    """A stream that runs what was queued while it was busy at the next synchronize."""

    is_busy: bool = False
    is_capturing: bool = False
    may_wait: bool = True
    num_drained: int = 0
    work: list[Work] = field(default_factory=list)

    def marker(self) -> CompletionMarker:
        return _Drained(self, self.num_drained) if self.is_busy else DONE

    def drain(self) -> None:
        assert self.may_wait, "the host waited"
        for work in self.work:
            work()
        self.work.clear()
        self.is_busy = False
        self.num_drained += 1


@dataclass(frozen=True, slots=True)
class _Drained:
    queue: _Queue
    num_drained: int

    def query(self) -> bool:
        return self.queue.num_drained > self.num_drained

    def wait(self, stream: object = None) -> None:
        raise AssertionError("waited for a launch")

    def implies(self, earlier: CompletionMarker) -> bool:
        return isinstance(earlier, _Drained) and earlier.num_drained <= self.num_drained


class _DryMachine(Machine):
    """The kernel under Triton's interpreter, on a device that is called "cpu"."""

    queue: _Queue
    reads_rows: bool

    @classmethod
    def of(cls, queue: _Queue, reads_rows: bool, zero_copy: bool) -> _DryMachine:
        machine = cls(torch.device("cpu"), has_kernel=True, pins=False, zero_copy=zero_copy)
        object.__setattr__(machine, "queue", queue)
        object.__setattr__(machine, "reads_rows", reads_rows)
        return machine

    def can_read(self, tensor: torch.Tensor) -> bool:
        return self.reads_rows

    def refuse_capture(self) -> None:
        if self.queue.is_capturing:
            raise CaptureError("a graph is being captured")

    def run(self, descriptor: LaunchDescriptor, plan: LaunchPlan | None = None) -> CompletionMarker:
        if not self.queue.is_busy:
            return super().run(descriptor, plan)
        run = super().run
        self.queue.work.append(lambda: run(descriptor, plan))
        return self.queue.marker()

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty_like(tensor)
        if self.queue.is_busy:
            self.queue.work.append(lambda: there.copy_(tensor))
            return there
        return there.copy_(tensor)


class DryDevice(Device):
    """No GPU: the kernel under Triton's interpreter. Every time it tells is the host's, and means nothing."""

    is_dry = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._queue = _Queue()
        self.machine = self.machine_with()

    def about(self) -> dict[str, Any]:
        return {"gpu": None, "cuda": None, "driver": None}

    def machine_with(self, *, reads_rows: bool = True, zero_copy: bool = True) -> Machine:
        return _DryMachine.of(self._queue, reads_rows, zero_copy)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def view(self, pinned: torch.Tensor) -> torch.Tensor:
        return pinned

    def side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        self._queue.drain()

    def busy(self, milliseconds: float) -> Query:
        self._queue.is_busy = True
        return self._queue.marker()

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        self._queue.may_wait = False
        try:
            yield
        finally:
            self._queue.may_wait = True

    def capture(self, record: Work, meanwhile: Work) -> Work:
        self._queue.is_capturing = True
        try:
            meanwhile()
        finally:
            self._queue.is_capturing = False
        return record

    def is_alive(self) -> bool:
        return True

    def time_us(self, works: Sequence[Work], rounds: int) -> float:
        start = perf_counter()
        for work in works:
            work()
        return (perf_counter() - start) * 1e6

    def profile(self, work: Work) -> Profile:
        work()
        return Profile([1.0], (), [1.0], "nobody: a dry run")


class DoNothingDevice(DryDevice):
    """No GPU: real launches into the do-nothing driver, which must be in place. Nothing is written."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        super().__init__()

    def machine_with(self, *, reads_rows: bool = True, zero_copy: bool = True) -> Machine:
        kind = DoNothingMachine if reads_rows else _DoNothingPageable
        return kind.of(self._counts, zero_copy=zero_copy)

    def profile(self, work: Work) -> Profile:
        launches, uploads = self._counts.launches, self._counts.uploads
        work()
        launches, uploads = self._counts.launches - launches, self._counts.uploads - uploads
        return Profile([1.0] * launches, (), [1.0] * uploads, "the do-nothing driver")


class _DoNothingPageable(DoNothingMachine):
    def can_read(self, tensor: torch.Tensor) -> bool:
        return False
