"""The GPU check without a GPU: that it comes to its end, and that it sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import draftgather as dg
from draftgather import launch as launch_module
from draftgather import machine as machine_module
from draftgather.bench import gpu_check as check_module
from draftgather.bench import gpu_device as device_module
from draftgather.bench.cli import app
from draftgather.bench.gpu_check import BUDGET_S, DRY, PARTS, check_no_waits, gpu_check, run_parts
from draftgather.bench.gpu_device import Device, DryDevice, Profile
from draftgather.bench.gpu_report import Report, Section
from draftgather.completion import DONE
from draftgather.kernels.gather_rows import gather_rows
from draftgather.kernels.gather_rows_torch import gather_rows_torch
from draftgather.kernels.row_tables import LaunchDescriptor

QUICK = {"bytes": 3.0, "busy": 60.0, "graph": 60.0, "batches": 60.0}


def run(folder: Path, key: str, device: Device | None = None, seconds: float = 60.0) -> tuple[Section, Report]:
    """One part of a dry run in this process, for so long."""
    report, part = Report(is_dry=True), next(part for part in PARTS if part.key == key)
    run_parts(report, device or DryDevice(), [key], seconds * BUDGET_S / part.limit_s, folder)
    [section] = report.sections
    return section, report


def problems(section: Section) -> str:
    return " ".join(failure for check in section.checks for failure in check.failures)


def test_dry_run(tmp_path: Path) -> None:
    """Guards the code that a GPU is rarely there for: all of it comes to its end, and says it measured nothing."""
    program = "import sys, pathlib; from draftgather.bench.gpu_check import gpu_check\n"
    program += "sys.exit(gpu_check(pathlib.Path(sys.argv[1]), dry=True))"
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path)]
    # Triton 3.9 warns where the variable is not set; the kernel computes nothing.
    environment = os.environ | {"TRITON_DEFAULT_FP_FUSION": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.count(": passed") == len(PARTS)
    told = json.loads((tmp_path / "results.json").read_text())
    assert [section["key"] for section in told["sections"]] == [part.key for part in PARTS]
    assert told["dry"] and told["exit_code"] == 0 and told["environment"]["torch"] == torch.__version__
    text = (tmp_path / "RESULTS.md").read_text()
    assert "**Dry run: no figure here is from a GPU.**" in text
    for section in told["sections"]:
        assert section["verdict"] == "passed" and section["checks"] and section["seconds"] > 0
        assert f"## {next(p for p in PARTS if p.key == section['key']).title}: passed" in text
        for table in section["tables"]:
            assert table["rows"] and table["title"] in text
            assert not any(isinstance(cell, float) for row in table["rows"] for cell in row)
        assert all(target["got"] is None for target in section["targets"])
    [counts] = next(s for s in told["sections"] if s["key"] == "launches")["tables"]
    uploads = {row[4] for row in counts["rows"] if "no zero-copy" not in row[0]}
    assert {row[2] for row in counts["rows"]} == {5} and uploads == {0}
    assert {row[4] for row in counts["rows"] if row[0].startswith("pinned mailbox, no zero-copy")} == {5}
    assert sum(len(section["targets"]) for section in told["sections"]) == 5


# -- what is wrong is seen


def flipped(run_it: Callable[..., Any], nth: int) -> Callable[..., Any]:
    """The same, but the nth launch with outputs writes one bit wrong."""
    count = 0

    def wrong(descriptor: LaunchDescriptor, *more: Any) -> Any:
        nonlocal count
        result = run_it(descriptor, *more)
        table = descriptor.outputs[-1]
        if table is not None and table.tensor.dtype is torch.bfloat16:
            count += 1
            if count >= nth:
                table.tensor.view(torch.int16)[descriptor.num_rows - 1, -1] ^= 1
        return result

    return wrong


@pytest.mark.parametrize("key", QUICK)
def test_a_wrong_byte_of_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    """Guards against a check that cannot fail."""
    monkeypatch.setattr(machine_module, "gather_rows", flipped(gather_rows, 1))
    section, report = run(tmp_path, key, seconds=QUICK[key])
    assert (section.verdict, report.exit_code) == ("FAILED", 1)
    assert "hidden_states differs" in problems(section)
    assert "FAILED" in (tmp_path / "RESULTS.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["exit_code"] == 1


def test_a_wrong_byte_of_the_twin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a kernel that is compared with itself, or a twin that is wrong with it."""
    monkeypatch.setattr(launch_module, "gather_rows_torch", flipped(gather_rows_torch, 1))
    section, report = run(tmp_path, "bytes", seconds=3.0)
    assert (section.verdict, report.exit_code) == ("FAILED", 1)
    assert "the twin's hidden_states differs from the rows" in problems(section)


@pytest.mark.parametrize(("method", "words"), [("publish", "stash: "), ("stash", "stash: "), ("resolve", "resolve: ")])
def test_a_wrong_relay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, words: str) -> None:
    original = getattr(dg.FutureMap, method)

    def wrong(self: dg.FutureMap, *arguments: Any) -> None:
        original(self, *arguments)
        if self._machine.has_kernel and method == "resolve":
            arguments[0].seq_lens[0] += 1
        elif self._machine.has_kernel:
            self.new_seq_lens_buf[0] += 1

    monkeypatch.setattr(dg.FutureMap, method, wrong)
    section, _ = run(tmp_path, "bytes", seconds=4.0)
    assert section.verdict == "FAILED" and words in problems(section)


def test_a_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the guard around the hot path."""
    device, assemble = DryDevice(), dg.DraftAssembler.assemble_slots

    def waits(self: dg.DraftAssembler, *arguments: Any, **named: Any) -> dg.DraftBatch:
        batch = assemble(self, *arguments, **named)
        device.synchronize()
        return batch

    section = Section("", "", "", True, True)
    with section.running(4.0, device.is_alive):
        check_no_waits(section, device, DRY)
    assert section.cut_short and section.verdict == "cut short"
    monkeypatch.setattr(dg.DraftAssembler, "assemble_slots", waits)
    with section.running(4.0, device.is_alive):
        check_no_waits(section, device, DRY)
    assert section.verdict == "FAILED" and "the host waited" in problems(section)


def free_early(monkeypatch: pytest.MonkeyPatch) -> None:
    end_read = dg.DraftMailbox.end_read
    monkeypatch.setattr(dg.DraftMailbox, "end_read", lambda self, read, marker: end_read(self, read, DONE))


def wait_in_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module._Drained, "query", lambda self: True)


def refill(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftgather.describe import StagingBuffer

    monkeypatch.setattr(StagingBuffer, "marker", property(lambda self: DONE, lambda self, marker: None), raising=False)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [(free_early, "slots were free"), (wait_in_put, "only when the work before them was done"), (refill, "differs")],
)
def test_memory_reused_too_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, break_it: Callable[[pytest.MonkeyPatch], None], words: str
) -> None:
    """Guards the busy stream: a slot, the host's time and a staging buffer."""
    break_it(monkeypatch)
    section, _ = run(tmp_path, "busy")
    assert section.verdict == "FAILED" and words in problems(section)


def test_a_call_under_capture_that_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_module._DryMachine, "refuse_capture", lambda self: None)
    section, _ = run(tmp_path, "graph")
    refused = next(check for check in section.checks if "refused" in check.name)
    assert (refused.num_failed, section.verdict) == (5, "FAILED")


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Profile([1.0] * 6, (), (), ""), "6 launches for 5 calls"),
        (Profile([1.0] * 5, ("fill",), (), ""), "other kernels"),
        (Profile([1.0] * 5, (), [1.0] * 11, ""), "11 memcpys for 5 calls"),
    ],
    ids=["two launches", "another kernel", "a copy"],
)
def test_wrong_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: Profile, words: str) -> None:
    monkeypatch.setattr(DryDevice, "profile", lambda self, work: seen)
    monkeypatch.setattr(check_module, "SOURCES", check_module.SOURCES[:1])
    section, report = run(tmp_path, "launches", seconds=20.0)
    assert report.exit_code == 1 and words in problems(section)


# -- time, and a device that goes


def test_the_budget_is_kept(tmp_path: Path) -> None:
    """Guards a lease that ends in the midst: parts are cut short, and a check of correctness then has not passed."""
    report = Report(is_dry=True)
    run_parts(report, DryDevice(), ["bytes", "batches", "kernel"], 2.0, tmp_path)
    assert sum(section.seconds for section in report.sections) < 10
    assert report.sections[0].verdict == "cut short" and report.exit_code == 1
    assert "Cut short: its time was over." in (tmp_path / "RESULTS.md").read_text()
    report = Report(is_dry=True)
    run_parts(report, DryDevice(), ["bytes", "batches"], -1.0, tmp_path)
    assert [section.verdict for section in report.sections] == ["not run", "not run"]
    assert [section.is_good for section in report.sections] == [False, True]


def test_a_lost_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against one error told a thousand times, or taken for a pass."""
    device, lost = DryDevice(), [False]

    def fails(*_arguments: object) -> None:
        lost[0] = True
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(device, "is_alive", lambda: not lost[0])
    monkeypatch.setattr(machine_module, "gather_rows", fails)
    report = Report(is_dry=True)
    run_parts(report, device, ["bytes", "graph"], 100.0, tmp_path)
    assert [section.verdict for section in report.sections] == ["FAILED", "not run"]
    assert sum(check.num_failed for check in report.sections[0].checks) == 1
    assert "illegal memory access" in problems(report.sections[0])
    assert report.exit_code == 1


def test_a_part_that_breaks_is_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check_module, "_Graph", mock.Mock(side_effect=RuntimeError("no graphs here")))
    report = Report(is_dry=True)
    run_parts(report, DryDevice(), ["graph", "kernel"], 100.0, tmp_path)
    assert [section.verdict for section in report.sections] == ["FAILED", "passed"]
    assert "no graphs here" in problems(report.sections[0])


def test_parts_alone(tmp_path: Path) -> None:
    assert gpu_check(tmp_path / "new", dry=True, parts=["graph"]) == 0
    assert "CUDA graphs and fixed outputs: passed" in (tmp_path / "new" / "RESULTS.md").read_text()


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a report that replaces a real one, and a run that seems to have failed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_module.main(["--out", str(tmp_path / "new")]) == 2
    assert "no GPU" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_figures_are_told() -> None:
    """Guards the report of a real run, whose numbers a dry one leaves out."""
    report, section = Report(is_dry=False), Section("k", "Kernel", "about", False, False)
    report.sections.append(section)
    section.table("Times", ["N", "µs"], [[64, 12.345], [512, 123.6], [1, None]])
    section.target("fast", 85.0, 86.2)
    section.target("faster", 5.0, 4.9)
    text = report.markdown()
    assert "Dry run" not in text and "no figure" not in text
    for line in ("| 64 | 12.3 |", "| 512 | 124 |", "| 1 | - |", "| fast | 85 | 86.2 | reached |"):
        assert line in text
    assert "| faster | 5 | 4.9 | missed |" in text and report.exit_code == 0


def test_crossover() -> None:
    stock, ours = {1: 10.0, 8: 20.0, 64: 100.0}, {1: 30.0, 8: 15.0, 64: 20.0}
    figures = {n: {"stock": (stock[n], stock[n]), "ours": (ours[n], 30.0)} for n in stock}
    assert check_module._wins_from(figures, "ours", ["stock"], 0) == 8
    assert check_module._wins_from(figures, "ours", ["stock"], 1) == 64
    assert check_module._wins_from(figures, "stock", ["ours"], 0) == "never"


# -- the seam: what is asked of CUDA, as far as its signatures tell


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return False

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.enable_timing and end.enable_timing
        return 12.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """torch.cuda with the real signatures, and nothing behind them."""
    names = ("synchronize", "_sleep", "set_sync_debug_mode", "current_stream", "set_stream", "get_device_properties")
    fake = mock.Mock()
    for name in names:
        monkeypatch.setattr(torch.cuda, name, mock.create_autospec(getattr(torch.cuda, name)))
        setattr(fake, name, getattr(torch.cuda, name))

    @contextmanager
    def graph(cuda_graph: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed"))
    return fake


def a_device() -> Device:
    device = Device.__new__(Device)
    device.device, device._is_profiled = torch.device("cpu"), None
    device.machine = machine_module.Machine(torch.device("cpu"), True, True, True)
    return device


def test_the_seam(cuda: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the few lines that no dry run reaches, up to the calls' signatures."""
    device, calls = a_device(), []
    assert device.time_us([lambda: calls.append(1), lambda: calls.append(2)], rounds=3) == 2000.0
    assert calls == [1, 2] * 4
    cuda._sleep.assert_called_once_with(40_000_000)
    assert not device.busy(1).query()
    with device.no_waits():
        cuda.set_sync_debug_mode.assert_called_with("error")
    cuda.set_sync_debug_mode.assert_called_with("default")
    replay = device.capture(lambda: calls.append(3), lambda: calls.append(4))
    assert calls[-2:] == [4, 3] and replay() == "replayed"
    cuda.set_stream.assert_called_once_with(cuda.current_stream.return_value)
    assert device.is_alive()
    assert device.machine_with(zero_copy=False).zero_copy is False and device.machine_with() is device.machine
    cuda.get_device_properties.return_value = SimpleNamespace(
        name="GPU", major=9, minor=0, total_memory=1 << 40, multi_processor_count=132
    )
    assert device.about()["capability"] == "9.0"
    cuda.synchronize.side_effect = RuntimeError
    assert not device.is_alive()


def test_a_wait_that_times_only_the_host(cuda: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "query", lambda self: True)
    with pytest.raises(RuntimeError, match="only the host was timed"):
        a_device().time_us([lambda: None], 1)


def test_what_the_profiler_saw_is_sorted(cuda: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards counts that mix up kernels, copies and what only the host did."""

    def event(name: str, device_type: Any = device_module.DeviceType.CUDA, us: float = 1.0) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            device_type=device_type,
            time_range=SimpleNamespace(elapsed_us=lambda: us),
            is_user_annotation=False,
        )

    seen = [event("_gather_rows_kernel", us=3.0), event("Memcpy HtoD (Pinned -> Device)", us=2.0)]
    seen += [event("Memset (Device)"), event("cudaLaunchKernel", device_module.DeviceType.CPU), event("Context Sync")]
    seen += [event("vectorized_elementwise_kernel")]

    @contextmanager
    def profile(activities: list[Any]) -> Iterator[Any]:
        yield SimpleNamespace(events=lambda: seen)

    monkeypatch.setattr(device_module, "profile", profile)
    got = a_device()._profiled(lambda: None)
    assert got == Profile([3.0], ["vectorized_elementwise_kernel"], [2.0], "torch.profiler")


def test_counted_without_a_profiler(cuda: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines whose profiler sees no kernels: launches and uploads are counted on the host."""
    device = a_device()
    monkeypatch.setattr(device, "_profiled", lambda work: Profile((), (), (), ""))

    def work() -> None:
        device_module.knobs.runtime.launch_enter_hook(None)
        device.machine.upload(torch.ones(1))

    seen = device.profile(work)
    assert (len(seen.ours_us), len(seen.copies_us)) == (1, 1) and "on the host" in seen.how
    assert device_module.knobs.runtime.launch_enter_hook.calls == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu-check", "--sglang", "."], "exclude each other"),
        (["--gpu-check", "--json", "-"], "goes with none of"),
        (["--dry"], "go with --gpu-check"),
    ],
)
def test_command_line(arguments: list[str], complaint: str) -> None:
    """Guards against options that are not heard."""
    run = CliRunner().invoke(app, ["bench", *arguments])
    assert run.exit_code == 2
    assert complaint in run.output


def test_command_line_without_a_gpu() -> None:
    """Guards a machine without one against a report that looks like one from a GPU."""
    if not torch.cuda.is_available():
        assert CliRunner().invoke(app, ["bench", "--gpu-check"]).exit_code == 2
