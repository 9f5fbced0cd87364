"""What this machine offers, and which route rows of each kind take on it: tried out, not guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftgather.bench.environment import environment
from draftgather.draft_assembler import DraftAssembler
from draftgather.draft_batch import DraftBatch
from draftgather.fields import eagle_fields
from draftgather.machine import Machine, machine_for
from draftgather.mailbox import DraftMailbox
from draftgather.memory import can_pin
from draftgather.sglang_plugin import describe_installed

_FIELDS = eagle_fields(topk=4, hidden_size=64)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RouteReport:
    """How rows of one kind come to the device."""

    rows: str  # which kind of rows
    route: str | None  # as `DraftBatch.route` said it; None where this kind cannot be had, or failed
    words: str


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device that batches can go to."""

    device: str
    has_kernel: bool | None  # the Triton kernel runs, else its PyTorch twin; None: the probe failed
    pins: bool | None
    zero_copy: bool | None
    words: str
    routes: tuple[RouteReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    environment: dict[str, str | int | None]
    devices: tuple[DeviceReport, ...]
    sglang: str  # the installed one, and whether the drop-in knows it


def diagnose() -> Diagnosis:
    """Probe every device. A device that fails is reported, not raised."""
    cuda = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return Diagnosis(environment(), tuple(_examine_device(device) for device in (_CPU, *cuda)), describe_installed())


def examine(machine: Machine) -> DeviceReport:
    """Assemble one row of each kind on `machine`, and report the route it took."""
    mailbox = DraftMailbox(_FIELDS, 1)
    rows: dict[str, Any] = {field.name: torch.zeros(field.width, dtype=field.dtype) for field in _FIELDS}
    mailbox.put(0, 0, **rows)
    assembler = DraftAssembler(_FIELDS, machine.device, 1, mailbox, machine=machine)

    def assemble(convert: Callable[[torch.Tensor], object]) -> DraftBatch:
        converted: dict[str, Any] = {name: [convert(row)] for name, row in rows.items()}
        return assembler.assemble_rows(**converted)

    return DeviceReport(
        device=str(machine.device),
        has_kernel=machine.has_kernel,
        pins=machine.pins,
        zero_copy=machine.zero_copy,
        words=_in_words(machine),
        routes=(
            _try("mailbox slots", lambda: assembler.assemble_slots([0])),
            _try("device tensors", lambda: assemble(lambda row: row.to(machine.device))),
            _try("pinned tensors", lambda: assemble(lambda row: row.pin_memory()))
            if can_pin()
            else RouteReport("pinned tensors", None, "not to be had: this machine gives no pinned memory"),
            _try("pageable tensors", lambda: assemble(lambda row: row)),
            _try("Python lists", lambda: assemble(lambda row: row.tolist())),
        ),
    )


def _examine_device(device: torch.device) -> DeviceReport:
    # Drivers and compilers fail in many ways, and each of them is what the reader came for.
    try:
        return examine(machine_for(device))
    except Exception as error:
        return DeviceReport(str(device), None, None, None, f"the probe failed: {_one_line(error)}")


def _in_words(machine: Machine) -> str:
    if not machine.has_kernel:
        return "The PyTorch twin runs here, not the Triton kernel; host memory need not be pinned for it."
    pinned = "Pinned memory can be had" if machine.pins else "No pinned memory can be had"
    reads = "reads it in place (the zero-copy probe passed)" if machine.zero_copy else "gets copies: no zero-copy"
    return f"The Triton kernel runs here. {pinned}, and the device {reads}."


def _try(rows: str, assemble: Callable[[], DraftBatch]) -> RouteReport:
    try:
        route = assemble().route
    except Exception as error:
        return RouteReport(rows, None, f"fails: {_one_line(error)}")
    return RouteReport(rows, str(route), route.reason)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
