"""Every test of rows runs on both implementations: the twin, and the kernel under Triton's interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# For `import helpers`: with import mode importlib the folder of the tests is on no path.
sys.path.insert(0, str(Path(__file__).parent))

# Read when the kernel is decorated: before the first import of draftgather.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

import draftgather as dg
from draftgather.completion import IN_FLIGHT
from draftgather.machine import Machine, machine_for

# Here and in CI the same examples each time; by hand others, and more: --hypothesis-profile=long.
HYPOTHESIS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
settings.register_profile("draftgather", derandomize=True, **HYPOTHESIS)
settings.register_profile("long", max_examples=2500, **HYPOTHESIS)
settings.load_profile("draftgather")

CPU = torch.device("cpu")


class Pageable(Machine):
    """An accelerator beside the host's memory: it can read none of it in place."""

    def can_read(self, tensor: torch.Tensor) -> bool:
        return False


MACHINES = {
    "twin": machine_for(CPU),
    "kernel": Machine(CPU, has_kernel=True, pins=False, zero_copy=True),
    "kernel-upload": Machine(CPU, has_kernel=True, pins=False, zero_copy=False),
    "kernel-staged": Pageable(CPU, has_kernel=True, pins=False, zero_copy=True),
    "kernel-staged-upload": Pageable(CPU, has_kernel=True, pins=False, zero_copy=False),
}


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """What the device can do: the twin, and the kernel with each way of reading rows."""
    return MACHINES[request.param]


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> Iterator[None]:
    """What a test's fake launches keep alive for ever is not the next one's."""
    yield
    IN_FLIGHT._held.clear()


@pytest.fixture
def fields() -> tuple[dg.Field, ...]:
    return dg.eagle_fields(topk=4, hidden_size=24, hidden_dtype=torch.bfloat16)
