"""Contract tests against a real sglang. Without one they are skipped; `.ci/sglang` makes the environments.

The plug-in is loaded once, through sglang's own `load_plugins()`; each test chooses the mode and the options.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

HAS_SGLANG = importlib.util.find_spec("sglang") is not None

sys.path.insert(0, str(Path(__file__).parent))
if HAS_SGLANG:
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(Path(__file__).parent / "stubs"))
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    if not HAS_SGLANG:
        return "sglang is not installed: its contract tests are left out"
    from importlib.metadata import version

    return f"contract tests against sglang {version('sglang')}"


@pytest.fixture(scope="session")
def loaded():
    """The drop-in of this process, put in place by sglang itself."""
    # The mailbox's hooks are in place; they pass through until a test gives it slots.
    os.environ.update(DRAFTGATHER_SGLANG="on", DRAFTGATHER_SGLANG_MAILBOX="1")
    from sglang.srt.plugins import load_plugins

    from draftgather import sglang_plugin

    load_plugins()
    drop_in = sglang_plugin.drop_in()
    assert drop_in is not None and drop_in.mode == "on"
    return drop_in


@pytest.fixture
def drop_in(loaded):
    """Mode on, nothing fused, nothing counted; as it was afterwards."""
    from draftgather.dropin import DropInOptions, DropInStats, Mode

    loaded.options = DropInOptions(Mode.ON, sample=1)
    loaded.mode = Mode.ON
    loaded.stats = DropInStats()
    loaded._hidden = loaded._relay = loaded._shadowed = loaded.arrivals = None
    loaded._said.clear()
    loaded.fuse_from_on_cpu = 1
    torch.manual_seed(0)
    yield loaded
    loaded.mode = Mode.OFF


@pytest.fixture
def choose(drop_in):
    """Set options of the drop-in: choose(fused=True)."""

    def choose(**options):
        drop_in.options = dataclasses.replace(drop_in.options, **options)

    return choose
