"""Completion markers: when is the work that reads or writes this memory done?"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import torch


class CompletionMarker(Protocol):
    """Answers for one launch; never blocks the host."""

    def query(self) -> bool:
        """True once the launch has finished."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` (default: the current one) wait on the device; the host goes on."""


class _Done:
    """The marker of work that was finished before the call returned (the CPU)."""

    def query(self) -> bool:
        return True

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        return

    def __repr__(self) -> str:
        return "done"


DONE: CompletionMarker = _Done()


class EventMarker:
    """A CUDA event of our own, recorded once on the current stream of `device`, never again."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(self._stream)

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event.wait(stream)


def mark(device: torch.device) -> CompletionMarker:
    """A marker behind everything that the current stream of `device` holds by now."""
    return EventMarker(device) if device.type == "cuda" else DONE


class InFlight:
    """What launches read or write by address until they are done, and no allocator knows of: kept here.

    One a process, not one an assembler: an assembler may be dropped while its launches are in flight.
    """

    # So many entries behind one that is not done are looked through: streams end in any order.
    _MANY = 64

    def __init__(self) -> None:
        self._held: deque[tuple[CompletionMarker, object]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, marker: CompletionMarker, held: object) -> None:
        """Keep `held` until `marker` is done; then drop it, at a later call."""
        dropped: list[object] = []  # after the lock: what ends with it may come back here
        with self._lock:
            while self._held and self._held[0][0].query():
                dropped.append(self._held.popleft())
            if len(self._held) >= self._MANY:
                waiting: deque[tuple[CompletionMarker, object]] = deque()
                for entry in self._held:
                    (dropped if entry[0].query() else waiting).append(entry)
                self._held = waiting
            self._held.append((marker, held))


IN_FLIGHT = InFlight()
