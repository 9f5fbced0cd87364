"""The table of promises names tests and mutations that exist, and every mutation that exists."""

from __future__ import annotations

import re
from pathlib import Path

import test_lifetimes

ROOT = Path(__file__).parent.parent
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def table() -> list[list[str]]:
    lines = [line for line in (ROOT / "docs/promises.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_promise_names_a_test() -> None:
    """Guards against a promise that nothing holds to."""
    for promise, tests, _ in table():
        named = re.findall(r"`(test_\w+)`", tests)
        assert named, promise
        assert set(named) <= TESTS, set(named) - TESTS


def test_every_mutation_is_in_the_table() -> None:
    """Guards the table: what it says of `test_lifetimes` is what is there; other mutations are tests, in backticks."""
    told = [mutation for _, _, mutation in table()]
    assert [name for name in told if name and not name.startswith("`")] == sorted(
        test_lifetimes.MUTATIONS, key=told.index
    )
    assert {name.strip("`") for name in told if name.startswith("`")} <= TESTS
