"""Requests as they arrive at a decode node: read from a trace, or generated in bursts."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

# Everything above is a broken file, and would only overflow later.
_LARGEST = {"timestamp": 2**53, "input_length": 2**31 - 1, "output_length": 2**31 - 1}
_LONGEST_LINE = 1 << 20

# The generator: quiet spells and bursts take turns (rate a second, mean seconds).
_SPELLS = ((50.0, 1.0), (1500.0, 0.2))
# Lognormal lengths in tokens (median, sigma, most), about those of a conversation workload.
_INPUT_LENGTH = (8000.0, 0.9, 131072)
_OUTPUT_LENGTH = (300.0, 0.7, 2000)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request whose prefill is done."""

    time_ms: float  # since the start of the trace
    input_length: int  # tokens
    output_length: int  # tokens


class TraceError(ValueError):
    """A trace cannot be read. The text is one line that names the file, and the line where there is one."""


def read_trace(path: Path, *, jitter: bool, seed: int) -> list[Arrival]:
    """The requests of a Mooncake trace (JSON lines), in the order of time; equal times in the file's order.

    Other keys than `timestamp` (ms), `input_length` and `output_length` are ignored, and blank lines
    skipped. Lines that are out of order are sorted. jitter: see `spread`. Raises TraceError.
    """
    arrivals, name, number = [], " ".join(str(path).splitlines()), 1
    try:
        with path.open("rb") as file:
            # A bounded read: a file without line ends is not a trace, and need not fit into memory.
            for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
                if line.strip():
                    arrivals.append(_parse(line, f"{name}:{number}"))
                number += line.endswith(b"\n")
    except OSError as error:
        raise TraceError(f"{name}: {error.strerror or error}") from error
    if not arrivals:
        raise TraceError(f"{name}: holds no request")
    arrivals.sort(key=lambda arrival: arrival.time_ms)
    return spread(arrivals, seed) if jitter else arrivals


def spread(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Undo the quantisation of times: equal ones are spread at random up to the next distinct one.

    The last group is spread over the quantum, the smallest gap between distinct times; a trace of
    one single time stays as it is. The order is kept.
    """
    times = sorted({arrival.time_ms for arrival in arrivals})
    gaps = np.diff(times)
    quantum = float(gaps.min()) if len(gaps) else 0.0
    ends = dict(zip(times, [*times[1:], times[-1] + quantum], strict=True))
    rng = np.random.default_rng(seed)
    moved = []
    for start, group in groupby(arrivals, key=lambda arrival: arrival.time_ms):
        alike = list(group)
        # Rounding must not carry a request into the next interval.
        latest = max(start, math.nextafter(ends[start], start))
        offsets = np.sort(rng.random(len(alike))) * (ends[start] - start)
        for arrival, offset in zip(alike, offsets.tolist(), strict=True):
            moved.append(Arrival(min(start + offset, latest), arrival.input_length, arrival.output_length))
    return moved


def generate(num_requests: int, seed: int) -> Iterator[Arrival]:
    """Poisson arrivals whose rate switches between quiet spells and bursts, with lognormal lengths."""
    rng = np.random.default_rng(seed)
    now, spell, spell_end = 0.0, 0, rng.exponential(_SPELLS[0][1])
    for _ in range(num_requests):
        now += rng.exponential(1 / _SPELLS[spell][0])
        # A Poisson process has no memory: the wait starts anew where the rate switches.
        while now > spell_end:
            now, spell = spell_end, 1 - spell
            spell_end = now + rng.exponential(_SPELLS[spell][1])
            now += rng.exponential(1 / _SPELLS[spell][0])
        yield Arrival(now * 1000, _length(rng, *_INPUT_LENGTH), _length(rng, *_OUTPUT_LENGTH))


def _length(rng: np.random.Generator, median: float, sigma: float, most: int) -> int:
    return min(max(round(rng.lognormal(math.log(median), sigma)), 1), most)


def _parse(line: bytes, place: str) -> Arrival:
    if len(line) == _LONGEST_LINE:
        raise TraceError(f"{place}: the line is longer than {_LONGEST_LINE} bytes")
    try:
        request = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TraceError(f"{place}: is not UTF-8 text (byte {error.start} of the line)") from error
    # ValueError: also an integer of more digits than Python converts. RecursionError: nested too deeply.
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{place}: is not JSON ({error})") from error
    if not isinstance(request, dict):
        raise TraceError(f"{place}: is {reprlib.repr(request)}, expected an object")
    missing = [key for key in _LARGEST if key not in request]
    if missing:
        raise TraceError(f"{place}: lacks {', '.join(missing)}")
    for key, largest in _LARGEST.items():
        value = request[key]
        kinds = (int, float) if key == "timestamp" else (int,)
        # NaN fails every comparison; True would pass as the integer 1.
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= largest:
            kind = "a number" if key == "timestamp" else "an integer"
            raise TraceError(f"{place}: {key} is {reprlib.repr(value)}, expected {kind} from 0 to {largest}")
    return Arrival(float(request["timestamp"]), request["input_length"], request["output_length"])
