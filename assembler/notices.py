"""Log lines that do not flood: once a process, or one a kind in ten seconds."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_logger = logging.getLogger("draftgather")

_noticed: set[str] = set()


def notice_once(text: str, detail: object = None) -> None:
    """Log `text` as a warning, once a process, with what `detail` the first one had."""
    if text not in _noticed:
        _noticed.add(text)
        _logger.warning(text if detail is None else f"{text} ({detail})")


class RateLimit:
    """At most one warning a kind in `seconds`; the next one says how many were left out. Any thread may warn."""

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}
        self.renew_lock()

    def renew_lock(self) -> None:
        """For a forked child: the parent's other threads, one of which may hold the lock, are not in it."""
        # Reentrant: the garbage collector may run a finalizer, and that a warning, inside any call here.
        self._lock = threading.RLock()

    def warn(self, kind: str, text: str, *details: object) -> None:
        """Log `text` with `details` put in as `logging` does. Never raises: no line takes the place of an error."""
        with suppress(Exception):
            left_out = self._left_out_before(kind)
            if left_out is not None:
                more = f" ({left_out} more of this kind left out since the last one)" if left_out else ""
                _logger.warning(f"draftgather: {text}{more}", *details)

    def _left_out_before(self, kind: str) -> int | None:
        """How many lines were left out since the last one; None: leave this one out too."""
        with self._lock:
            now = self._clock()
            if kind in self._last and now - self._last[kind] < self._seconds:
                self._left_out[kind] = self._left_out.get(kind, 0) + 1
                return None
            self._last[kind] = now
            return self._left_out.pop(kind, 0)


WARNINGS = RateLimit()
os.register_at_fork(after_in_child=WARNINGS.renew_lock)

_are_refusals_expected = False


@contextmanager
def refusals_expected() -> Iterator[None]:
    """Inside of this no refusal is told, in the whole process: for programs that inject faults."""
    global _are_refusals_expected
    before, _are_refusals_expected = _are_refusals_expected, True
    try:
        yield
    finally:
        _are_refusals_expected = before


def tell_refusal(call: str, error: Exception) -> None:
    """One line on a refused call: the requests (or slots) that `error` names, and its class's remedy."""
    remedy = getattr(error, "remedy", None)
    if remedy is not None and not _are_refusals_expected:
        kind = type(error).__name__
        WARNINGS.warn(f"{call} {kind}", "%s refused, %s: %s. Remedy: %s", call, kind, error, remedy)
