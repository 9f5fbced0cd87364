"""The builders behind `build_disagg_draft_input`: a prebuilt batch's requests in, a draft input out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from draftgather.check import as_int64, check_relay, slot_problems
from draftgather.completion import DONE
from draftgather.draft_assembler import DraftAssembler
from draftgather.draft_batch import DraftBatch
from draftgather.draft_input import CaptureHiddenMode, EagleDraftInput
from draftgather.errors import Problem, RelayError, raise_problems, shown
from draftgather.fields import Field, check_fields, eagle_fields
from draftgather.future_map import FutureMap, Relay
from draftgather.machine import as_device
from draftgather.mailbox import DraftMailbox

# Works on one field's assembled rows [b, width], in the batch's order; gives rows of that shape, dtype and device.
PostGather = Callable[[torch.Tensor, Any], torch.Tensor]

# A request's attribute for each of EAGLE's fields; of any other field, the attribute of its name.
REQUEST_ROWS = {
    "topk_p": "output_topk_p",
    "topk_index": "output_topk_index",
    "hidden_states": "hidden_states_tensor",
}

# What an assembler is first made for; a larger batch makes it anew.
_MAX_BATCH_SIZE = 512

_mailbox: DraftMailbox | None = None


def use_mailbox(mailbox: DraftMailbox | None) -> None:
    """Name the mailbox in which a request's `draft_slot` is a slot; None: requests bring their own rows."""
    global _mailbox
    _mailbox = mailbox
    eagle_rows.cache_clear()
    request_rows.cache_clear()


def build_eagle_disagg_draft_input(
    batch: Any, server_args: Any, last_tokens_tensor: torch.Tensor, future_map: Any
) -> EagleDraftInput:
    """The draft input of an EAGLE batch whose KV came from prefill.

    batch: `reqs`, `device`, `enable_overlap`, `req_pool_indices` [b], `seq_lens` [b]. A request: `rid`,
    `output_topk_p`, `output_topk_index` (topk * steps wide or wider), `hidden_states_tensor`; or
    `draft_slot`, a slot of the mailbox given to `use_mailbox`, with `draft_owner` where the owner is to
    be checked. server_args: `speculative_eagle_topk`, `enable_multi_layer_eagle`,
    `speculative_num_steps`, read at each call. last_tokens_tensor: [b], the bonus tokens.

    Width and dtype of the hidden states are the future map's (only without one, and then outside
    overlap, the first row's). Under overlap sequence lengths are published and the rows stashed: in
    the same launch into a draftgather.FutureMap, by its own publish and stash into any other. Outside
    overlap the future map is not touched. Raises DraftRowError before anything is written.
    """
    _check_map(batch, future_map)
    return _build(batch, last_tokens_tensor, future_map, _configured_rows(batch, server_args, future_map))


def build_disagg_draft_input(
    batch: Any,
    last_tokens_tensor: torch.Tensor,
    future_map: Any,
    fields: Sequence[Field],
    attributes: Mapping[str, str] | None = None,
    *,
    post_gather: Mapping[str, PostGather] | None = None,
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
) -> EagleDraftInput:
    """The draft input of an algorithm of your own, whose draft rows have any `fields`.

    batch, last_tokens_tensor, future_map: as for `build_eagle_disagg_draft_input`. attributes: the attribute of a
    request that holds its row, a field name each; of fields that are not named, EAGLE's own or the field's name. A
    request with `draft_slot` brings its row in the mailbox given to `use_mailbox`.

    An optional field that some request lacks is None in the draft input, and `present` says so. Fields beyond EAGLE's
    three are in `extras`.

    post_gather: a function (rows [b, width], batch) for a field, called on the assembled rows of a batch in which every
    request has it, before anything is relayed; it gives the rows to use. It may not read the device on the host: what
    cannot be used is blanked by tensor operations. A batch with such a field is relayed by publish and stash, after it,
    and a request without the field makes the whole batch go on without it.

    Raises DraftRowError, RelayError or, for a `post_gather` that gives other rows than it may, ValueError, before
    anything is written.
    """
    _check_map(batch, future_map)
    fields, hooks = check_fields(fields), dict(post_gather or {})
    named = {f.name: REQUEST_ROWS.get(f.name, f.name) for f in fields} | dict(attributes or {})
    unknown = sorted((named.keys() | hooks.keys()) - {f.name for f in fields})
    if unknown:
        raise ValueError(f"attributes or post_gather name {unknown}, but the fields are {[f.name for f in fields]}")
    rows = request_rows(fields, tuple(named.items()), as_device(batch.device), _mailbox)
    return _build(batch, last_tokens_tensor, future_map, rows, hooks, capture_hidden_mode)


def build_bonus_disagg_draft_input(batch: Any, last_tokens_tensor: torch.Tensor, future_map: Any) -> EagleDraftInput:
    """The draft input of an algorithm that hands over bonus tokens and sequence lengths only (DFLASH).

    The future map must be one without required fields: FutureMap((), num_slots).
    """
    draft_input = EagleDraftInput(bonus_tokens=last_tokens_tensor, capture_hidden_mode=CaptureHiddenMode.NULL)
    if batch.enable_overlap:
        draft_input.future_indices = batch.req_pool_indices
        future_map.publish(draft_input.future_indices, batch.seq_lens)
        future_map.stash(draft_input.future_indices, draft_input)
    return draft_input


def _check_map(batch: Any, future_map: Any) -> None:
    if batch.enable_overlap and future_map is None:
        raise RelayError("under overlap the rows are relayed, but future_map is None")


def _build(
    batch: Any,
    last_tokens_tensor: torch.Tensor,
    future_map: Any,
    rows: RequestRows,
    post_gather: Mapping[str, PostGather] | None = None,
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
) -> EagleDraftInput:
    """Gather, and under overlap publish and stash: in the launch where the map is ours and nothing comes between."""
    relay = None
    if batch.enable_overlap and isinstance(future_map, FutureMap):
        relay = Relay(future_map, batch.req_pool_indices, batch.seq_lens, last_tokens_tensor)
    if relay is not None and post_gather:
        # Publish comes before stash, so what stash would refuse is refused here.
        future_map.tables_for(rows.fields)
        check_relay(relay, len(batch.reqs), rows.device)
    is_fused = relay is not None and not post_gather
    tensors = dict(rows.assemble(batch.reqs, relay if is_fused else None))
    for name, hook in (post_gather or {}).items():
        if batch.reqs and name in tensors:
            tensors[name] = _hooked(name, tensors[name], hook(tensors[name], batch))
    draft_input = EagleDraftInput(bonus_tokens=last_tokens_tensor, capture_hidden_mode=capture_hidden_mode)
    for name, tensor in tensors.items():
        draft_input.set_rows(name, tensor)
    draft_input.present = {f.name: f.name in tensors for f in rows.fields if f.optional}
    if batch.enable_overlap:
        draft_input.future_indices = batch.req_pool_indices
        if not is_fused:
            future_map.publish(draft_input.future_indices, batch.seq_lens)
            future_map.stash(draft_input.future_indices, draft_input)
    return draft_input


def _hooked(name: str, given: torch.Tensor, rows: object) -> torch.Tensor:
    expected = (given.shape, given.dtype, given.device)
    if not isinstance(rows, torch.Tensor) or (rows.shape, rows.dtype, rows.device) != expected:
        got = f"{list(rows.shape)} {rows.dtype} on {rows.device}" if isinstance(rows, torch.Tensor) else shown(rows)
        raise ValueError(
            f"post_gather of {name} gave {got}, expected {list(given.shape)} {given.dtype} on {given.device}"
        )
    return rows


class RequestRows:
    """The draft rows of requests in one configuration, on one device, and the assemblers for them.

    attributes: of every field the attribute of a request that holds its row.
    """

    def __init__(
        self,
        fields: tuple[Field, ...],
        attributes: Mapping[str, str],
        device: torch.device,
        mailbox: DraftMailbox | None,
    ) -> None:
        self.fields = fields
        self.device = device
        self._attributes = attributes
        self._mailbox = mailbox
        self._by_row = DraftAssembler(fields, device, _MAX_BATCH_SIZE)
        self._by_slot: DraftAssembler | None = None
        with suppress(ValueError):  # records of other fields: requests are asked for their own rows
            if mailbox is not None:
                self._by_slot = DraftAssembler(fields, device, _MAX_BATCH_SIZE, mailbox)

    def assemble(self, reqs: Sequence[Any], relay: Relay | None) -> Mapping[str, torch.Tensor]:
        """The tensors [b, width] a field: row i is that of reqs[i]. An optional field that some lack is left out.

        Raises DraftRowError, naming requests, before anything is written.
        """
        if not reqs:
            return {f.name: torch.empty((0, f.width), dtype=f.dtype, device=self.device) for f in self.fields}
        if len(reqs) > self._by_row.max_batch_size:
            self._grow(_power_of_two(len(reqs)))
        if self._mailbox is not None:
            return self._assemble_slots(self._mailbox, reqs, [req.rid for req in reqs], relay).tensors
        rows: dict[str, Any] = {
            name: [getattr(req, attribute, None) for req in reqs] for name, attribute in self._attributes.items()
        }
        # Nothing is relayed, and no slot is read that waits for the launch.
        tensors = self._by_row.stacked(rows) if relay is None else None
        return tensors or self._by_row.assemble_rows([req.rid for req in reqs], relay=relay, **rows).tensors

    def _assemble_slots(
        self, mailbox: DraftMailbox, reqs: Sequence[Any], request_ids: Sequence[object], relay: Relay | None
    ) -> DraftBatch:
        """Records of the mailbox where every request has one, and all or none name an owner; else views, and rows."""
        slots = [getattr(req, "draft_slot", None) for req in reqs]
        if self._by_slot is not None and None not in slots:
            owners = [getattr(req, "draft_owner", None) for req in reqs]
            if owners.count(None) in (0, len(owners)):
                given = None if None in owners else owners
                return self._by_slot.assemble_slots(slots, given, request_ids, relay=relay)  # type: ignore[arg-type]
        # Records are looked at, and perhaps read as views: they are not freed before the launch is done.
        read, done = mailbox.begin_read(as_int64([slot for slot in slots if slot is not None], "slots")), DONE
        try:
            _check_slots(mailbox, reqs, slots)
            rows = {f.name: [self._row(f.name, req, mailbox) for req in reqs] for f in self.fields}
            assembled = self._by_row.assemble_rows(request_ids, relay=relay, **rows)  # type: ignore[arg-type]
            done = assembled.done
        finally:
            mailbox.end_read(read, done)
        return assembled

    def _row(self, name: str, req: Any, mailbox: DraftMailbox) -> object:
        slot = getattr(req, "draft_slot", None)
        if slot is not None and any(f.name == name for f in mailbox.fields):
            return mailbox.row(name, slot)
        return getattr(req, self._attributes[name], None)

    def _grow(self, max_batch_size: int) -> None:
        self._by_row = DraftAssembler(self.fields, self.device, max_batch_size)
        if self._by_slot is not None:
            self._by_slot = DraftAssembler(self.fields, self.device, max_batch_size, self._by_slot.mailbox)


@lru_cache(maxsize=64)
def eagle_rows(
    topk: int,
    num_steps: int,
    hidden_size: int,
    hidden_dtype: torch.dtype,
    device: torch.device,
    casting: frozenset[str] = frozenset(),
    exact: bool = False,
    mailbox: DraftMailbox | None = None,
) -> RequestRows:
    """The rows of one EAGLE configuration, made once. casting: names of the fields that may be cast; exact: none is.

    mailbox: where a request's `draft_slot` is a slot.
    """
    fields = eagle_fields(topk, hidden_size, hidden_dtype, num_steps=num_steps)
    fields = tuple(replace(f, allow_cast=f.name in casting, exact=exact) for f in fields)
    return RequestRows(as_metadata(fields), REQUEST_ROWS, device, mailbox)


@lru_cache(maxsize=64)
def request_rows(
    fields: tuple[Field, ...],
    attributes: tuple[tuple[str, str], ...],
    device: torch.device,
    mailbox: DraftMailbox | None = None,
) -> RequestRows:
    """The rows of any fields, made once a configuration."""
    return RequestRows(fields, dict(attributes), device, mailbox)


def as_metadata(fields: Sequence[Field]) -> tuple[Field, ...]:
    """The same fields of metadata rows, which hold more states than are asked for."""
    return tuple(replace(f, leading=True) if f.name in ("topk_p", "topk_index") else f for f in fields)


def _power_of_two(number: int) -> int:
    """The next one that is not below."""
    return 1 << max(number - 1, 0).bit_length()


def _configured_rows(batch: Any, server_args: Any, future_map: Any) -> RequestRows:
    """As configured now. The future map is the source of truth for the hidden states."""
    steps = server_args.speculative_num_steps if server_args.enable_multi_layer_eagle else 1
    relayed: Sequence[Field] = getattr(future_map, "fields", ())
    hidden = next((f for f in relayed if f.name == "hidden_states"), None)
    if hidden is None:
        hidden = _hidden_field_of_rows(batch)
    width, dtype = (1, torch.float32) if hidden is None else (hidden.width, hidden.dtype)
    casting = frozenset([f.name for f in relayed if f.allow_cast])
    device = as_device(batch.device)
    return eagle_rows(server_args.speculative_eagle_topk, steps, width, dtype, device, casting, mailbox=_mailbox)


def _hidden_field_of_rows(batch: Any) -> Field | None:
    for req in batch.reqs:
        row = getattr(req, "hidden_states_tensor", None)
        if isinstance(row, torch.Tensor) and row.ndim == 1:
            return Field("hidden_states", row.shape[0], row.dtype)
    if _mailbox is not None:
        return next((f for f in _mailbox.fields if f.name == "hidden_states"), None)
    return None


def _check_slots(mailbox: DraftMailbox, reqs: Sequence[Any], slots: Sequence[int | None]) -> None:
    """Of the requests that have a slot: it is written, and its owner is theirs where they name one."""
    problems: list[Problem] = []
    for i, (req, slot) in enumerate(zip(reqs, slots, strict=True)):
        if slot is not None:
            owner = getattr(req, "draft_owner", None)
            owners = None if owner is None else as_int64([owner], "owners")
            found = slot_problems(mailbox, as_int64([slot], "slots"), owners, [req.rid])
            problems += [replace(problem, position=i) for problem in found]
    raise_problems(problems)
