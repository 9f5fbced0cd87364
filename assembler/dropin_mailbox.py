"""The mailbox on an sglang decode node: an arriving row goes straight into a record that its request keeps."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from draftgather.builder import REQUEST_ROWS
from draftgather.errors import MailboxFullError
from draftgather.fields import Field, RecordLayout
from draftgather.mailbox import DraftMailbox

# A field's buffer in sglang's MetadataBuffers.
_METADATA = {"topk_p": "output_topk_p", "topk_index": "output_topk_index", "hidden_states": "output_hidden_states"}


METADATA_WIDTH = 16  # of sglang's top-k rows


def metadata_fields(topk_width: int, hidden_size: int, hidden_dtype: torch.dtype) -> tuple[Field, ...]:
    """The fields of a record: as wide as sglang's metadata rows, so that every view equals a clone."""
    return (
        Field("topk_p", topk_width, torch.float32, exact=True),
        Field("topk_index", topk_width, torch.int64, exact=True),
        Field("hidden_states", hidden_size, hidden_dtype, exact=True),
    )


def describe_size(num_slots: int, hidden_size: int = 7168, hidden_dtype: torch.dtype = torch.bfloat16) -> str:
    """What a mailbox takes, in words."""
    record_bytes = RecordLayout.of(metadata_fields(METADATA_WIDTH, hidden_size, hidden_dtype)).record_bytes
    return (
        f"{num_slots} slots of {record_bytes} bytes (hidden {hidden_size} {hidden_dtype}), "
        f"{num_slots * record_bytes / 2**20:.1f} MiB a rank"
    )


class Arrived(NamedTuple):
    """One row in its record."""

    slot: int
    owner: int
    rows: dict[str, torch.Tensor]  # views of the record, by the buffers' names

    def instead_of(self, buffers: Any) -> Any:
        """`buffers` for sglang's `get_buf`: its clones of the three draft rows are these views."""
        return _Buffers(buffers, {name: _Row(view) for name, view in self.rows.items()})


class _End(weakref.ref[Any]):
    """A request's end, when it comes: which record is free then."""

    __slots__ = ("slot",)
    slot: int


class ArrivalMailbox:
    """Draft rows from their arrival until their request object ends.

    A record is its request's: neither the request pool index (freed at retraction) nor the metadata index
    (freed when the row is there) says how long it lives. It is freed when the request object is collected,
    or another row of it arrives, and then not before the last launch that reads it is done.
    """

    def __init__(self, buffers: Any, num_slots: int) -> None:
        """buffers: sglang's MetadataBuffers. Raises ValueError where its rows are not EAGLE's."""
        self._buffers = tuple([getattr(buffers, attribute) for attribute in _METADATA.values()])
        topk_p, _, hidden = self._buffers
        fields = metadata_fields(topk_p.shape[1], hidden.shape[1], hidden.dtype)
        if any([t.dtype is not f.dtype or not t.is_cpu for t, f in zip(self._buffers, fields, strict=True)]):
            raise ValueError(f"metadata rows are {[(t.dtype, t.device) for t in self._buffers]}, expected {fields}")
        self.mailbox = DraftMailbox(fields, num_slots)
        # Their bytes, and how many a row has.
        self._sources = [
            (memoryview(t.view(torch.uint8).view(-1).numpy()), t.shape[1] * t.itemsize) for t in self._buffers
        ]
        self._num_rows = len(self._buffers[0])
        self._views: dict[Any, dict[str, torch.Tensor]] = {}  # of the slots used so far
        self._ends: dict[Any, _End] = {}  # slot -> its request's
        # Filled by the ends of requests, which come in the midst of anything, the mailbox's own calls among them.
        self._ended: deque[_End] = deque()

    def is_of(self, buffers: Any) -> bool:
        """Whether these are the buffers that rows come from."""
        return all([getattr(buffers, at) is mine for at, mine in zip(_METADATA.values(), self._buffers, strict=True)])

    def receive(self, index: int, owner: int) -> Arrived | None:
        """Copy the row of metadata slot `index` into a free record; None where there is none."""
        self.free_ended()
        if not 0 <= index < self._num_rows:
            raise IndexError(f"metadata slot {index}, expected 0 to {self._num_rows - 1}")
        try:
            rows = [source[index * row_bytes : (index + 1) * row_bytes] for source, row_bytes in self._sources]
            slot = self.mailbox.admit(owner, rows)
        except MailboxFullError:
            return None
        views = self._views.get(slot)
        if views is None:
            views = {_METADATA[f.name]: self.mailbox.view(f.name)[slot] for f in self.mailbox.fields}
            self._views[slot] = views
        return Arrived(slot, owner, views)

    def settle(self, arrived: Arrived | None, req: Any) -> bool:
        """After sglang's commit: `req` keeps the record whose views it has taken, and no other. Whether that is new."""
        hidden = getattr(req, REQUEST_ROWS["hidden_states"], None)
        if arrived is not None and hidden is arrived.rows[_METADATA["hidden_states"]]:
            slot = arrived.slot
            end = _End(req, self._ended.append)
            end.slot = slot
            if getattr(req, "draft_slot", None) is not None:
                self._let_go(req)  # another row of the same request: a rebootstrap
            self._ends[slot] = end
            req.draft_slot, req.draft_owner = slot, arrived.owner
            return True
        if arrived is not None:
            self.mailbox.release(arrived.slot)
        views = self._views.get(getattr(req, "draft_slot", None))
        if views is not None and hidden is not views[_METADATA["hidden_states"]]:
            # It has sglang's clones of another row now, and is not read from its former record.
            self._let_go(req)
            req.draft_slot = req.draft_owner = None
        return False

    def _let_go(self, req: Any) -> None:
        former: Any = getattr(req, "draft_slot", None)
        end = self._ends.get(former)
        if end is not None and end() is req:
            del self._ends[former]
            self.mailbox.release(former)

    def free_ended(self) -> None:
        """Release the records whose requests have ended since."""
        while self._ended:
            slot = self._ended.popleft().slot
            del self._ends[slot]
            self.mailbox.release(slot)


class _Row:
    """What `buffer[index].clone()` gives for an arrived row."""

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    def __getitem__(self, index: object) -> _Row:
        return self

    def clone(self) -> torch.Tensor:
        return self._view


class _Buffers:
    """sglang's MetadataBuffers, three of its buffers put in place of."""

    def __init__(self, buffers: Any, rows: dict[str, _Row]) -> None:
        self.__dict__.update(rows)
        self._buffers = buffers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffers, name)
