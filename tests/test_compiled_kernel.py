"""The kernel as a GPU gets it: compiled without a GPU, and launched down to a driver that does nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("compiled_kernel.py")
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_hidden_rows_move_in_sixteen_byte_accesses(report: dict[str, Any]) -> None:
    """Guards the alignment hints: without them a 16-bit row moves two bytes at a time."""
    for name, found in report["cuda"].items():
        assert (found["wide_loads"], found["narrow_loads"]) == (1, 0), name


def test_each_source_element_is_loaded_once(report: dict[str, Any]) -> None:
    """Guards against a relay that reads its rows a second time: one load, and a store for each destination."""
    for name, found in report["cuda"].items():
        assert (found["wide_loads"], found["wide_stores"]) == (1, 2 if "relay" in name else 1), name


def test_nothing_spills(report: dict[str, Any]) -> None:
    assert not any(found["uses_local_memory"] for found in report["cuda"].values())


def test_rows_at_odd_addresses_are_read_narrowly(report: dict[str, Any]) -> None:
    """Guards O37: a wide load at an address that is not a multiple of 16 faults."""
    assert report["odd addresses"]["wide_loads"] == 0
    assert report["odd addresses"]["narrow_loads"] > 0


def test_compiles_for_amd(report: dict[str, Any]) -> None:
    assert "amdgcn" in report["hip"]


def test_one_launch_a_call_and_none_for_an_empty_batch(report: dict[str, Any]) -> None:
    driven = report["driven"]
    assert driven["calls"] == driven["launches"] == 77


def test_nothing_compiles_after_warmup(report: dict[str, Any]) -> None:
    """Guards O38 and O40: batch sizes 1, 2, 15, 16, 17 ... 512 are one variant a route; resolve and stash too."""
    assert report["driven"]["variants_after_warmup"] == report["driven"]["variants_at_the_end"] == 8
