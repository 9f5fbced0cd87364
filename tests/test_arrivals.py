"""Traces and the generator."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgather.bench.arrivals import Arrival, TraceError, generate, read_trace, spread

REAL = Path(__file__).parents[2] / "shared" / "data" / "mooncake_conversation.jsonl"
GOOD = b'{"timestamp": 0, "input_length": 5, "output_length": 2}\n'


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """The real trace where it is at hand, else a small one in its format."""
    if REAL.exists():
        return REAL
    lines = [
        json.dumps({"timestamp": 3000 * (i // 4), "input_length": i + 1, "output_length": 9, "hash_ids": [1]})
        for i in range(40)
    ]
    return write(tmp_path / "trace.jsonl", "\n".join(lines).encode())


def test_a_trace_is_read_and_sorted(tmp_path: Path) -> None:
    """Guards against a request lost, or handed on before its time."""
    path = write(
        tmp_path / "t",
        b'{"timestamp": 7.5, "input_length": 1, "output_length": 2, "hash_ids": [1, 2]}\n',
        b"\n",
        b'{"timestamp": 3, "input_length": 0, "output_length": 0}',
    )
    assert read_trace(path, jitter=False, seed=0) == [Arrival(3.0, 0, 0), Arrival(7.5, 1, 2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"nonsense", "is not JSON"),
        (b'{"timestamp": 0', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"timestamp": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"\x00\x01\x02", "is not JSON"),
        (b"[1, 2]", "expected an object"),
        (b"null", "expected an object"),
        (b'{"timestamp": 0, "input_length": 1}', "lacks output_length"),
        (b"{}", "lacks timestamp, input_length, output_length"),
        (b'{"timestamp": true, "input_length": 1, "output_length": 1}', "timestamp is True"),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp is nan"),
        (b'{"timestamp": Infinity, "input_length": 1, "output_length": 1}', "timestamp is inf"),
        (b'{"timestamp": -1, "input_length": 1, "output_length": 1}', "timestamp is -1"),
        (b'{"timestamp": "0", "input_length": 1, "output_length": 1}', "timestamp is '0'"),
        (b'{"timestamp": 0, "input_length": 1.5, "output_length": 1}', "input_length is 1.5"),
        (b'{"timestamp": 0, "input_length": -1, "output_length": 1}', "input_length is -1"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": null}', "output_length is None"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 1e400}', "output_length is inf"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 9999999999999}', "expected an integer from 0 to"),
        (b'{"hash_ids": [' + b"1, " * (1 << 19), "longer than"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    """Guards against a traceback, a row of many lines, and a wrong line number."""
    path = write(tmp_path / "bad.jsonl", GOOD, b"\n", line)
    with pytest.raises(TraceError) as caught:
        read_trace(path, jitter=True, seed=0)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(tmp_path: Path, garbage: bytes) -> None:
    """Guards against a traceback, whatever the file."""
    path = write(tmp_path / "t", garbage)
    with pytest.raises(TraceError, match=r"holds no request|is not|expected|lacks"):
        read_trace(path, jitter=True, seed=0)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", write(tmp_path / "empty"), write(tmp_path / "blank", b"\n \n")):
        with pytest.raises(TraceError) as caught:
            read_trace(path, jitter=True, seed=0)
        assert str(caught.value).startswith(f"{path}: ")


def test_jitter_by_hand() -> None:
    """A group stays in front of the next time; the last one within the quantum, the smallest gap."""
    arrivals = [Arrival(t, i, 1) for i, t in enumerate((0.0, 0.0, 0.0, 30.0, 40.0, 40.0))]
    moved = spread(arrivals, seed=1)
    assert [a.input_length for a in moved] == [0, 1, 2, 3, 4, 5]
    times = [a.time_ms for a in moved]
    assert 0 < times[0] < times[1] < times[2] < 30 <= times[3] < 40 <= times[4] < times[5] < 50
    assert spread([Arrival(5.0, 1, 1)] * 3, seed=1) == [Arrival(5.0, 1, 1)] * 3


def test_jitter_of_a_trace(trace: Path) -> None:
    """Guards against requests that change their order, leave their interval or get lost."""
    plain = read_trace(trace, jitter=False, seed=3)
    moved = read_trace(trace, jitter=True, seed=3)
    ends = {a.time_ms: b.time_ms for a, b in pairwise(plain) if b.time_ms > a.time_ms}
    assert [(a.input_length, a.output_length) for a in moved] == [(a.input_length, a.output_length) for a in plain]
    assert all(a.time_ms <= b.time_ms for a, b in pairwise(moved))
    for before, after in zip(plain, moved, strict=True):
        assert before.time_ms <= after.time_ms < ends.get(before.time_ms, before.time_ms + 3500)
    assert len({a.time_ms for a in moved}) > 0.99 * len(moved)
    assert moved == read_trace(trace, jitter=True, seed=3) != read_trace(trace, jitter=True, seed=4)


@given(st.lists(st.floats(0, 2**53), min_size=1, max_size=20), st.integers(0, 2**32))
def test_jitter_of_any_times(times: list[float], seed: int) -> None:
    """Guards against rounding that carries a request past the next one."""
    arrivals = [Arrival(time, 1, 1) for time in sorted(times * 2)]
    moved = spread(arrivals, seed)
    assert all(a.time_ms <= b.time_ms for a, b in pairwise(moved))
    following = sorted(set(times))[1:]
    for before, after in zip(arrivals, moved, strict=True):
        end = next((time for time in following if time > before.time_ms), float("inf"))
        assert before.time_ms <= after.time_ms < end


def test_the_generator() -> None:
    """Guards against lengths out of range, a seed without effect, and arrivals without bursts."""
    arrivals = list(generate(3000, 7))
    assert arrivals == list(generate(3000, 7)) != list(generate(3000, 8))
    assert list(generate(10, 7)) == arrivals[:10]
    gaps = [b.time_ms - a.time_ms for a, b in pairwise(arrivals)]
    assert min(gaps) >= 0
    assert sum(gap < 2 for gap in gaps) > 0.5 * len(gaps)
    assert max(gaps) > 40
    assert all(1 <= a.input_length <= 131072 and 1 <= a.output_length <= 2000 for a in arrivals)
