"""The builders behind `build_disagg_draft_input`: a prebuilt batch's requests in, a draft input out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from draftgather.check import as_int64, slot_problems
from draftgather.draft_assembler import DraftAssembler
from draftgather.draft_batch import DraftBatch
from draftgather.draft_input import CaptureHiddenMode, EagleDraftInput
from draftgather.errors import Problem, RelayError, raise_problems
from draftgather.fields import Field, RecordLayout, eagle_fields
from draftgather.future_map import FutureMap, Relay
from draftgather.machine import as_device
from draftgather.mailbox import DraftMailbox

# A request's attribute for each of EAGLE's fields.
_REQUEST_ROWS = {
    "topk_p": "output_topk_p",
    "topk_index": "output_topk_index",
    "hidden_states": "hidden_states_tensor",
}

_mailbox: DraftMailbox | None = None
# One assembler a configuration, for the life of the process.
_assemblers: dict[tuple[object, ...], DraftAssembler] = {}


def use_mailbox(mailbox: DraftMailbox | None) -> None:
    """Name the mailbox in which a request's `draft_slot` is a slot; None: requests bring their own rows."""
    global _mailbox
    _mailbox = mailbox
    _assemblers.clear()


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
    if batch.enable_overlap and future_map is None:
        raise RelayError("under overlap the rows are relayed, but future_map is None")
    fields = _fields(batch, server_args, future_map)
    device = as_device(batch.device)
    is_fused = batch.enable_overlap and isinstance(future_map, FutureMap)
    relay = Relay(future_map, batch.req_pool_indices, batch.seq_lens, last_tokens_tensor) if is_fused else None
    if batch.reqs:
        rows = _assemble(fields, device, batch.reqs, relay).tensors
    else:
        rows = {f.name: torch.empty((0, f.width), dtype=f.dtype, device=device) for f in fields}
    draft_input = EagleDraftInput(
        topk_p=rows["topk_p"],
        topk_index=rows["topk_index"],
        hidden_states=rows["hidden_states"],
        bonus_tokens=last_tokens_tensor,
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )
    if batch.enable_overlap:
        draft_input.future_indices = batch.req_pool_indices
        if relay is None:
            future_map.publish(draft_input.future_indices, batch.seq_lens)
            future_map.stash(draft_input.future_indices, draft_input)
    return draft_input


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


def _fields(batch: Any, server_args: Any, future_map: Any) -> tuple[Field, ...]:
    """EAGLE's fields as configured now. The future map is the source of truth for the hidden states."""
    steps = server_args.speculative_num_steps if server_args.enable_multi_layer_eagle else 1
    hidden = next((f for f in getattr(future_map, "fields", ()) if f.name == "hidden_states"), None)
    if hidden is None:
        hidden = _hidden_field_of_rows(batch)
    width, dtype = (1, torch.float32) if hidden is None else (hidden.width, hidden.dtype)
    fields = eagle_fields(server_args.speculative_eagle_topk, width, dtype, num_steps=steps)
    casting = {f.name for f in getattr(future_map, "fields", ()) if f.allow_cast}
    return tuple(replace(f, allow_cast=f.name in casting) for f in fields)


def _hidden_field_of_rows(batch: Any) -> Field | None:
    for req in batch.reqs:
        row = getattr(req, "hidden_states_tensor", None)
        if isinstance(row, torch.Tensor) and row.ndim == 1:
            return Field("hidden_states", row.shape[0], row.dtype)
    if _mailbox is not None:
        return next((f for f in _mailbox.fields if f.name == "hidden_states"), None)
    return None


def _assemble(fields: tuple[Field, ...], device: torch.device, reqs: Sequence[Any], relay: Relay | None) -> DraftBatch:
    request_ids = [req.rid for req in reqs]
    slots = [getattr(req, "draft_slot", None) for req in reqs]
    _check_slots(reqs, slots)
    layout = RecordLayout.of(fields)
    if _mailbox is not None and _mailbox.layout.fingerprint == layout.fingerprint and None not in slots:
        assembler = _assembler(fields, device, len(reqs), _mailbox)
        return assembler.assemble_slots(slots, None, request_ids, relay=relay)  # type: ignore[arg-type]
    wide = tuple(replace(f, leading=f.name != "hidden_states") for f in fields)
    assembler = _assembler(wide, device, len(reqs), None)
    rows = {f.name: [_row(f.name, req) for req in reqs] for f in fields}
    assembled = assembler.assemble_rows(request_ids, relay=relay, **rows)  # type: ignore[arg-type]
    if _mailbox is not None:
        # Views of records were read: they are not freed before the launch is done.
        read = [slot for slot in slots if slot is not None]
        _mailbox.note_readers(as_int64(read, "slots"), assembled.done)
    return assembled


def _check_slots(reqs: Sequence[Any], slots: Sequence[int | None]) -> None:
    """Of the requests that have a slot: it is written, and its owner is theirs where they name one."""
    if _mailbox is None:
        return
    problems: list[Problem] = []
    for i, (req, slot) in enumerate(zip(reqs, slots, strict=True)):
        if slot is not None:
            owner = getattr(req, "draft_owner", None)
            owners = None if owner is None else as_int64([owner], "owners")
            found = slot_problems(_mailbox, as_int64([slot], "slots"), owners, [req.rid])
            problems += [replace(problem, position=i) for problem in found]
    raise_problems(problems)


def _row(name: str, req: Any) -> object:
    slot = getattr(req, "draft_slot", None)
    if slot is not None and _mailbox is not None and any(f.name == name for f in _mailbox.fields):
        return _mailbox.row(name, slot)
    return getattr(req, _REQUEST_ROWS[name], None)


def _assembler(
    fields: tuple[Field, ...], device: torch.device, num_rows: int, mailbox: DraftMailbox | None
) -> DraftAssembler:
    max_batch_size = max(512, 1 << (num_rows - 1).bit_length())
    key = (fields, device, max_batch_size, mailbox is not None)
    if key not in _assemblers:
        _assemblers[key] = DraftAssembler(fields, device, max_batch_size, mailbox)
    return _assemblers[key]
