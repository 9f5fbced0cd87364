"""The writer's side of a transfer: packed records are byte for byte what `put` writes, and bad input packs nothing."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

import draftgather as dg
from draftgather import records as records_module
from helpers import Bytes, assert_bytes, random_rows, row_of, stacked

FIELDS = (*dg.eagle_fields(topk=4, hidden_size=24), dg.Field("seed", 5, torch.int32, optional=True))
NUM_SLOTS = 4


def row(seed: int = 0, **changed: object) -> dict[str, object]:
    return {**row_of(random_rows(FIELDS, 1, seed), 0), **changed}


def bytes_at(address: int, num_bytes: int) -> Bytes:
    return np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8)


@pytest.fixture
def mailbox() -> dg.DraftMailbox:
    return dg.DraftMailbox(FIELDS, NUM_SLOTS, pin_memory=False)


@pytest.fixture
def writer() -> dg.RecordWriter:
    return dg.RecordWriter(FIELDS, 2, pin_memory=False)


def land(writer: dg.RecordWriter, index: int, address: dg.MailboxAddress, slot: int) -> None:
    """What the engine does."""
    ctypes.memmove(address.record(slot), writer.address_of(index), address.record_bytes)


# -- packing


@pytest.mark.parametrize("absent", [(), ("seed",)])
def test_a_packed_record_is_what_put_writes(
    mailbox: dg.DraftMailbox, writer: dg.RecordWriter, absent: tuple[str, ...]
) -> None:
    """Guards the two sides of a transfer: rows, owner, generation and layout word at the same bytes."""
    rows = {name: value for name, value in row().items() if name not in absent}
    mailbox.put(2, -5, **rows)
    writer.pack(1, -5, mailbox.generation(2), **rows)
    record_bytes = mailbox.layout.record_bytes
    expected = bytes_at(dg.MailboxAddress.of(mailbox).record(2), record_bytes)
    np.testing.assert_array_equal(bytes_at(writer.address_of(1), record_bytes), expected)
    assert not bytes_at(writer.address_of(0), record_bytes).any()


@pytest.mark.parametrize("owner", [0, 7, -(1 << 63), (1 << 63) - 1])
def test_a_landed_record_is_accepted_and_assembled(
    mailbox: dg.DraftMailbox, writer: dg.RecordWriter, owner: int
) -> None:
    """Guards the whole way of a row over a wire, for any owner."""
    slot, address, rows = mailbox.acquire(), dg.MailboxAddress.of(mailbox), row()
    writer.check(address)
    writer.pack(0, owner, mailbox.generation(slot), **rows)
    land(writer, 0, address, slot)
    mailbox.accept([slot], [owner])
    batch = dg.DraftAssembler(FIELDS, mailbox=mailbox).assemble_slots([slot], owners=[owner])
    for field in FIELDS:
        assert_bytes(batch.tensors[field.name], stacked(field, [rows[field.name]], 1))  # type: ignore[list-item]


def test_rows_are_taken_as_put_takes_them(mailbox: dg.DraftMailbox, writer: dg.RecordWriter) -> None:
    """Guards against two rules for rows: lists, strided rows, exact conversions."""
    rows = row(topk_p=[0.5, 0.25, 0.0, 1.0], topk_index=torch.arange(8, dtype=torch.int32)[::2])
    mailbox.put(0, 1, **rows)
    writer.pack(0, 1, 1, **rows)
    record_bytes = mailbox.layout.record_bytes
    expected = bytes_at(dg.MailboxAddress.of(mailbox).record(0), record_bytes)
    np.testing.assert_array_equal(bytes_at(writer.address_of(0), record_bytes), expected)


BAD = {
    "index": (lambda: {"index": 2}, dg.SlotError, "record is 2, expected an integer from 0 to 1"),
    "negative index": (lambda: {"index": -1}, dg.SlotError, "record is -1"),
    "bool index": (lambda: {"index": True}, dg.SlotError, "record is True"),
    "owner": (lambda: {"owner": 1 << 63}, ValueError, "owner is 9223372036854775808, expected a 64-bit integer"),
    "generation 0": (lambda: {"generation": 0}, ValueError, "generation is 0, expected an integer from 1"),
    "generation": (lambda: {"generation": 1.5}, ValueError, r"generation is 1\.5"),
    "unknown field": (lambda: row(other=[1]), ValueError, "other"),
    "missing": (lambda: row(hidden_states=None), dg.MissingRowError, "'record 0': hidden_states is missing"),
    "width": (lambda: row(topk_p=torch.rand(5)), dg.RowShapeError, "'record 0': topk_p"),
    "dtype": (lambda: row(hidden_states=torch.rand(24)), dg.RowDtypeError, "'record 0': hidden_states"),
    "device": (lambda: row(topk_p=torch.rand(4, device="meta")), dg.RowDeviceError, "'record 0': topk_p"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_packs_nothing(writer: dg.RecordWriter, case: str) -> None:
    """Guards a record that is being sent: what is refused changes no byte of it."""
    make: Callable[[], dict[str, object]]
    make, error, words = BAD[case]
    writer.pack(0, 9, 3, **row(1))
    before = bytes_at(writer.address_of(0), writer.buffer_info().num_bytes)
    given = {"index": 0, "owner": 1, "generation": 1, **row(2), **make()}
    index, owner, generation = (given.pop(name) for name in ("index", "owner", "generation"))
    with pytest.raises(error, match=words):
        writer.pack(index, owner, generation, **given)  # type: ignore[arg-type]
    np.testing.assert_array_equal(bytes_at(writer.address_of(0), writer.buffer_info().num_bytes), before)


def test_the_tag_is_written_last(writer: dg.RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a half-packed record under a whole tag, the former row's above all: an engine may read early."""
    writer.pack(0, 9, 3, **row(1))
    tag_at, tags = writer.address_of(0) + writer.layout.tag_offset, []

    def moved(*arguments: int) -> None:
        tags.append(bytes_at(tag_at, 24).any())

    monkeypatch.setattr(records_module, "_memmove", moved)
    writer.pack(0, 10, 4, **row(2))
    assert tags == [False] * len(FIELDS)
    assert bytes_at(tag_at, 24).view(np.int64).tolist()[:2] == [10, 4]


@pytest.mark.parametrize("num_records", [0, -1, 1.5, True])
def test_number_of_records(num_records: object) -> None:
    """Guards an empty writer, or a number that is none."""
    with pytest.raises(ValueError, match="num_records is"):
        dg.RecordWriter(FIELDS, num_records, pin_memory=False)  # type: ignore[arg-type]


# -- where the records lie


def test_an_address_goes_over_the_wire(mailbox: dg.DraftMailbox) -> None:
    """Guards the connection: what is sent is what was told, and records lie where the mailbox has them."""
    address = dg.MailboxAddress.of(mailbox)
    assert dg.MailboxAddress.from_json(address.to_json()) == address
    info = mailbox.buffer_info()
    assert [address.record(slot) - info.address for slot in range(2)] == [0, info.record_bytes]
    assert address.record(NUM_SLOTS - 1) + info.record_bytes == info.address + info.num_bytes


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS, True, 1.0, None])
def test_a_slot_that_is_none(mailbox: dg.DraftMailbox, slot: object) -> None:
    """Guards the memory beside the mailbox: an address is given for its own slots only."""
    with pytest.raises(dg.SlotError, match=r"slot is .*, expected an integer from 0 to 3"):
        dg.MailboxAddress.of(mailbox).record(slot)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [FIELDS[:3], (*FIELDS[:3], dg.Field("seed", 5, torch.int32)), dg.eagle_fields(topk=4, hidden_size=25)],
    ids=["fewer", "not optional", "wider"],
)
def test_another_field_list_is_refused(mailbox: dg.DraftMailbox, fields: tuple[dg.Field, ...]) -> None:
    """Guards against a peer that packs other records: told at connection, before the first byte."""
    with pytest.raises(dg.LayoutError, match="the peer's records have the layout"):
        dg.RecordWriter(fields, 1, pin_memory=False).check(dg.MailboxAddress.of(mailbox))


def test_another_record_size_is_refused(mailbox: dg.DraftMailbox, writer: dg.RecordWriter) -> None:
    """Guards against a peer that lays the same fields out otherwise."""
    told = json.loads(dg.MailboxAddress.of(mailbox).to_json())
    other = dg.MailboxAddress(**{**told, "record_bytes": told["record_bytes"] + 128})
    with pytest.raises(dg.LayoutError, match="bytes"):
        writer.check(other)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected JSON"),
        ("[1]", "expected an object"),
        ('{"address": 1}', "has the keys"),
        ('{"address": 1, "num_slots": 0, "record_bytes": 256, "fingerprint": 3}', "num_slots is 0"),
        ('{"address": true, "num_slots": 1, "record_bytes": 256, "fingerprint": 3}', "address is True"),
        ('{"address": 1, "num_slots": 1, "record_bytes": 256, "fingerprint": "3"}', "fingerprint is '3'"),
        ('{"address": 18446744073709551615, "num_slots": 9, "record_bytes": 256, "fingerprint": 3}', "pass the end"),
    ],
)
def test_what_is_no_address(text: str, words: str) -> None:
    """Guards against a write to wherever a broken message says."""
    with pytest.raises(ValueError, match=words):
        dg.MailboxAddress.from_json(text)
