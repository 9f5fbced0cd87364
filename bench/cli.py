"""The command line: `draftgather demo`, `draftgather soak`, `draftgather doctor`, `draftgather bench`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from draftgather import __version__
from draftgather.bench.arrivals import Arrival, TraceError, generate, read_trace
from draftgather.bench.demo import DemoFigures, DemoOptions, replay, torch_threads
from draftgather.bench.doctor import Diagnosis, diagnose
from draftgather.bench.environment import environment
from draftgather.bench.matrix import FULL, Figure, Matrix, num_cases, run
from draftgather.bench.paths import PATHS, BytesDiffer
from draftgather.bench.report import NotAReport, comparison_table, read_report, tables, to_lines
from draftgather.bench.report import compare as compare_reports
from draftgather.bench.soak import DRIFT_BOUND_BYTES, NUM_SAMPLES, SoakOptions, SoakReport, soak

# Without markup and pretty exceptions: errors are plain lines, in a pipe too.
app = typer.Typer(
    name="draftgather",
    help="Draft rows of PD-disaggregated speculative decoding, gathered into batches in one launch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_NUM_GENERATED = 5000


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class Overlap(str, Enum):
    on = "on"
    off = "off"


class Temperature(str, Enum):
    rotating = "rotating"
    hot = "hot"


class Load(str, Enum):
    quiet = "quiet"
    busy = "busy"


def main() -> None:
    """The entry point."""
    app(prog_name="draftgather")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(__version__)
        raise typer.Exit


def _check_factor(value: float) -> float:
    # Not by min and max: NaN would pass those.
    if not 1e-3 <= value <= 1e6:
        raise typer.BadParameter(f"{value} is not between 0.001 and 1000000.")
    return value


def _check_device(device: Device) -> Device:
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no CUDA device that torch can use.")
    return device


def _check_paths(names: list[str] | None) -> list[str] | None:
    known = [path.name for path in PATHS]
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}.")
    return names


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals of a Mooncake trace (JSON lines); by default they are generated.")
    ] = None,
    jitter: Annotated[bool, typer.Option(help="Spread equal times of the trace up to the next distinct one.")] = True,
    hidden_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Width of the draft's hidden state.")] = 7168,
    dtype: Annotated[Dtype, typer.Option(help="Of the hidden states.")] = Dtype.bfloat16,
    topk: Annotated[int, typer.Option(min=1, max=64)] = 4,
    num_steps: Annotated[int, typer.Option(min=1, max=64, help="Above 1: multi-layer EAGLE.")] = 1,
    tick_ms: Annotated[
        float, typer.Option(callback=_check_factor, help="Simulated time from one batch to the next.")
    ] = 20.0,
    speed_up: Annotated[
        float, typer.Option(callback=_check_factor, help="How many times faster requests arrive, and end.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Requests; by default the whole trace, or {_NUM_GENERATED} generated.")
    ] = None,
    device: Annotated[Device, typer.Option(callback=_check_device)] = Device.cpu,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    threads: Annotated[int, typer.Option(min=1, max=os.cpu_count(), help="Of torch, during the demo.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help='Also write the figures as JSON; "-" is the standard output.')
    ] = None,
) -> None:
    """Replay arrivals through the whole path, beside torch.stack, and compare every byte.

    Exit code: 0 if every byte agrees, 1 if not, 2 for a bad option or file.
    """
    is_stdout = json_file == Path("-")
    if json_file is not None and not is_stdout:
        _check_writable(json_file, trace)
    requests, total = _arrivals(trace, jitter, seed, limit)
    options = DemoOptions(
        hidden_size=hidden_size,
        dtype=getattr(torch, dtype.value),
        topk=topk,
        num_steps=num_steps,
        tick_ms=tick_ms,
        speed_up=speed_up,
        device=torch.device(device.value),
        seed=seed,
        threads=threads,
    )
    with _progress(total) as on_progress:
        figures = replay(requests, options, on_progress)
    Console(stderr=is_stdout).print(_demo_table(figures, device))
    if json_file is not None:
        # Not the trace's name: a path says more about a machine than a report should.
        source = {"arrivals": "generated" if trace is None else "trace", "jitter": jitter, "limit": limit}
        where = environment() | {"device": device.value, "threads": threads}
        text = json.dumps(
            asdict(figures) | {"options": asdict(options) | source, "environment": where}, indent=2, default=str
        )
        _write(json_file, text, is_stdout)
    if figures.mismatches:
        raise typer.Exit(1)


@app.command("soak")
def run_soak(
    minutes: Annotated[float, typer.Option(callback=_check_factor, help="At least until each fault had its turn.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    hidden_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Width of the draft's hidden state.")] = 1024,
    topk: Annotated[int, typer.Option(min=1, max=64)] = 4,
    device: Annotated[Device, typer.Option(callback=_check_device)] = Device.cpu,
    num_slots: Annotated[int, typer.Option(min=16, max=1 << 20, help="Of the mailbox and of the future map.")] = 1024,
    json_file: Annotated[
        Path | None, typer.Option("--json", help='Also write the report as JSON; "-" is the standard output.')
    ] = None,
) -> None:
    """Replay arrivals at full speed, with aborts, retractions and faults that must be refused; compare every byte.

    One CPU thread. Exit code: 0 if all is well, 1 if not, 2 for a bad option or file.
    """
    is_stdout = json_file == Path("-")
    if json_file is not None and not is_stdout:
        _check_writable(json_file, None)
    torch.set_num_threads(1)
    options = SoakOptions(minutes, hidden_size, topk, torch.device(device.value), seed, num_slots)
    with _progress(NUM_SAMPLES, "soak") as on_progress:
        report = soak(options, on_progress)
    console = Console(stderr=is_stdout)
    console.print(_soak_table(report, device))
    for problem in report.problems:
        console.print(problem, style="bold red", markup=False, highlight=False)
    if json_file is not None:
        where = environment() | {"device": device.value, "threads": 1}
        told = asdict(report) | {"options": asdict(options), "environment": where}
        _write(json_file, json.dumps(told, indent=2, default=str), is_stdout)
    if report.problems:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Tell what this machine offers, and by which route rows of each kind reach each device."""
    diagnosis = diagnose()
    if as_json:
        typer.echo(json.dumps(asdict(diagnosis), indent=2))
    else:
        _print_diagnosis(diagnosis, Console())


@app.command()
def bench(
    full: Annotated[
        bool, typer.Option("--full", help="The whole matrix; an axis that is given stays as given.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="OLD NEW", help="Instead: two files of --json, side by side.")
    ] = None,
    plot: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="FILE DIR", help="Instead: pictures of a file of --json.")
    ] = None,
    sglang: Annotated[
        Path | None,
        typer.Option(help="Instead: a real sglang's builder; PATH holds the package, such as its site-packages."),
    ] = None,
    gpu_check: Annotated[
        bool, typer.Option("--gpu-check", help="Instead: ask a GPU all that only a GPU can answer, in four minutes.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --gpu-check: folder of RESULTS.md and results.json; by default gpu-check.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="With --gpu-check: without a GPU, the same code and no times.")
    ] = False,
    sizes: Annotated[
        list[int] | None, typer.Option("--size", min=1, help="Rows a batch. This and other axes: once a value.")
    ] = None,
    hidden_sizes: Annotated[
        list[int] | None, typer.Option("--hidden-size", min=1, max=1 << 16, help="By default 7168.")
    ] = None,
    topks: Annotated[list[int] | None, typer.Option("--topk", min=1, max=64, help="By default 4.")] = None,
    num_steps: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Above 1: multi-layer EAGLE.")] = None,
    overlaps: Annotated[list[Overlap] | None, typer.Option("--overlap", help="on: publish and stash too.")] = None,
    temperatures: Annotated[
        list[Temperature] | None,
        typer.Option("--temperature", help="Of the caches: another batch each call, or the same."),
    ] = None,
    loads: Annotated[
        list[Load] | None, typer.Option("--load", help="busy: the host's core is shared with a process that spins.")
    ] = None,
    paths: Annotated[list[str] | None, typer.Option("--path", callback=_check_paths, help="By default all.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the hidden states.")] = Dtype.bfloat16,
    device: Annotated[Device, typer.Option(callback=_check_device)] = Device.cpu,
    threads: Annotated[int, typer.Option(min=1, max=os.cpu_count(), help="Of torch.")] = 1,
    pool: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rows that batches are made of: 4096, with --sglang 1024; none below the largest batch."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 20,
    turn: Annotated[int, typer.Option(min=1, help="Calls a path makes in its turn.")] = 8,
    json_file: Annotated[
        Path | None, typer.Option("--json", help='Also write the figures as JSON lines; "-" is the standard output.')
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="With --sglang: arrivals of a Mooncake trace; by default they are generated.")
    ] = None,
    tick_ms: Annotated[
        float, typer.Option(callback=_check_factor, help="With --sglang: from one scheduler tick to the next.")
    ] = 20.0,
    speed_up: Annotated[
        float, typer.Option(callback=_check_factor, help="With --sglang: how many times faster requests arrive.")
    ] = 16.0,
    limit: Annotated[int, typer.Option(min=1, help="With --sglang: requests of the trace.")] = _NUM_GENERATED,
) -> None:
    """Time a batch by every path, ours and the baselines, in turns, every byte compared before and after.

    By default hidden 7168, top-k 4, one step, with overlap and without, rows cold (rotating) and hot in cache.

    Exit code: 0, 1 if a byte differs, 2 for a bad option or file.
    """
    if (compare is not None) + (plot is not None) + (sglang is not None) + gpu_check > 1:
        _fail("--compare, --plot, --sglang and --gpu-check exclude each other")
    if json_file is not None and (compare or plot or sglang or gpu_check):
        _fail("--json goes with none of --compare, --plot, --sglang and --gpu-check")
    if (dry or out is not None) and not gpu_check:
        _fail("--dry and --out go with --gpu-check")
    if gpu_check:
        from draftgather.bench import gpu_check as check

        raise typer.Exit(check.gpu_check(out or Path("gpu-check"), dry))
    if compare is not None:
        _bench_compare(*compare)
    elif plot is not None:
        _bench_plot(*plot)
    elif sglang is not None:
        if any(len(values or ()) > 1 for values in (hidden_sizes, topks)):
            _fail("--sglang takes one --hidden-size and one --topk")
        torch.set_num_threads(threads)
        arrivals, _ = _arrivals(trace, True, 0, limit)
        ticks = (replace(arrival, time_ms=arrival.time_ms / speed_up) for arrival in arrivals)
        shape = (hidden_sizes or [7168])[0], (topks or [4])[0]
        _bench_sglang(sglang, *shape, sizes or [1, 2, 4, 8, 16, 64, 256], pool or 1024, rounds, turn, ticks, tick_ms)
    else:
        axes: dict[str, list[Any] | None] = {
            "sizes": sizes,
            "hidden_sizes": hidden_sizes,
            "topks": topks,
            "num_steps": num_steps,
            "overlaps": overlaps and [overlap is Overlap.on for overlap in overlaps],
            "temperatures": temperatures and [temperature.value for temperature in temperatures],
            "loads": loads and [load.value for load in loads],
            "paths": paths,
        }
        # A value that is given twice is run once; batch sizes from small to large.
        chosen = {name: tuple(dict.fromkeys(values)) for name, values in axes.items() if values}
        matrix = replace(
            FULL if full else Matrix(),
            **chosen,
            dtype=dtype.value,
            device=device.value,
            pool=pool or Matrix.pool,
            rounds=rounds,
            turn=turn,
        )
        _bench_matrix(matrix, threads, json_file)


def _bench_matrix(matrix: Matrix, threads: int, json_file: Path | None) -> None:
    is_stdout = json_file == Path("-")
    if json_file is not None and not is_stdout:
        _check_writable(json_file, None)
    console, figures = _wide_console(stderr=is_stdout), list[Figure]()
    with torch_threads(threads), _progress(num_cases(matrix), "cases") as on_progress:
        for path in matrix.chosen:
            words = path.in_words(torch.device(matrix.device))
            console.print(f"{path.name:>16}  {words}", markup=False, highlight=False)
        try:
            for group in run(matrix, on_progress):
                figures += group
                for table in tables(group):
                    console.print(table)
        except BytesDiffer as error:
            typer.echo(f"draftgather: {error}", err=True)
            raise typer.Exit(1) from error
        if json_file is not None:
            _write(json_file, to_lines(environment(), matrix, figures), is_stdout)


def _bench_compare(old: Path, new: Path) -> None:
    try:
        comparison = compare_reports(read_report(old), read_report(new))
    except NotAReport as error:
        _fail(str(error))
    console = _wide_console()
    for difference in comparison.environment:
        console.print(f"environment, {difference}", markup=False, highlight=False)
    console.print(comparison_table(comparison))
    for which, names in (("old", comparison.only_old), ("new", comparison.only_new)):
        for name in names:
            console.print(f"only in {which}: {name}", markup=False, highlight=False)


def _bench_plot(file: Path, folder: Path) -> None:
    from draftgather.bench.plot import NoMatplotlib, plot

    try:
        made = plot(read_report(file), folder)
    except (NotAReport, NoMatplotlib) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{folder}: cannot be written: {error.strerror or error}")
    for path in made:
        typer.echo(path)


def _bench_sglang(
    path: Path,
    hidden_size: int,
    topk: int,
    sizes: list[int],
    pool: int,
    rounds: int,
    turn: int,
    arrivals: Iterator[Arrival],
    tick_ms: float,
) -> None:
    """A real sglang's builder and the plugged-in one in turns: host time a batch, and the stall a tick."""
    from draftgather.bench.sglang_builder import SglangBench, SglangNotUsable

    try:
        work = SglangBench(path, hidden_size, topk, max(pool, *sizes))
    except SglangNotUsable as error:
        _fail(str(error))
    console = Console()
    caption = (
        f"hidden {hidden_size} bf16, top-k {topk}, overlap on, torch threads: {torch.get_num_threads()}; µs, medians"
    )
    table = Table(
        "case",
        "N",
        "sglang",
        "draftgather",
        "fused",
        "mailbox, fused",
        title=f"builder, sglang {work.version}",
        caption=caption,
    )
    for case in ("rotating", "hot"):
        for num_rows in sizes:
            f = work.measure(case, num_rows, rounds, turn)
            stock, *ours = f.us.values()
            table.add_row(f.case, str(f.num_rows), f"{stock:.0f}", *[f"{us:.0f} ({stock / us:.2f}x)" for us in ours])
    console.print(table)
    arrival_figure = work.measure_arrival(rounds, turn)
    stock, kept = arrival_figure.sglang_us, arrival_figure.mailbox_us
    console.print(f"an arriving row: three clones {stock:.1f} µs, one record {kept:.1f} µs ({stock / kept:.2f}x)")
    table = Table("builder", "ticks", "p50 µs", "p99 µs", "total ms", title=f"stall a tick of {tick_ms:g} ms")
    for stall in work.replay(arrivals, tick_ms):
        table.add_row(
            stall.path, str(stall.ticks), f"{stall.p50_us:.0f}", f"{stall.p99_us:.0f}", f"{stall.total_ms:.1f}"
        )
    console.print(table)


def _wide_console(stderr: bool = False) -> Console:
    """In a pipe tables are as wide as they need to be."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=160)


def _arrivals(trace: Path | None, jitter: bool, seed: int, limit: int | None) -> tuple[Iterator[Arrival], int]:
    """The requests, and how many they are."""
    if trace is None:
        total = _NUM_GENERATED if limit is None else limit
        return generate(total, seed), total
    try:
        arrivals = read_trace(trace, jitter=jitter, seed=seed)[:limit]
    except TraceError as error:
        _fail(str(error))
    return iter(arrivals), len(arrivals)


def _check_writable(path: Path, trace: Path | None) -> None:
    """Before the replay, not after it."""
    try:
        if trace is not None and path.exists() and trace.exists() and path.samefile(trace):
            _fail(f"{path}: is the trace itself, and would be overwritten")
        # What a dangling link points to is made and taken away again, not the link.
        target = Path(os.path.realpath(path))
        existed = target.exists()
        # A pipe or device is not tried: whoever reads it would notice.
        if not existed or target.is_file() or target.is_dir():
            target.open("a").close()
        if not existed:
            target.unlink()
    except OSError as error:
        _fail(f"{path}: cannot be written: {error.strerror or error}")


def _write(path: Path, text: str, is_stdout: bool) -> None:
    if is_stdout:
        typer.echo(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _fail(f"{path}: cannot be written: {error.strerror or error}")


def _fail(text: str) -> NoReturn:
    typer.echo(f"draftgather: error: {' '.join(text.splitlines())}", err=True)
    raise typer.Exit(2)


@contextmanager
def _progress(total: int, what: str = "requests") -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; its callback adds finished requests."""
    # Without rich's own thread, which would run in the midst of what is timed.
    with Progress(
        console=Console(stderr=True), auto_refresh=False, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task, shown = bar.add_task(what, total=total), monotonic()

        def advance(num_requests: int) -> None:
            nonlocal shown
            bar.advance(task, num_requests)
            if monotonic() - shown > 0.1:
                bar.refresh()
                shown = monotonic()

        yield advance


def _demo_table(f: DemoFigures, device: Device) -> Table:
    caption = "Host time in µs. Every byte was compared with the torch.stack path's."
    if device is Device.cpu:
        caption += "\nThis ran on the CPU: its ratios are proxies, decode nodes run GPUs."
    table = Table("", "draftgather", "torch.stack", "ratio", title="draftgather demo", caption=caption)
    for column in table.columns[1:]:
        column.justify = "right"

    def add_times(name: str, ours: float, plain: float) -> None:
        table.add_row(name, f"{ours:.1f}", f"{plain:.1f}", f"{plain / ours:.2f}x")

    table.add_row("requests", str(f.requests))
    table.add_row("batches", str(f.batches))
    table.add_row("batch size, p50 / p99 / max", f"{f.batch_size_p50} / {f.batch_size_p99} / {f.batch_size_max}")
    add_times("a batch, p50", f.ours_us_p50, f.torch_stack_us_p50)
    add_times("a batch, p99", f.ours_us_p99, f.torch_stack_us_p99)
    add_times("an arriving row, p50 (put, 3 clones)", f.put_us_p50, f.clone_us_p50)
    table.add_row("route", f.route)
    table.add_row("launches", str(f.launches))
    table.add_row("mismatches", str(f.mismatches), style="bold red" if f.mismatches else "green")
    return table


def _soak_table(r: SoakReport, device: Device) -> Table:
    drift = "not measured" if r.drift_bytes is None else f"{r.drift_bytes / 2**20:.1f}"
    table = Table("", "", title=f"draftgather soak, {r.seconds:.0f} s on {device.value}", show_header=False)
    table.columns[1].justify = "right"

    def add(name: str, value: int | str, is_good: bool | None = None) -> None:
        style = None if is_good is None else "green" if is_good else "bold red"
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value, style=style)

    add("rows assembled, compared", r.rows_assembled)
    add("  of those separate tensors", r.rows_own_copy)
    add("rows stashed", r.rows_stashed)
    add("rows resolved, compared", r.rows_resolved)
    add("batches", r.batches)
    add("mismatches", r.mismatches, r.mismatches == 0)
    table.add_section()
    for name, fault in r.faults.items():
        add(name, f"{fault.injected} injected, {fault.refused} refused", fault.injected == fault.refused)
    table.add_section()
    add("aborts", r.aborts)
    add("retractions, of those resumed", f"{r.retractions:,}, {r.resumes:,}")
    add("slot reuses", r.slot_reuses)
    add("found the mailbox full", r.overflows)
    add("slots leaked", "not counted" if r.leaked_slots is None else r.leaked_slots, r.leaked_slots == 0)
    add(f"memory drift, MiB (at most {DRIFT_BOUND_BYTES >> 20})", drift, (r.drift_bytes or 0) <= DRIFT_BOUND_BYTES)
    add("pinned, MiB", f"{r.pinned_bytes / 2**20:.1f}")
    add("staging buffers", r.staging_buffers)
    return table


def _print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    for name, value in diagnosis.environment.items():
        console.print(f"{name:>12}  {'-' if value is None else value}", markup=False, highlight=False)
    for device in diagnosis.devices:
        table = Table("rows", "route", "in words", title=f"device {device.device}", caption=device.words)
        for route in device.routes:
            table.add_row(route.rows, route.route or "-", route.words)
        console.print(table)
    console.print(diagnosis.sglang, markup=False, highlight=False)
    if len(diagnosis.devices) == 1:
        console.print("torch can use no CUDA device here: batches are assembled on the CPU.", highlight=False)
