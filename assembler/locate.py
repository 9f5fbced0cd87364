"""Step 2 of a row's path: where the rows are, and by which route they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from draftgather.errors import Problem, RowDeviceError, raise_problems
from draftgather.fields import Field
from draftgather.kernels.row_tables import FieldSource
from draftgather.machine import Machine
from draftgather.mailbox import DraftMailbox, Int64Array
from draftgather.routes import ROWS_COPIED, ROWS_IN_PLACE, ROWS_ON_HOST, ROWS_STAGED, Route, RouteRule, staged_by_rule


class Located(NamedTuple):
    """Where the checked rows of one batch are."""

    route: Route
    num_rows: int
    sources: tuple[FieldSource, ...]  # one a field
    slots: Int64Array | None  # [b] of the sources' pools; None: separate rows
    present: tuple[np.ndarray[Any, np.dtype[np.bool_]] | None, ...]  # [b] a field; None: every row has it
    all_present: bool  # every field in every row


def locate_slots(mailbox: DraftMailbox, sources: tuple[FieldSource, ...], route: Route, slots: Int64Array) -> Located:
    """Rows that are records of `mailbox`."""
    present: list[np.ndarray[Any, np.dtype[np.bool_]] | None] = [None] * len(mailbox.fields)
    all_present = True
    for row, f in enumerate(mailbox.optional_fields):
        has_field = mailbox.presence[row, slots]
        if not has_field.all():
            present[f], all_present = has_field, False
    return Located(route, len(slots), sources, slots, tuple(present), all_present)


def locate_rows(
    fields: Sequence[Field],
    sources: Sequence[FieldSource],
    is_copied: bool,
    request_ids: Sequence[object] | None,
    machine: Machine,
    rules: Sequence[RouteRule] = (),
) -> Located:
    """Rows that are separate tensors: read in place where the device can read every one of them.

    is_copied: some are copies already, of lists or of rows in several dtypes.
    """
    num_rows = len(sources[0].rows)
    route = ROWS_COPIED if is_copied else ROWS_IN_PLACE if machine.has_kernel else ROWS_ON_HOST
    present: list[np.ndarray[Any, np.dtype[np.bool_]] | None] = [None] * len(fields)
    all_present = True
    for f, field in enumerate(fields):
        if field.optional and any([row is None for row in sources[f].rows]):
            present[f], all_present = np.array([row is not None for row in sources[f].rows]), False
    if machine.has_kernel:
        sources = [s if s.addresses else s._replace(rows=[_dense(row) for row in s.rows]) for s in sources]
        if not all(machine.can_read(row) for source in sources for row in source.rows if row is not None):
            raise_problems(_device_problems(fields, sources, request_ids, machine))
            route = ROWS_STAGED
        elif rules and all(row.is_cpu for source in sources for row in source.rows if row is not None):
            row_bytes = sum([field.row_bytes for field in fields])
            route = staged_by_rule(rules, machine, num_rows, row_bytes) or route
    return Located(route, num_rows, tuple(sources), None, tuple(present), all_present)


def _dense(row: torch.Tensor | None) -> torch.Tensor | None:
    """A row whose elements lie one after the other, as an address alone says nothing of strides."""
    if row is None or (row.is_contiguous() and not row.is_neg()):
        return row
    return row.detach().resolve_neg().contiguous()


def _device_problems(
    fields: Sequence[Field], sources: Sequence[FieldSource], request_ids: Sequence[object] | None, machine: Machine
) -> list[Problem]:
    """Rows on the device, in a batch that has pageable ones: staging them would make the host wait."""
    return [
        Problem(
            i,
            None if request_ids is None else request_ids[i],
            field.name,
            f"is on {row.device}, others of the batch in pageable host memory",
            f"all of a batch on {machine.device} or in pinned memory, or all on the host",
            RowDeviceError,
        )
        for field, source in zip(fields, sources, strict=True)
        for i, row in enumerate(source.rows)
        if isinstance(row, torch.Tensor) and not row.is_cpu
    ]
