"""Named ranges for a profiler: off until asked for, and then put around the calls themselves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.profiler import record_function

from draftgather.draft_assembler import DraftAssembler
from draftgather.future_map import FutureMap
from draftgather.mailbox import DraftMailbox

_CALLS: dict[type, tuple[str, ...]] = {
    DraftAssembler: ("assemble_slots", "assemble_rows"),
    FutureMap: ("publish", "stash", "resolve"),
    DraftMailbox: ("put", "accept"),
}

_lock = threading.Lock()
_num_users = 0
_originals: dict[tuple[type, str], Any] = {}


@contextmanager
def profile_ranges() -> Iterator[None]:
    """Inside of this, each call is a range "draftgather.assemble_slots" (and so on) of torch's profiler.

    For the whole process, all threads; `DRAFTGATHER_PROFILE_RANGES=1`, read at import, is the same for its whole
    life. Outside of it the methods are the plain ones. One that was taken from its object before stays what it was.
    """
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _num_users
    with _lock:
        _num_users += 1
        if _num_users == 1:
            for owner, names in _CALLS.items():
                for name in names:
                    _originals[owner, name] = vars(owner)[name]
                    setattr(owner, name, _ranged(f"draftgather.{name}", vars(owner)[name]))


def _end() -> None:
    global _num_users
    with _lock:
        _num_users -= 1
        if _num_users == 0:
            for (owner, name), original in _originals.items():
                setattr(owner, name, original)
            _originals.clear()


def _ranged(range_name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(range_name):
            return call(*args, **kwargs)

    return ranged


if os.environ.get("DRAFTGATHER_PROFILE_RANGES") == "1":
    _begin()
