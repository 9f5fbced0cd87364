"""The command line: exit codes, one line an error, what goes to which stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import draftgather as dg
from draftgather.bench.cli import app
from draftgather.draft_assembler import DraftAssembler
from draftgather.draft_batch import DraftBatch

SMALL = ("demo", "--hidden-size", "16", "--limit", "40")
FIGURES = {
    "requests", "batches", "mismatches", "route", "launches", "ours_us_p50", "ours_us_p99", "torch_stack_us_p50",
    "torch_stack_us_p99", "speedup_p50", "put_us_p50", "clone_us_p50", "batch_size_p50", "batch_size_p99",
    "batch_size_max", "options", "environment",
}  # fmt: skip


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def table_value(output: str, name: str) -> str:
    line = next(line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return line.split("│")[2].strip()


def test_demo_prints_a_table() -> None:
    result = call(*SMALL)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert table_value(result.stdout, "requests") == "40"
    assert table_value(result.stdout, "mismatches") == "0"
    assert table_value(result.stdout, "route") == "slots"
    assert table_value(result.stdout, "launches") == table_value(result.stdout, "batches")
    assert "proxies" in result.stdout


def test_a_mismatch_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a demo that is green whatever it finds."""

    assemble = DraftAssembler.assemble_slots

    def spoiled(self: DraftAssembler, *args: Any, **kwargs: Any) -> DraftBatch:
        batch = assemble(self, *args, **kwargs)
        if "hidden_states" in batch.tensors:
            batch.tensors["hidden_states"][0] = 1
        return batch

    monkeypatch.setattr(DraftAssembler, "assemble_slots", spoiled)
    result = call(*SMALL, "--json", "-")
    assert result.exit_code == 1
    figures = json.loads(result.stdout)
    assert figures["mismatches"] == figures["batches"]


def test_json_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("a longer text than the figures will ever be" * 1000)
    result = call(*SMALL, "--topk", 8, "--num-steps", 3, "--seed", 9, "--dtype", "float32", "--json", path)
    assert result.exit_code == 0
    assert table_value(result.stdout, "mismatches") == "0"
    figures = json.loads(path.read_text())
    assert set(figures) == FIGURES
    assert {"hidden_size": 16, "topk": 8, "num_steps": 3, "seed": 9, "dtype": "torch.float32", "limit": 40}.items() <= (
        figures["options"].items()
    )
    assert {"python", "torch", "triton", "numpy", "cpu", "cores", "device", "threads"} <= set(figures["environment"])
    assert figures["environment"]["threads"] == 1
    assert str(tmp_path) not in path.read_text()


def test_json_to_stdout_is_nothing_but_json() -> None:
    result = call(*SMALL, "--json", "-")
    assert set(json.loads(result.stdout)) == FIGURES
    assert table_value(result.stderr, "requests") == "40"


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 3000 * (i // 10), "input_length": i, "output_length": 3} for i in range(50)]
    path.write_text("\n".join(map(json.dumps, lines)))
    figures = {
        flag: json.loads(call("demo", "--hidden-size", 16, "--trace", path, flag, "--json", "-").stdout)
        for flag in ("--jitter", "--no-jitter")
    }
    assert figures["--no-jitter"]["batches"] == 5
    assert figures["--jitter"]["batches"] > 20
    assert {f["requests"] for f in figures.values()} == {50}
    limited = json.loads(call("demo", "--hidden-size", 16, "--trace", path, "--limit", 12, "--json", "-").stdout)
    assert limited["requests"] == 12
    assert "trace.jsonl" not in json.dumps(limited)


def one_error_line(result: Result) -> str:
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_bad_traces(tmp_path: Path) -> None:
    """Guards against a traceback: one line, the file and the line number in it."""
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"timestamp": 0, "input_length": 1, "output_length": 1}\n\xff')
    assert one_error_line(call("demo", "--trace", bad)).startswith(f"draftgather: error: {bad}:2: ")
    for path in (tmp_path, tmp_path / "missing"):
        assert f"error: {path}: " in one_error_line(call("demo", "--trace", path))
    assert "two lines" in one_error_line(call("demo", "--trace", tmp_path / "two\nlines"))


def test_an_unwritable_file_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a long run whose figures are lost, and against overwriting the trace."""
    monkeypatch.setattr("draftgather.bench.cli.replay", lambda *_: pytest.fail("the run was started"))
    trace = tmp_path / "t"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n')
    for path in (tmp_path, tmp_path / "missing" / "f.json"):
        assert "cannot be written" in one_error_line(call(*SMALL, "--json", path))
    assert "is the trace itself" in one_error_line(call(*SMALL, "--trace", trace, "--json", trace))
    assert trace.stat().st_size > 0


def test_a_failed_run_leaves_no_file(tmp_path: Path) -> None:
    assert call(*SMALL, "--trace", tmp_path / "missing", "--json", tmp_path / "f.json").exit_code == 2
    assert list(tmp_path.iterdir()) == []
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert call(*SMALL, "--trace", tmp_path / "missing", "--json", link).exit_code == 2
    assert list(tmp_path.iterdir()) == [link]


@pytest.mark.parametrize(
    "args",
    [
        ("--tick-ms", "nan"), ("--tick-ms", "0"), ("--speed-up", "inf"), ("--speed-up", "-1"), ("--speed-up", "x"),
        ("--limit", "0"), ("--seed", "-1"), ("--seed", "9" * 30), ("--hidden-size", "0"), ("--topk", "0"),
        ("--num-steps", "0"), ("--dtype", "int8"), ("--device", "tpu"), ("--threads", "0"), ("--threads", "9999999"),
        ("--bogus",), ("--trace",),
    ],
)  # fmt: skip
def test_bad_options_are_exit_code_2(args: tuple[str, ...]) -> None:
    result = call("demo", *args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = call("demo", "--device", "cuda")
    assert result.exit_code == 2
    assert "no CUDA device" in result.stderr


def test_doctor() -> None:
    result = call("doctor")
    assert result.exit_code == 0
    assert table_value(result.stdout, "mailbox slots") == "slots"
    assert table_value(result.stdout, "Python lists") == "staged"
    diagnosis = json.loads(call("doctor", "--json").stdout)
    assert diagnosis["environment"]["draftgather"] == dg.__version__
    assert diagnosis["devices"][0]["routes"][0] == {
        "rows": "mailbox slots",
        "route": "slots",
        "words": "the CPU reads records where they are",
    }


def test_version() -> None:
    assert call("--version").stdout == f"{dg.__version__}\n"


def test_in_a_process_of_its_own() -> None:
    """`python -m draftgather` works, no bar goes into a pipe, and the library alone imports no typer and no rich."""
    done = subprocess.run([sys.executable, "-m", "draftgather", *SMALL], capture_output=True, text=True, check=True)
    assert table_value(done.stdout, "mismatches") == "0"
    assert done.stderr == ""
    code = "import sys, draftgather; sys.exit(any(name in sys.modules for name in ('typer', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
