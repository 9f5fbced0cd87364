"""The mailbox on an sglang decode node: an arriving row goes straight into a record that its request keeps."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from draftgather.builder import REQUEST_ROWS
from draftgather.errors import MailboxFullError
from draftgather.fields import Field
from draftgather.mailbox import DraftMailbox

# A field's buffer in sglang's MetadataBuffers.
_METADATA = {"topk_p": "output_topk_p", "topk_index": "output_topk_index", "hidden_states": "output_hidden_states"}


class Arrived(NamedTuple):
    """One row in its record."""

    slot: int
    owner: int
    rows: dict[str, torch.Tensor]  # views of the record, by the buffers' names

    def instead_of(self, buffers: Any) -> Any:
        """`buffers` for sglang's `get_buf`: its clones of the three draft rows are these views."""
        return _Buffers(buffers, {name: _Row(view) for name, view in self.rows.items()})


class ArrivalMailbox:
    """Draft rows from their arrival until their request object ends.

    A record is its request's: neither the request pool index (freed at retraction) nor the metadata index
    (freed when the row is there) says how long it lives. It is freed when the request object is collected,
    or another row of it arrives, and then not before the last launch that reads it is done.
    """

    def __init__(self, buffers: Any, num_slots: int) -> None:
        """buffers: sglang's MetadataBuffers; records are as wide as its rows, so that every view equals a clone."""
        tensors = {name: getattr(buffers, attribute) for name, attribute in _METADATA.items()}
        self.mailbox = DraftMailbox([Field(n, t.shape[1], t.dtype, exact=True) for n, t in tensors.items()], num_slots)
        # Filled by finalizers, which may run in the midst of anything, the mailbox's own calls among them.
        self._ended: deque[int] = deque()

    def receive(self, buffers: Any, index: int, owner: int) -> Arrived | None:
        """Copy the row of metadata slot `index` into a free record; None where there is none."""
        self.free_ended()
        try:
            slot = self.mailbox.acquire()
        except MailboxFullError:
            return None
        try:
            self.mailbox.put(slot, owner, **{name: getattr(buffers, at)[index] for name, at in _METADATA.items()})
            return Arrived(slot, owner, {at: self.mailbox.view(name)[slot] for name, at in _METADATA.items()})
        except BaseException:
            self.mailbox.release(slot)
            raise

    def settle(self, arrived: Arrived, req: Any) -> bool:
        """Give the record to `req` if it has taken its views, else free it. Whether it has."""
        is_taken = getattr(req, REQUEST_ROWS["hidden_states"], None) is arrived.rows[_METADATA["hidden_states"]]
        if not is_taken:
            self.mailbox.release(arrived.slot)
            return False
        former = getattr(req, "draft_record", None)
        if former is not None:
            former()  # another row of the same request: a rebootstrap
        req.draft_slot, req.draft_owner = arrived.slot, arrived.owner
        req.draft_record = weakref.finalize(req, self._ended.append, arrived.slot)
        # At exit the memory goes with the process.
        req.draft_record.atexit = False
        return True

    def free_ended(self) -> None:
        """Release the records whose requests have ended since."""
        while self._ended:
            self.mailbox.release(self._ended.popleft())


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
