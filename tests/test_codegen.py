"""The kernel as a GPU gets it: every variant that serving launches, compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Fields of the list whose rows are at least one tile wide: each is moved by one wide load in the kernel's text.
NUM_WIDE_FIELDS = {"eagle": 1, "top-k 1": 1, "3 steps, seed": 2}
NUM_VARIANTS = 12  # few slots, slots, rows, odd rows; into the batch, the relay, both
MOST_REGISTERS = 32

Report = dict[str, dict[str, int]]


def run_compiled(script: str, cache: Path, *arguments: str) -> Any:
    """What a script prints as JSON, run with Triton's compiler in place of its interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *arguments],
        env=kept | {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "sm_100", "gfx942"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Report]:
    cache = tmp_path_factory.mktemp("triton")
    variants: Report = run_compiled("compiled_variants.py", cache, request.param, *NUM_WIDE_FIELDS)
    assert len(variants) == NUM_VARIANTS * len(NUM_WIDE_FIELDS)
    return request.param, variants


def num_wide_fields(name: str) -> int:
    return NUM_WIDE_FIELDS[name.partition(":")[0]]


def test_wide_rows_move_in_16_byte_accesses(report: tuple[str, Report]) -> None:
    """Guards against rows that are moved two bytes at a time: by slot, few or many, and by address."""
    for name, found in report[1].items():
        if "odd rows" not in name:
            assert found["wide loads"] == num_wide_fields(name), name
            assert found["narrow loads"] == 0, name


def test_each_element_is_loaded_once(report: tuple[str, Report]) -> None:
    """Guards against a second read of the source where batch and relay are both written."""
    for name, found in report[1].items():
        num_copies = 2 if name.endswith("both") else 1
        assert found["wide stores"] == num_copies * num_wide_fields(name), name
    one, both = ([v for n, v in report[1].items() if n.endswith(end)] for end in ("batch", "both"))
    for once, twice in zip(one, both, strict=True):
        assert (once["wide loads"], once["narrow loads"]) == (twice["wide loads"], twice["narrow loads"])


def test_rows_at_odd_addresses_take_narrow_loads(report: tuple[str, Report]) -> None:
    """Guards against a variant that reads 16 bytes at an address that is not a multiple of 16."""
    odd = {name: found for name, found in report[1].items() if "odd rows" in name}
    assert odd
    for name, found in odd.items():
        assert found["wide loads"] == 0 < found["narrow loads"], name


def test_no_spills_and_few_registers(report: tuple[str, Report]) -> None:
    """Guards occupancy: local memory and stack are where registers spill to."""
    target, variants = report
    if target == "gfx942":
        pytest.skip("cuobjdump is NVIDIA's")
    for name, found in variants.items():
        assert (found["stack"], found["local"]) == (0, 0), name
        assert found["registers"] <= MOST_REGISTERS, name
