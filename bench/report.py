"""Figures of `draftgather bench`: as JSON lines, as tables, and two files side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from draftgather.bench.matrix import CLONES, PUT, Figure, Group, Matrix
from draftgather.bench.paths import FLOOR, PLAIN
from draftgather.bench.timing import Percentiles, Times

# Which times: what is measured, and how a table calls it.
MEASURES = {"enqueue_us": "host time", "device_us": "device time", "wall_us": "call until the device is done"}
_OURS = ("slots", "rows")
_FORMAT = {"format": "draftgather bench", "version": 1}


class NotAReport(ValueError):
    """The file was not written by `draftgather bench --json`."""


@dataclass(frozen=True, slots=True)
class Report:
    """One file."""

    environment: Mapping[str, object]
    options: Mapping[str, object]
    figures: list[Figure]


def to_lines(environment: Mapping[str, object], matrix: Matrix, figures: Sequence[Figure]) -> str:
    """JSON lines: environment and options first, then a line a figure."""
    head = {**_FORMAT, "environment": environment, "options": asdict(matrix)}
    lines = [{**asdict(f.group), "num_rows": f.num_rows, "path": f.path, **asdict(f.times)} for f in figures]
    return "\n".join(map(json.dumps, (head, *lines)))


def read_report(path: Path) -> Report:
    """What `to_lines` gave. Raises NotAReport."""
    number = 1
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines()
        head = json.loads(first)
        if not isinstance(head, dict) or any(head.get(key) != value for key, value in _FORMAT.items()):
            raise NotAReport(f"{path}: is no report of `draftgather bench --json` (version {_FORMAT['version']})")
        report = Report(dict(head["environment"]), dict(head["options"]), [])
        for line in rest:
            number += 1
            report.figures.append(_figure(json.loads(line)))
        return report
    except OSError as error:
        raise NotAReport(f"{path}: cannot be read: {error.strerror or error}") from error
    except NotAReport:
        raise
    except (ValueError, TypeError, KeyError) as error:
        what = "is no report of `draftgather bench --json`"
        raise NotAReport(f"{path}:{number}: {what}: {type(error).__name__} {error}") from error


def _figure(line: dict[str, Any]) -> Figure:
    given = dict(line)
    times = {name: None if (value := given.pop(name)) is None else Percentiles(**value) for name in MEASURES}
    num_rows, path = given.pop("num_rows"), given.pop("path")
    figure = Figure(Group(**given), num_rows, path, Times(**times))  # type: ignore[arg-type]
    numbers = [getattr(value, p) for value in times.values() if value for p in ("p50", "p90", "p99")]
    if not numbers or not all(isinstance(n, (int, float)) and n > 0 for n in numbers) or not isinstance(num_rows, int):
        raise ValueError("a time is missing, or no positive number")
    return figure


def measured(figure: Figure) -> dict[str, Percentiles]:
    """By its measure."""
    return {name: value for name in MEASURES if (value := getattr(figure.times, name)) is not None}


def tables(figures: Sequence[Figure]) -> list[Table]:
    """Of one group: a table a measure, a line a batch size."""
    group = figures[0].group
    if group.step == "arrival":
        return [_arrival_table(figures)]
    return [_table(figures, name) for name in measured(figures[0])]


def _table(figures: Sequence[Figure], measure: str) -> Table:
    group = figures[0].group
    where = (
        "GPU" if group.device == "cuda" else f"CPU, torch threads: {torch.get_num_threads()}; CPU ratios are proxies"
    )
    ours = [path for path in _OURS if any(f.path == path for f in figures)]
    caption = f"{where}. p50 in µs (p90 and p99: --json); (x): times faster than {PLAIN}."
    table = Table(title=f"{MEASURES[measure]}: {group}", caption=caption)
    names = list(dict.fromkeys(f.path for f in figures))
    for name in ("N", *names, "fastest"):
        table.add_column(name, justify="right", no_wrap=True)
    for num_rows, line in groupby(figures, key=lambda f: f.num_rows):
        us = {f.path: float(getattr(f.times, measure).p50) for f in line}
        cells = [f"{us[n]:.1f} ({us[PLAIN] / us[n]:.2f}x)" if n in ours else f"{us[n]:.1f}" for n in names]
        table.add_row(str(num_rows), *cells, min((n for n in names if n != FLOOR), key=us.__getitem__))
    return table


def _arrival_table(figures: Sequence[Figure]) -> Table:
    table = Table("", "p50 µs", "p90 µs", "p99 µs", title=f"an arriving row: {figures[0].group}")
    times = {f.path: f.times.enqueue_us for f in figures}
    for name, t in times.items():
        table.add_row(name, f"{t.p50:.1f}", f"{t.p90:.1f}", f"{t.p99:.1f}")
    table.caption = f"{CLONES} / {PUT} = {times[CLONES].p50 / times[PUT].p50:.2f}"
    return table


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports, joined on everything that names a case."""

    changed: list[tuple[str, float, float, float]]  # case, p50 of old and new in µs, old / new; the worst first
    only_old: list[str]
    only_new: list[str]
    environment: list[str]  # what differs in it


def compare(old: Report, new: Report) -> Comparison:
    times = [
        {_name_of(f, name): value.p50 for f in report.figures for name, value in measured(f).items()}
        for report in (old, new)
    ]
    both = [(name, us, times[1][name], us / times[1][name]) for name, us in times[0].items() if name in times[1]]
    differs = [
        f"{key}: {before} -> {after}"
        for key in {**old.environment, **new.environment}
        if (before := old.environment.get(key)) != (after := new.environment.get(key))
    ]
    only_old, only_new = ([name for name in times[i] if name not in times[1 - i]] for i in (0, 1))
    return Comparison(sorted(both, key=lambda line: line[3]), only_old, only_new, differs)


def comparison_table(comparison: Comparison) -> Table:
    caption = "p50 in µs. Above 1: new is faster. Two runs of the same code differ too: see how much."
    table = Table("case", "old", "new", "old / new", title="draftgather bench --compare", caption=caption)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, before, after, ratio in comparison.changed:
        table.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{ratio:.2f}x")
    return table


def _name_of(figure: Figure, measure: str) -> str:
    g = figure.group
    return f"{g.step} {figure.path}, N={figure.num_rows}, {g.device}, {g}: {MEASURES[measure]}"
