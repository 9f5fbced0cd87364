"""The benchmark: that every path is right before it is timed, that it says so where not, and what it writes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from draftgather.bench import timing
from draftgather.bench.cli import app
from draftgather.bench.matrix import FULL, SIZES, Matrix, num_cases
from draftgather.bench.paths import FLOOR, PATHS, PLAIN, BytesDiffer, RowPath, Workload
from draftgather.bench.report import read_report
from draftgather.bench.timing import busy_core, interleaved
from draftgather.draft_assembler import DraftAssembler

CPU = torch.device("cpu")
TINY = ("bench", "--hidden-size", "16", "--pool", "16", "--rounds", "1", "--turn", "2", "--size", "1", "--size", "5")
ON_CPU = ["torch.stack", "pinned stack", "arena", "index_select", "slots", "rows", "memcpy"]
CASE = {
    "step", "device", "dtype", "hidden_size", "topk", "num_steps", "overlap", "temperature", "load", "num_rows", "path",
}  # fmt: skip


def call(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.jsonl"
    assert call(*TINY, "--json", path).exit_code == 0
    return path


def one_error_line(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line


# -- the paths


@pytest.mark.parametrize(
    ("hidden_size", "topk", "num_steps", "dtype"),
    [(16, 4, 1, torch.bfloat16), (7, 1, 1, torch.float32), (1, 8, 3, torch.float16)],
)
def test_every_path_writes_the_same_bytes(hidden_size: int, topk: int, num_steps: int, dtype: torch.dtype) -> None:
    """Guards against a baseline that is fast because it is wrong; those for a GPU read views of host rows here."""
    work = Workload(hidden_size, topk, num_steps, dtype, pool=12, max_batch_size=12, device=CPU)
    for num_rows in (1, 5, 12):
        batches = work.batches(num_rows, is_hot=False)
        assert sorted(slot for batch in batches for slot in batch.slots) == sorted(
            work.order[: len(batches) * num_rows]
        )
        for batch in batches:
            for overlap in (False, True):
                work.check_equal(PATHS, batch, overlap)
    (batch,) = work.batches(12, is_hot=True)
    plain: Any = PATHS[0].call(work, batch, True)
    for i, slot in enumerate(batch.slots):
        for name, row in work.narrow(work.rows[slot]).items():
            assert torch.equal(getattr(plain, name)[i], row)
            assert torch.equal(work.future_map.buffers[name][batch.indices[i]], row)


def spoiled(path: RowPath, what: str) -> RowPath:
    """The same path with one wrong byte."""

    def call(work: Workload, batch: Any, overlap: bool) -> object:
        result: Any = path.call(work, batch, overlap)
        if what == "relay":
            for buffer in work._relay_buffers(path.relay)[:1]:
                buffer.view(torch.uint8)[batch.start if path.relay == "packed" else batch.indices[0], 0] ^= 1
            return result
        if what == "seq_lens":
            work._relay_buffers(path.relay)[-2][batch.indices[0]] += 1
            return result
        tensors = getattr(result, "tensors", {"": result})
        rows = result.hidden_states if hasattr(result, "hidden_states") else next(reversed(tensors.values()))
        rows.view(torch.uint8)[-1, -1] ^= 1
        return result

    return replace(path, call=call)


@pytest.mark.parametrize("path", PATHS[1:], ids=lambda path: path.name)
@pytest.mark.parametrize("what", ["batch", "relay", "seq_lens"])
def test_a_wrong_byte_of_any_path_is_seen(path: RowPath, what: str) -> None:
    """Guards against a check that looks at another path's relay, or at none."""
    if what == "seq_lens" and path.name == FLOOR:
        pytest.skip("the floor relays rows alone")
    work = Workload(16, 4, 1, torch.bfloat16, pool=8, max_batch_size=8, device=CPU)
    batch = work.batches(4, is_hot=False)[1]
    for overlap in (True, False):
        with pytest.raises(BytesDiffer, match=rf"{path.name}: .*{what}.* differs from {PLAIN}, at 4 rows"):
            work.check_equal([spoiled(path, what)], batch, overlap)
    work.check_equal(PATHS, batch, overlap=True)


def test_a_path_that_writes_nothing_is_seen() -> None:
    """Guards against bytes that the path before has left."""
    work = Workload(16, 4, 1, torch.bfloat16, pool=8, max_batch_size=8, device=CPU)
    (batch,) = work.batches(8, is_hot=True)
    idle = replace(PATHS[1], call=lambda work, batch, overlap: PATHS[1].call(work, batch, False))
    with pytest.raises(BytesDiffer, match="relay"):
        work.check_equal([idle], batch, overlap=True)


def test_a_wrong_shape_is_seen() -> None:
    work = Workload(16, 4, 1, torch.bfloat16, pool=8, max_batch_size=8, device=CPU)
    (batch,) = work.batches(8, is_hot=True)

    def wide(work: Workload, batch: Any, overlap: bool) -> object:
        result: Any = PATHS[0].call(work, batch, overlap)
        return replace(result, hidden_states=result.hidden_states.view(torch.int16))

    with pytest.raises(BytesDiffer, match="hidden_states has another shape, dtype or device"):
        work.check_equal([replace(PATHS[1], call=wide)], batch, overlap=True)


# -- the command


def test_the_matrix_end_to_end(tmp_path: Path) -> None:
    """Guards against a case that is left out, twice there, or told under another's name."""
    path = tmp_path / "figures.jsonl"
    axes = ("--topk", 1, "--topk", 8, "--num-steps", 1, "--num-steps", 3, "--dtype", "float32")
    result = call(*TINY, *axes, "--json", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "in place of the upload" in result.stdout and "proxies" in result.stdout
    head, *figures = lines_of(path)
    assert head["format"] == "draftgather bench"
    assert {"python", "torch", "numpy", "cpu", "cores", "threads", "gpu"} <= set(head["environment"])
    assert head["environment"]["threads"] == 1
    assert head["options"]["sizes"] == [1, 5] and head["options"]["rounds"] == 1
    assert str(tmp_path) not in path.read_text()
    keys = [tuple(figure[key] for key in sorted(CASE)) for figure in figures]
    assert len(keys) == len(set(keys))
    batches = [figure for figure in figures if figure["step"] == "batch"]
    assert len(batches) == 2 * 2 * 2 * 2 * 2 * len(ON_CPU)
    assert list(dict.fromkeys(figure["path"] for figure in batches)) == ON_CPU
    arrivals = [figure["path"] for figure in figures if figure["step"] == "arrival"]
    assert arrivals == ["three clones", "put"] * 4
    for figure in figures:
        assert set(figure) == CASE | {"enqueue_us", "device_us", "wall_us"}
        assert figure["device_us"] is None and figure["wall_us"] is None
        assert set(figure["enqueue_us"]) == {"p50", "p90", "p99", "calls"}
        assert figure["enqueue_us"]["calls"] == (1 if figure["step"] == "batch" else 10)
        assert 0 < figure["enqueue_us"]["p50"] <= figure["enqueue_us"]["p90"] <= figure["enqueue_us"]["p99"]


def test_axes_are_selected(tmp_path: Path) -> None:
    result = call(*TINY, "--overlap", "off", "--temperature", "hot", "--path", "rows", "--size", 5, "--json", "-")
    assert result.exit_code == 0
    _, *figures = map(json.loads, result.stdout.splitlines())
    batches = [figure for figure in figures if figure["step"] == "batch"]
    assert [(f["path"], f["num_rows"]) for f in batches] == [(p, n) for n in (1, 5) for p in (PLAIN, "rows", FLOOR)]
    assert {(f["overlap"], f["temperature"]) for f in batches} == {(False, "hot")}
    assert "torch.stack" in result.stderr


def test_the_full_matrix() -> None:
    """Guards against an axis that gets lost: the figures of a default run are a subset of a full one's."""
    assert list(SIZES) == [2**i for i in range(10)]
    assert num_cases(Matrix()) == 10 * 2 * 2
    assert num_cases(FULL) == 10 * 2 * 3 * 2 * 2 * 2 * 2
    for name in ("sizes", "hidden_sizes", "topks", "num_steps", "overlaps", "temperatures", "loads", "paths"):
        assert set(getattr(Matrix(), name)) <= set(getattr(FULL, name))


def test_a_wrong_byte_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against figures of a path that is wrong: none is printed, no file is written."""
    assemble = DraftAssembler.assemble_rows

    def wrong(self: DraftAssembler, *args: Any, **kwargs: Any) -> Any:
        batch = assemble(self, *args, **kwargs)
        if "topk_index" in batch.tensors:
            batch.tensors["topk_index"][0, 0] += 1
        return batch

    monkeypatch.setattr(DraftAssembler, "assemble_rows", wrong)
    result = call(*TINY, "--json", tmp_path / "f")
    assert result.exit_code == 1
    assert result.stderr == "draftgather: rows: batch differs from torch.stack, at 1 rows: no figures\n"
    assert "p50" not in result.stdout and list(tmp_path.iterdir()) == []


def test_a_byte_that_goes_wrong_later_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a check before the timing alone."""
    calls = 0

    def wrong_later(work: Workload, batch: Any, overlap: bool) -> Any:
        nonlocal calls
        calls += 1
        result: Any = PATHS[2].call(work, batch, overlap)
        result.topk_p[0, 0] += calls > 3
        return result

    monkeypatch.setattr("draftgather.bench.matrix.PATHS", (*PATHS[:2], replace(PATHS[2], call=wrong_later), PATHS[-1]))
    result = call(*TINY)
    assert result.exit_code == 1
    assert "arena: batch differs" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("--size", "0"), ("--topk", "0"), ("--num-steps", "0"), ("--overlap", "maybe"), ("--temperature", "cold"),
        ("--load", "heavy"), ("--path", "magic"), ("--rounds", "0"), ("--turn", "0"), ("--pool", "0"),
        ("--compare", "a"), ("--plot", "a"), ("--threads", "0"), ("--dtype", "int8"),
    ],
)  # fmt: skip
def test_bad_options(args: tuple[str, ...]) -> None:
    result = call("bench", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr and "Traceback" not in result.stderr


def test_ways_that_exclude_each_other(tmp_path: Path) -> None:
    assert "exclude" in one_error_line(call("bench", "--compare", "a", "b", "--plot", "a", "b"))
    assert "--json goes with none" in one_error_line(call("bench", "--compare", "a", "b", "--json", tmp_path / "f"))
    assert "takes one" in one_error_line(call("bench", "--sglang", tmp_path, "--topk", 1, "--topk", 2))
    assert "no package sglang" in one_error_line(call("bench", "--sglang", tmp_path))
    assert "cannot be written" in one_error_line(call(*TINY, "--json", tmp_path / "none" / "f"))


# -- a slow host


def test_the_busy_process_is_gone_afterwards() -> None:
    """Guards against a process that spins for ever, and a benchmark that stays on one core."""
    before = os.sched_getaffinity(0)
    for fails in (False, True):
        try:
            with busy_core() as pid:
                assert pid is not None
                os.kill(pid, 0)
                assert os.sched_getaffinity(pid) == os.sched_getaffinity(0) == {min(before)}
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert os.sched_getaffinity(0) == before
    with busy_core(is_wanted=False) as pid:
        assert pid is None


def test_a_busy_process_that_ended_before_is_told() -> None:
    """Guards against figures of a slow host that was not slow."""

    def outlive_it() -> None:
        with busy_core(most_seconds=0) as pid:
            assert pid is not None
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    with pytest.raises(RuntimeError, match="ended before"):
        outlive_it()


def test_the_busy_load_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    popen = timing.subprocess.Popen

    def counted(*args: Any, **kwargs: Any) -> Any:
        process = popen(*args, **kwargs)
        started.append(process.pid)
        return process

    monkeypatch.setattr(timing.subprocess, "Popen", counted)
    args = ("--load", "busy", "--overlap", "on", "--temperature", "hot", "--path", "slots", "--json", "-")
    result = call(*TINY, *args)
    assert result.exit_code == 0
    _, *figures = map(json.loads, result.stdout.splitlines())
    assert {figure["load"] for figure in figures} == {"busy"}
    assert len(started) == 2 + 1  # each batch size, and the arriving row
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_paths_take_turns() -> None:
    """Guards against one path that is timed after the other: whatever the machine does meanwhile would be a ratio."""
    order: list[str] = []
    times = interleaved([lambda: order.append("a"), lambda: order.append("b")], rounds=2, calls_a_turn=3)
    assert "".join(order) == "aaabbbbbbaaa"
    assert [t.enqueue_us.calls for t in times] == [4, 4]
    order.clear()
    interleaved([lambda: order.append("a"), lambda: order.append("b")], rounds=3, calls_a_turn=1)
    assert "".join(order) == "abbaab"


# -- files


def test_compare(report: Path, tmp_path: Path) -> None:
    """Guards against a ratio upside down, and against cases that vanish."""
    head, *figures = lines_of(report)
    head["environment"]["torch"] = "9.9"
    for figure in figures:
        figure["enqueue_us"]["p50"] *= 2
    figures[0]["enqueue_us"]["p50"] *= 2
    figures[1]["num_rows"] = 777
    new = tmp_path / "new.jsonl"
    new.write_text("\n".join(map(json.dumps, [head, *figures])))
    result = call("bench", "--compare", report, new)
    assert (result.exit_code, result.stderr) == (0, "")
    ratios = re.findall(r"│\s+([0-9.]+)x │", result.stdout)
    assert ratios == ["0.25"] + ["0.50"] * (len(figures) - 2)
    assert f"environment, torch: {torch.__version__} -> 9.9" in result.stdout
    only = [line for line in result.stdout.splitlines() if line.startswith("only in")]
    assert len(only) == 2
    assert only[0].startswith("only in old: batch pinned stack, N=1,")
    assert only[1].startswith("only in new: batch pinned stack, N=777,")


def test_a_file_is_read_as_it_was_written(report: Path) -> None:
    _, *lines = lines_of(report)
    figures = read_report(report).figures
    assert len(figures) == len(lines)
    assert [f.times.enqueue_us.p99 for f in figures] == [line["enqueue_us"]["p99"] for line in lines]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "no JSON", '{"environment": {}}', '{"format": "draftgather bench", "version": 9}',
        '{"format": "draftgather bench", "version": 1}', "HEAD\n{}", "HEAD\nnull", "HEAD\n[1]", "HEAD\nLINE\nno JSON",
        "HEAD\nLINE\nNEGATIVE",
    ],
)  # fmt: skip
def test_files_of_others_are_refused(report: Path, tmp_path: Path, text: str) -> None:
    """Guards against a traceback, and against figures out of anything."""
    head, line = report.read_text().splitlines()[:2]
    negative = re.sub(r'"p50": [0-9.]+', '"p50": -1', line)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text.replace("HEAD", head).replace("LINE", line).replace("NEGATIVE", negative))
    for result in (call("bench", "--compare", report, bad), call("bench", "--plot", bad, tmp_path / "pictures")):
        assert "is no report of `draftgather bench --json`" in one_error_line(result)
    assert not (tmp_path / "pictures").exists()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"\xff\xfe\x00")
    assert "is no report" in one_error_line(call("bench", "--compare", bad, bad))
    for path in (tmp_path, tmp_path / "missing"):
        assert f"{path}: cannot be read" in one_error_line(call("bench", "--compare", path, path))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is optional")
def test_plot(report: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "pictures"
    result = call("bench", "--plot", report, folder)
    assert (result.exit_code, result.stderr) == (0, "")
    made = sorted(folder.iterdir())
    assert [Path(line) for line in sorted(result.stdout.splitlines())] == made
    assert [path.name for path in made] == [
        f"cpu-bfloat16-h16-k4-s1-{overlap}-{temperature}-quiet-enqueue.png"
        for overlap in ("no-overlap", "overlap")
        for temperature in ("hot", "rotating")
    ]
    for path in made:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    assert "cannot be written" in one_error_line(call("bench", "--plot", report, report))


def test_plot_without_matplotlib(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback, and against a message that does not help."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("bench", "--plot", report, tmp_path / "pictures")
    assert 'pip install "draftgather[plot]"' in one_error_line(result)
    assert not (tmp_path / "pictures").exists()
