"""What importing draftgather adds to importing torch and Triton: `python -m draftgather.bench.import_time`.

Fresh processes take turns: one imports torch and Triton, the other draftgather as well, first the one, then the other
(in reversed order every second round). Each times its imports itself, so that the interpreter's own start is left out.
Beside them: the modules that draftgather adds, and what it takes on disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import draftgather

BASE = "import torch, triton"
WITH_OURS = f"{BASE}, draftgather"
_CODE = """
import json, sys
from time import perf_counter
start = perf_counter()
{}
print(json.dumps([perf_counter() - start, sorted(sys.modules)]))
"""


class ImportFigures(NamedTuple):
    """Medians over the rounds."""

    base_seconds: float
    our_seconds: float  # torch and Triton included
    ratio: float  # our_seconds / base_seconds
    own_modules: list[str]  # that draftgather adds: its own
    other_modules: list[str]  # that draftgather adds: of others
    installed_files: int
    installed_bytes: int  # without bytecode


def measure(rounds: int) -> ImportFigures:
    """The first process of each kind fills the disk's cache, and is not counted."""
    (_, base_modules), (_, our_modules) = _import(BASE), _import(WITH_OURS)
    times: dict[str, list[float]] = {BASE: [], WITH_OURS: []}
    for i in range(rounds):
        for statement in (BASE, WITH_OURS) if i % 2 == 0 else (WITH_OURS, BASE):
            times[statement].append(_import(statement)[0])
    base, ours = statistics.median(times[BASE]), statistics.median(times[WITH_OURS])
    added = sorted(set(our_modules) - set(base_modules))
    is_own = [name.split(".")[0] == "draftgather" for name in added]
    sizes = [path.stat().st_size for path in _installed_files()]
    return ImportFigures(
        base_seconds=base,
        our_seconds=ours,
        ratio=ours / base,
        own_modules=[name for name, own in zip(added, is_own, strict=True) if own],
        other_modules=[name for name, own in zip(added, is_own, strict=True) if not own],
        installed_files=len(sizes),
        installed_bytes=sum(sizes),
    )


def _import(statement: str) -> tuple[float, list[str]]:
    """Seconds of `statement` in a process of its own, and the modules that it has then."""
    # -I: neither the folder at hand nor PYTHONPATH may be where it comes from.
    command = [sys.executable, "-I", "-c", _CODE.format(statement)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    seconds, modules = json.loads(done.stdout)
    return seconds, modules


def _installed_files() -> list[Path]:
    package = Path(draftgather.__file__).parent
    return [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What importing draftgather adds to importing torch and Triton.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    figures = measure(options.rounds)
    print(f"{BASE:<36}{figures.base_seconds:>8.3f} s")
    print(f"{WITH_OURS:<36}{figures.our_seconds:>8.3f} s")
    print(f"{'ratio':<36}{figures.ratio:>8.3f}")
    print(
        f"modules added: {len(figures.own_modules)} of its own, of others: {', '.join(figures.other_modules) or 'none'}"
    )
    print(f"on disk: {figures.installed_files} files, {figures.installed_bytes / 1024:.0f} KiB")
    if options.json:
        options.json.write_text(json.dumps(figures._asdict(), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
