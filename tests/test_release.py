"""What is installed, and what importing it brings along. `.ci/run` looks into the wheel and the sdist as well."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import metadata, version
from pathlib import Path

import draftgather as dg
from draftgather.bench import import_time

ROOT = Path(__file__).parent.parent
OPTIONAL = {"typer", "rich", "sglang", "matplotlib", "prometheus_client", "pytest", "hypothesis"}


def test_importing_is_light() -> None:
    """Guards an engine's start: the package brings nothing that only its commands, extras or tests need."""
    code = "import json, sys, draftgather; print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    modules = set(json.loads(done.stdout))
    assert {"draftgather", "torch", "triton"} <= modules
    assert modules & OPTIONAL == set()


def test_the_version_is_in_one_place() -> None:
    """Guards a release whose parts name different versions."""
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", dg.__version__)
    assert version("draftgather") == dg.__version__
    assert not re.search(r"^version = \"", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_extras() -> None:
    """Guards the extras that messages and documents tell of."""
    extras = set(metadata("draftgather").get_all("Provides-Extra") or ())
    assert extras == {"test", "plot", "metrics", "lint"}


def test_import_time(tmp_path: Path) -> None:
    """Guards the figures: the modules added are draftgather's own alone, and its files are counted."""
    report = tmp_path / "report.json"
    import_time.main(["--rounds", "1", "--json", str(report)])
    figures = import_time.ImportFigures(**json.loads(report.read_text()))
    assert figures.ratio == figures.our_seconds / figures.base_seconds > 0
    assert {"draftgather", "draftgather.draft_assembler", "draftgather.kernels.gather_rows"} <= {*figures.own_modules}
    assert all(re.match(r"draftgather\b", name) for name in figures.own_modules)
    assert figures.other_modules == []
    assert figures.installed_files > 50 and figures.installed_bytes > 100_000
