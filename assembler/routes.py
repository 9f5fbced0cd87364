"""By which route rows come, and why.

Mostly there is no choice: what the device cannot read is copied, what lies on it is not. Rows in pinned host
memory can be read in place or be copied (one host copy a field, one upload); a table of measured rules says when
copying is quicker. It is empty until something is measured: reading in place needs no work of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftgather.machine import Machine


class Route(str):
    """How the rows of a batch came, "slots", "pointers", "staged" or "empty"; `reason` says why."""

    __slots__ = ("is_uploaded", "reason")
    reason: str
    is_uploaded: bool  # staged rows: to the device, even where it could read the staging buffer

    def __new__(cls, name: str, reason: str, is_uploaded: bool = False) -> Route:
        route = super().__new__(cls, name)
        route.reason, route.is_uploaded = reason, is_uploaded
        return route


class RouteRule(NamedTuple):
    """From so many rows on, of so many bytes at least, pinned rows are copied rather than read in place."""

    device_class: str  # what the device's name contains, such as "H200"; "" is any
    min_rows: int
    min_row_bytes: int  # all fields of a row
    measured: str  # where and how, for whoever reads the reason


# Nothing is measured yet (bench/RESULTS.md), so nothing is claimed.
DEFAULT_RULES: tuple[RouteRule, ...] = ()

SLOTS_ON_HOST = Route("slots", "the CPU reads records where they are")
SLOTS_IN_PLACE = Route("slots", "the device reads records where they are, and no rule says that copies are quicker")
RECORDS_STAGED = Route("staged", "the device cannot read the mailbox's memory in place")
ROWS_ON_HOST = Route("pointers", "the CPU reads rows where they are")
ROWS_IN_PLACE = Route("pointers", "the device reads each row where it is, and no rule says that copies are quicker")
ROWS_COPIED = Route("staged", "lists, or rows of several dtypes or widths: they were copied for that already")
ROWS_STAGED = Route("staged", "rows in memory that the device cannot read in place")
EMPTY = Route("empty", "no rows")


def staged_by_rule(rules: Sequence[RouteRule], machine: Machine, num_rows: int, row_bytes: int) -> Route | None:
    """The route of pinned rows by the first rule that applies; None: in place."""
    for rule in rules:
        if rule.device_class in machine.name and num_rows >= rule.min_rows and row_bytes >= rule.min_row_bytes:
            reason = f"copies of {rule.min_rows} rows or more are quicker here ({rule.measured})"
            return Route("staged", reason, is_uploaded=True)
    return None
