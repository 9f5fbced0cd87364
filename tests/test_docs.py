"""Every block of code and every command of the documentation is run, or named here with the place that runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftgather as dg
from draftgather import algorithms

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "bench/RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)

# Pages whose Python needs what is not installed here, and who runs it.
PYTHON_ELSEWHERE = {"sglang.md": "tests/contract/test_docs_contract.py"}

# The commands that are run here, and what makes each of them smaller (the last of two equal options counts).
SMALLER = {
    "draftgather demo": "--limit 20 --hidden-size 64",
    "draftgather doctor": "",
    "draftgather soak": "--minutes 0.001 --hidden-size 64",
    "draftgather bench --compare": "",
    "draftgather bench --plot": "",
    "draftgather bench": "--size 1 --pool 64 --hidden-size 64 --rounds 1",
    "python -m draftgather.bench.host_side": "--sizes 1 --rounds 1",
    "python -m draftgather.bench.import_time": "--rounds 1",
}
# Those that are not, by how they start, and who runs them instead.
ELSEWHERE = {
    "make demo": (".ci/run", "make --no-print-directory demo"),
    "make test": (".ci/run", "make --no-print-directory test"),
    "make example": (".ci/run", "make --no-print-directory example"),
    "pytest bench/hot_paths.py": (".ci/run", "pytest bench/hot_paths.py"),
    "pytest examples": (".ci/run", "pytest examples"),
    "draftgather bench --gpu-check": (".ci/run", "bench.gpu_check --dry"),
    "draftgather bench --sglang": (".ci/sglang", "draftgather bench \\\n  --sglang"),
    "pip install": (".ci/run", 'pip install --quiet "$wheel[plot,metrics]"'),
}


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall(page.read_text()) if language in languages]


def commands(page: Path) -> list[str]:
    """Without their comments."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.join(argv) for argv in (shlex.split(line, comments=True) for line in lines) if argv]


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a page registers, and the mailbox that it names, are the process's."""
    monkeypatch.setattr(algorithms, "_registered", {})
    yield
    dg.use_mailbox(None)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against examples that no longer work: all of a page, one after the other, as a reader would run them."""
    elsewhere = PYTHON_ELSEWHERE.get(page.name)
    if elsewhere is not None:
        assert (ROOT / elsewhere).is_file()
        return
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
        # What an example says that it prints, up to the dots.
        shown = re.findall(r"print\(.*\)  # (.*?)(?: \.\.\.)?$", block, re.MULTILINE)
        printed = capsys.readouterr().out
        assert [text for text in shown if text not in printed] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With what commands of the documentation read."""
    trace = [{"timestamp": 25 * i, "input_length": 100, "output_length": 4, "hash_ids": []} for i in range(30)]
    (tmp_path / "mooncake_conversation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_run(page: Path, folder: Path) -> None:
    """Guards against commands that are gone, or whose options are: each is run, made smaller, in one folder a page."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for command in commands(page):
        if any(command.startswith(start) for start in ELSEWHERE):
            continue
        if command.startswith("pytest "):
            # Run with all other tests; the options of `pytest` need no trying.
            assert [name for name in command.split()[1:] if name[0] != "-" and not (ROOT / name).exists()] == []
            continue
        smaller = [options for start, options in SMALLER.items() if command.startswith(start)]
        assert smaller, f"{page.name}: nobody runs {command!r}"
        argv = [*shlex.split(command), *shlex.split(smaller[0])]
        argv[:1] = [sys.executable, "-m", "draftgather"] if argv[0] == "draftgather" else [sys.executable]
        run = subprocess.run(
            argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert run.returncode == 0, f"{page.name}: {command}\n{run.stdout[-2000:]}{run.stderr[-2000:]}"


@pytest.mark.parametrize("start", ELSEWHERE)
def test_who_runs_the_others(start: str) -> None:
    """Guards the list of exceptions: each is in the documentation, and the file that runs it does."""
    assert any(command.startswith(start) for page in PAGES for command in commands(page)), start
    file, fragment = ELSEWHERE[start]
    assert fragment in (ROOT / file).read_text(), (file, fragment)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Guards against links to files that moved."""
    for link in re.findall(r"\]\(((?!http)[^)#]+)[^)]*\)", re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text()))):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    """Guards against code that no test looks at: of another language, or indented in place of a fence."""
    text = page.read_text()
    assert {language for language, _ in FENCE.findall(text)} <= {"python", "sh", "text"}
    assert re.findall(r"^    (?! *[-*|]).*", FENCE.sub("", text), re.MULTILINE) == []


def test_every_file_is_in_the_architecture() -> None:
    """Guards the newcomer's map: it names every file of the package, and the index every page."""
    map_ = (ROOT / "docs/architecture.md").read_text()
    files = [*(ROOT / "assembler").glob("*.py"), *(ROOT / "kernels").glob("*.py")]
    assert [f.name for f in files if f"/{f.name})" not in map_ and f.name != "__init__.py"] == []
    index = (ROOT / "docs/README.md").read_text()
    assert [p.name for p in PAGES[2:] if f"({p.name})" not in index and p.name != "README.md"] == []
