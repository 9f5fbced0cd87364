"""Rows of raw bits, poisoned memory and fake markers, for every test module."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import draftgather as dg

POISON = 0xA5
REAL_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
# Conversions that keep every value, as the documentation has them: not taken from the package.
EXACT = {
    torch.uint8: {torch.int16, torch.int32, torch.int64},
    torch.int8: {torch.int16, torch.int32, torch.int64},
    torch.int16: {torch.int32, torch.int64},
    torch.int32: {torch.int64},
    torch.float16: {torch.float32, torch.float64},
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Rows = dict[str, list[torch.Tensor | None]]

# The field lists that the hand-off must serve (needs.md, O12).
FIELD_LISTS = {
    "eagle": dg.eagle_fields(topk=4, hidden_size=24),
    "eagle+seed": (*dg.eagle_fields(topk=1, hidden_size=7), dg.Field("seed", 2048, torch.int32, optional=True)),
    "hidden+mask": (dg.Field("hidden_states", 33, torch.float16), dg.Field("mask", 1, torch.bool)),
    "ids": (dg.Field("topk_index", 3, torch.int64),),
}


def raw(tensor: torch.Tensor) -> Bytes:
    """A copy of a tensor's bytes, [num_rows, row_bytes] or [bytes]."""
    dense = tensor.detach().resolve_neg()
    # As integers, as torch copies a bool of any bits as 0 or 1; cloned, as one element is contiguous at any stride.
    dense = dense.view(_INTEGERS[dense.element_size()]).clone(memory_format=torch.contiguous_format)
    if dense.numel() == 0:
        return np.empty((*dense.shape[:-1], dense.shape[-1] * dense.element_size()), np.uint8)
    return dense.view(torch.uint8).numpy()


def random_row(field: dg.Field, rng: np.random.Generator) -> torch.Tensor:
    """Any bits at all, NaN payloads among them (a bool is 0 or 1)."""
    if field.dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, field.width, np.uint8)).view(torch.bool)
    return torch.from_numpy(rng.integers(0, 256, field.row_bytes, np.uint8)).view(field.dtype)


def random_rows(fields: Sequence[dg.Field], num_rows: int, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    return {field.name: [random_row(field, rng) for _ in range(num_rows)] for field in fields}


def zero_rows(fields: Sequence[dg.Field], num_rows: int) -> Rows:
    return {f.name: [torch.zeros(f.width, dtype=f.dtype) for _ in range(num_rows)] for f in fields}


def row_of(rows: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any]:
    """Row i alone: the keywords of `put`."""
    return {name: given[i] for name, given in rows.items()}


def written_mailbox(fields: Sequence[dg.Field], rows: Rows, num_slots: int) -> dg.DraftMailbox:
    """A mailbox whose slot i holds row i, of owner 100 + i."""
    mailbox = dg.DraftMailbox(fields, num_slots, pin_memory=False)
    for i in range(len(rows[fields[0].name])):
        mailbox.put(i, 100 + i, **row_of(rows, i))
    return mailbox


def stacked(field: dg.Field, rows: Sequence[torch.Tensor | None], num_padded: int) -> Bytes:
    """The dullest expectation: the rows' bytes one below the other, and zeros below them."""
    expected = np.zeros((num_padded, field.row_bytes), np.uint8)
    for i, row in enumerate(rows):
        if row is not None:
            expected[i] = raw(row)
    return expected


def assert_bytes(got: torch.Tensor, expected: Bytes, what: str = "") -> None:
    np.testing.assert_array_equal(raw(got), expected, err_msg=what, strict=True)


def assert_batch(batch: dg.DraftBatch, fields: Sequence[dg.Field], rows: Rows, num_padded: int | None = None) -> None:
    """Row i of every tensor is row i, byte for byte, and the padding rows are zero."""
    num_rows = len(rows[fields[0].name])
    num_padded = num_rows if num_padded is None else num_padded
    assert (batch.num_rows, batch.num_padded) == (num_rows, num_padded)
    assert set(batch.tensors) == {f.name for f in fields if None not in rows[f.name]}
    for field in fields:
        assert batch.present[field.name] == (None not in rows[field.name])
        if field.name in batch.tensors:
            tensor = batch.tensors[field.name]
            assert (tensor.dtype, tensor.shape) == (field.dtype, (num_padded, field.width))
            assert not tensor.requires_grad
            assert_bytes(tensor, stacked(field, rows[field.name], num_padded), field.name)


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(POISON)


def assert_poisoned(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert (raw(tensor) == POISON).all()


def relay_tensors(future_map: dg.FutureMap) -> dict[str, torch.Tensor]:
    """Every buffer of a future map, as [num_slots, width]."""
    return {
        **future_map.buffers,
        **{f"valid {name}": valid[:, None] for name, valid in future_map.valid.items()},
        "seq_lens": future_map.new_seq_lens_buf[:, None],
        "bonus_tokens": future_map.output_tokens_buf[:, None],
    }


def poisoned_map(fields: Sequence[dg.Field], num_slots: int = 32, **settings: Any) -> dg.FutureMap:
    future_map = dg.FutureMap(fields, num_slots, **settings)
    poison(*relay_tensors(future_map).values())
    return future_map


def assert_relayed(
    future_map: dg.FutureMap, indices: Sequence[int], seq_lens: Sequence[int], tokens: Sequence[int], rows: Rows
) -> None:
    """A map that was poisoned holds the rows at `indices`, and is untouched everywhere else, absent rows too."""
    expected = {
        name: np.full((future_map.num_slots, table.shape[1] * table.element_size()), POISON, np.uint8)
        for name, table in relay_tensors(future_map).items()
    }
    got = {name: raw(table) for name, table in relay_tensors(future_map).items()}
    for i, index in enumerate(indices):
        expected["seq_lens"][index] = np.array([seq_lens[i]]).view(np.uint8)
        expected["bonus_tokens"][index] = np.array([tokens[i]]).view(np.uint8)
        for field in future_map.fields:
            row = rows[field.name][i]
            if row is not None:
                expected[field.name][index] = raw(row)
            if field.optional:
                expected[f"valid {field.name}"][index] = row is not None
    for name, table in got.items():
        np.testing.assert_array_equal(table, expected[name], err_msg=name)


class Poisoned:
    """An assembler with fixed outputs, and a future map, all of it poisoned: whatever is written shows."""

    def __init__(self, fields: Sequence[dg.Field], machine: Any, mailbox: dg.DraftMailbox | None = None) -> None:
        self.assembler = dg.DraftAssembler(
            fields, max_batch_size=8, mailbox=mailbox, outputs="fixed", machine=machine, vocab_size=1000
        )
        self.outputs = self.assembler.assemble_rows(pad_to=8, **zero_rows(fields, 1)).tensors
        self.future_map = poisoned_map(fields, machine=machine)
        poison(*self.outputs.values())

    def relay(self, num_rows: int) -> dg.Relay:
        return relay_to(self.future_map, range(1, num_rows + 1))

    def assert_untouched(self) -> None:
        assert_poisoned(*self.outputs.values(), *relay_tensors(self.future_map).values())


def relay_to(future_map: dg.FutureMap, indices: Sequence[int]) -> dg.Relay:
    """A relay with lengths 10, 11, ... and tokens 500, 501, ..."""
    count = torch.arange(len(indices))
    return dg.Relay(future_map, torch.tensor(indices, dtype=torch.int64), 10 + count, 500 + count)


class FakeMarker:
    """A launch that is done when the test says so, and for which nobody may wait."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def wait(self, stream: object = None) -> None:
        raise AssertionError("waited for a launch")


def note_readers(mailbox: dg.DraftMailbox, slots: Sequence[int], marker: Any) -> None:
    """A launch behind `marker` reads `slots`, as an assembler says it."""
    mailbox.end_read(mailbox.begin_read(np.array(slots, np.int64)), marker)


def write_record(
    mailbox: dg.DraftMailbox,
    slot: int,
    owner: int,
    rows: Mapping[str, torch.Tensor | None],
    generation: int | None = None,
    layout_word: int | None = None,
) -> None:
    """What a transfer engine does: whole records written as bytes at address + slot * record_bytes."""
    info, layout = mailbox.buffer_info(), mailbox.layout
    record = np.zeros(info.record_bytes, np.uint8)
    for field, offset in zip(layout.fields, layout.offsets, strict=True):
        row = rows.get(field.name)
        if row is not None:
            record[offset : offset + field.row_bytes] = raw(row)
    present = [rows.get(field.name) is not None for field in layout.fields if field.optional]
    record[layout.tag_offset :] = np.array(
        [
            owner,
            mailbox.generation(slot) if generation is None else generation,
            layout.layout_word(present) if layout_word is None else layout_word,
        ]
    ).view(np.uint8)
    ctypes.memmove(info.address + slot * info.record_bytes, record.ctypes.data, info.record_bytes)


def make_request(rid: object, rows: Mapping[str, Any], tokens: Sequence[int] = (7,), **more: Any) -> SimpleNamespace:
    """A request as sglang's decode node has it after the transfer."""
    return SimpleNamespace(
        rid=rid,
        output_ids=list(tokens),
        output_topk_p=rows.get("topk_p"),
        output_topk_index=rows.get("topk_index"),
        hidden_states_tensor=rows.get("hidden_states"),
        **more,
    )


def make_settings(topk: int = 4, steps: int = 1, multi_layer: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_eagle_topk=topk, speculative_num_steps=steps, enable_multi_layer_eagle=multi_layer
    )
