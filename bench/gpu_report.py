"""What the GPU check says: sections of checks, targets and tables, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from math import inf
from pathlib import Path
from time import monotonic
from traceback import extract_tb
from typing import Any

from draftgather.bench.environment import environment

PASSED, FAILED, CUT_SHORT, NOT_RUN = "passed", "FAILED", "cut short", "not run"
Cell = str | int | float | None  # a float is something measured
_MOST_FAILURES = 5  # told of one check
_JSON, _MARKDOWN = "results.json", "RESULTS.md"


class _CutShort(Exception):
    """The section ends here."""


@dataclass(slots=True)
class Check:
    name: str
    runs: int = 0
    num_failed: int = 0
    failures: list[str] = field(default_factory=list)  # the first few


@dataclass(slots=True)
class Target:
    name: str
    wanted: float  # at least
    got: float | None  # None: not measured


@dataclass(slots=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[Cell]]


@dataclass
class Section:
    """One part of the check, and what it found."""

    key: str
    title: str
    about: str
    is_correctness: bool
    is_dry: bool
    seconds: float = 0.0
    cut_short: str = ""  # why it did not come to its end
    checks: list[Check] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._until = inf
        self._is_alive: Callable[[], bool] = lambda: True
        self._has_failed = False  # since the device was last looked at

    @property
    def verdict(self) -> str:
        if any(check.num_failed for check in self.checks):
            return FAILED
        if self.cut_short:
            return CUT_SHORT if self.checks else NOT_RUN
        return PASSED

    @property
    def is_good(self) -> bool:
        """Speed may be left out for want of time; correctness may not."""
        return self.verdict != FAILED and (not self.is_correctness or self.verdict == PASSED)

    @contextmanager
    def running(self, seconds: float, is_alive: Callable[[], bool]) -> Iterator[None]:
        """For so long at most. What goes wrong outside of any `attempt` is a failed check of its own."""
        start = monotonic()
        self._until, self._is_alive = start + seconds, is_alive
        try:
            yield
        except _CutShort as error:
            self.cut_short = str(error)
        except Exception as error:
            self._fail(self._check("comes to its end"), "", error)
        self.seconds = monotonic() - start

    def attempt(self, check: str, what: str, work: Callable[..., object], *arguments: Any) -> bool:
        """Do one piece of work of a check, on its own: whether it went well."""
        if monotonic() > self._until:
            raise _CutShort("its time was over")
        if self._has_failed and not self._is_alive():
            raise _CutShort("the device was lost: every later call meets the same error")
        self._has_failed = False
        found = self._check(check)
        found.runs += 1
        try:
            work(*arguments)
        except Exception as error:
            self._fail(found, what, error)
            return False
        return True

    @property
    def seconds_left(self) -> float:
        return self._until - monotonic()

    def tell(self, note: str) -> None:
        self.notes.append(note)

    def target(self, name: str, wanted: float, got: float) -> None:
        self.targets.append(Target(name, wanted, None if self.is_dry else got))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """In a dry run whatever was measured is left out."""
        kept = [[None if self.is_dry and isinstance(cell, float) else cell for cell in row] for row in rows]
        self.tables.append(Table(title, list(columns), kept))

    def _check(self, name: str) -> Check:
        found = next((check for check in self.checks if check.name == name), None)
        if found is None:
            found = Check(name)
            self.checks.append(found)
        return found

    def _fail(self, check: Check, what: str, error: Exception) -> None:
        self._has_failed = True
        check.num_failed += 1
        if len(check.failures) < _MOST_FAILURES:
            place = extract_tb(error.__traceback__)[-1]
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            check.failures.append(f"{what}: {words} ({Path(place.filename).name}:{place.lineno})".lstrip(": "))


class Report:
    """All sections, in their order, and what they were measured on."""

    def __init__(self, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.environment: dict[str, Any] = dict(environment())
        self.sections: list[Section] = []

    @property
    def exit_code(self) -> int:
        return 0 if self.sections and all(section.is_good for section in self.sections) else 1

    def write(self, folder: Path) -> None:
        sections = [asdict(section) | {"verdict": section.verdict} for section in self.sections]
        told = {"dry": self.is_dry, "environment": self.environment, "exit_code": self.exit_code, "sections": sections}
        (folder / _JSON).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        (folder / _MARKDOWN).write_text(self.markdown(), encoding="utf-8")

    def read(self, folder: Path) -> None:
        """Add the sections that another process wrote there."""
        with (folder / _JSON).open(encoding="utf-8") as file:
            for told in json.load(file)["sections"]:
                values = {f.name: told[f.name] for f in fields(Section) if f.name in told}
                for name, kind in (("checks", Check), ("targets", Target), ("tables", Table)):
                    values[name] = [kind(**item) for item in told[name]]
                self.sections.append(Section(**values))

    def markdown(self) -> str:
        lines = ["# draftgather on a GPU", ""]
        if self.is_dry:
            lines += [
                "**Dry run: no figure here is from a GPU.** The check's code ran to its end on a machine without one,",
                "the kernel interpreted and launches into a driver that does nothing. Times are left out.",
                "",
            ]
        lines += ["    draftgather bench --gpu-check --out bench" + (" --dry" if self.is_dry else ""), ""]
        lines += ["; ".join(f"{name} {value}" for name, value in self.environment.items() if value is not None), ""]
        summary: list[list[Cell]] = []
        for s in self.sections:
            counts = sum(c.runs for c in s.checks), sum(c.num_failed for c in s.checks)
            summary.append([s.title, s.verdict, *counts, f"{s.seconds:.1f}"])
        lines += _table(["part", "verdict", "runs", "failed", "seconds"], summary)
        targets = [target for s in self.sections for target in s.targets]
        if targets:
            lines += ["## Targets", ""]
            lines += _table(["", "wanted", "got", ""], [[t.name, t.wanted, t.got, _reached(t)] for t in targets])
        for s in self.sections:
            lines += [f"## {s.title}: {s.verdict}", "", s.about, ""]
            lines += [f"Cut short: {s.cut_short}.", ""] if s.cut_short else []
            if s.checks:
                lines += _table(["check", "runs", "failed"], [[c.name, c.runs, c.num_failed] for c in s.checks])
            failures = [f"- {c.name}: {failure}" for c in s.checks for failure in c.failures]
            lines += [*failures, ""] if failures else []
            for table in s.tables:
                lines += [f"{table.title}:", "", *_table(table.columns, table.rows)]
            lines += [line for note in s.notes for line in (note, "")]
        return "\n".join(lines).rstrip() + "\n"


def _reached(target: Target) -> str:
    if target.got is None:
        return "not measured"
    return "reached" if target.got >= target.wanted else "missed"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *[[_cell(cell) for cell in row] for row in rows]]
    return [*["| " + " | ".join(line) + " |" for line in lines], ""]


def _cell(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if cell >= 100 else f"{cell:.3g}"
    return "-" if cell is None else str(cell)
