"""What a batch asks of the device: counted on a driver that does nothing, with Triton's compiler at work."""

from __future__ import annotations

from typing import Any

import pytest
from test_codegen import run_compiled


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = run_compiled("launch_path.py", tmp_path_factory.mktemp("triton"))
    return result


@pytest.mark.parametrize(("machine", "most_uploads"), [("in place", 0), ("uploaded", 1), ("staged", 1)])
def test_one_launch_a_call(report: dict[str, Any], machine: str, most_uploads: int) -> None:
    """Guards the count, whatever the size, fields, relay, padding, dtypes and strides; nothing is copied in place."""
    counted = report[machine]
    assert counted["wrong"] == []
    assert counted["most_uploads"] == most_uploads
    assert (counted["waits"], counted["launches_of_nothing"], counted["events"]) == (0, 0, 1)


@pytest.mark.parametrize("machine", ["in place", "uploaded", "staged"])
def test_nothing_is_compiled_after_warmup(report: dict[str, Any], machine: str) -> None:
    assert report[machine]["compiled_after_warmup"] == 0
    assert report[machine]["log"] == []
    assert report[machine]["runs_directly"]


def test_a_late_compile_is_told(report: dict[str, Any]) -> None:
    """Guards the test above: rows of another dtype than their field's do compile, once, and it is logged."""
    assert report["late compile"]["lines"] == [0, 1, 0]
    assert "compiled after warm-up" in report["late compile"]["last"]
    assert "torch.int32" in report["late compile"]["last"]


def test_direct_launches_pass_what_plain_ones_pass(report: dict[str, Any]) -> None:
    """Guards the direct form, which checks nothing: its arguments are those of Triton's own call."""
    compared = report["plain"]
    assert compared["different"] == []
    assert compared["compared"] == 30
    assert compared["planned"] == 24  # the others are the future map's own


def test_profiler_hooks_see_direct_launches(report: dict[str, Any]) -> None:
    """In a chain of hooks, or as the only one; without one nothing is called."""
    assert report["hooks"]["seen"] == ["_gather_rows_kernel"] * 2


def test_without_the_direct_form_launches_are_plain(report: dict[str, Any]) -> None:
    """Guards a Triton whose compiled kernels look otherwise: it works, and is told once."""
    assert report["give up"]["launches"] == 3
    (line,) = report["give up"]["lines"]
    assert "lacks what it is run by" in line


def test_a_plan_that_is_wrong_is_not_used(report: dict[str, Any]) -> None:
    """Guards the first use of every plan."""
    assert report["wrong plan"]["launches"] == 1
    (line,) = report["wrong plan"]["lines"]
    assert "other arguments than it was made from" in line
