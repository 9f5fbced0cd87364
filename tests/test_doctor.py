"""What the doctor says is what a batch does."""

from __future__ import annotations

import pytest
import torch

from draftgather.bench import doctor
from draftgather.bench.doctor import DeviceReport, diagnose, examine
from draftgather.draft_assembler import DraftAssembler
from draftgather.machine import Machine

CPU = torch.device("cpu")


def routes(report: DeviceReport) -> dict[str, str | None]:
    return {route.rows: route.route for route in report.routes}


def test_this_machine() -> None:
    diagnosis = diagnose()
    assert diagnosis.devices[0].device == "cpu"
    assert len(diagnosis.devices) == 1 + torch.cuda.device_count()
    assert diagnosis.environment["torch"] == torch.__version__
    found = routes(diagnosis.devices[0])
    assert found.pop("pinned tensors") in ("pointers", None)
    assert found == {
        "mailbox slots": "slots",
        "device tensors": "pointers",
        "pageable tensors": "pointers",
        "Python lists": "staged",
    }


def test_every_kind_of_machine(machine: Machine) -> None:
    """Guards against a doctor that says one route while the assembler takes another."""
    report = examine(machine)
    in_place = not machine.has_kernel or machine.can_read(torch.zeros(1))
    assert routes(report)["mailbox slots"] == ("slots" if in_place else "staged")
    assert routes(report)["pageable tensors"] == ("pointers" if in_place else "staged")
    assert (report.has_kernel, report.zero_copy) == (machine.has_kernel, machine.zero_copy)
    assert ("twin" in report.words) == (not machine.has_kernel)


def test_a_route_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DraftAssembler, slots: object) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(DraftAssembler, "assemble_slots", broken)
    report = diagnose().devices[0]
    assert report.routes[0].route is None
    assert report.routes[0].words == "fails: RuntimeError: no compiler here"
    assert routes(report)["pageable tensors"] == "pointers"


def test_a_device_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> Machine:
        raise OSError("driver gone")

    monkeypatch.setattr(doctor, "machine_for", broken)
    report = diagnose().devices[0]
    assert report.words == "the probe failed: OSError: driver gone"
    assert report.routes == ()
