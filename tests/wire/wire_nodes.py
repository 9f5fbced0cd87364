"""A decode and a prefill node over Mooncake's engine, and their processes: a test calls their methods by name."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

import draftgather as dg
from helpers import random_rows, raw, row_of

NUM_SLOTS = 130  # the first and the last are never written
FIELDS = (*dg.eagle_fields(topk=4, hidden_size=200), dg.Field("seed", 3, torch.int32, optional=True))
OTHER_FIELDS = dg.eagle_fields(topk=4, hidden_size=200)
PATIENCE_SECONDS = 30.0
# sglang's own entries beside the record, each [slots, width]: output_ids, cached_tokens.
AUX = ((16, torch.int32), (8, torch.int32))


def row(number: int) -> dict[str, torch.Tensor]:
    """The row of request `number`, worked out anew wherever it is asked for."""
    return row_of(random_rows(FIELDS, 1, number), 0)


class Engine:
    def __init__(self) -> None:
        os.environ["MC_FORCE_TCP"] = "1"
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        self.engine: Any = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        # The port that was given to `initialize` is not the one it listens on.
        self.session = f"127.0.0.1:{self.engine.get_rpc_port()}"

    def register(self, address: int, num_bytes: int) -> None:
        assert self.engine.register_memory(address, num_bytes) == 0

    def register_aux(self) -> list[torch.Tensor]:
        tables = [torch.zeros((NUM_SLOTS, width), dtype=dtype) for width, dtype in AUX]
        for table in tables:
            self.register(table.data_ptr(), table.nbytes)
        return tables


class DecodeNode(Engine):
    """Lets writers write into its mailbox."""

    def __init__(self) -> None:
        super().__init__()
        self.mailbox = dg.DraftMailbox(FIELDS, NUM_SLOTS, pin_memory=False)
        self.assembler = dg.DraftAssembler(FIELDS, mailbox=self.mailbox, max_batch_size=NUM_SLOTS)
        self.info = self.mailbox.buffer_info()
        self.register(self.info.address, self.info.num_bytes)
        self.aux = self.register_aux()
        assert self.mailbox.acquire() == 0

    def told(self) -> tuple[str, str, list[int]]:
        return self.session, dg.MailboxAddress.of(self.mailbox).to_json(), [table.data_ptr() for table in self.aux]

    def hold(self, number: int) -> list[tuple[int, int]]:
        """So many slots, each with its generation."""
        slots = [self.mailbox.acquire() for _ in range(number)]
        return [(slot, self.mailbox.generation(slot)) for slot in slots]

    def hold_again(self, slot: int) -> int:
        """A slot that was released, for its next tenant; its generation."""
        others = []
        while (got := self.mailbox.acquire()) != slot:
            others.append(got)
        self.mailbox.release(others)
        return self.mailbox.generation(slot)

    def release(self, slots: Sequence[int]) -> None:
        self.mailbox.release(slots)

    def accept(self, slots: Sequence[int], owners: Sequence[int]) -> None:
        self.mailbox.accept(slots, owners)

    def wrong_rows(self, slots: Sequence[int], owners: Sequence[int]) -> list[int]:
        """Assembles them; the slots whose row is not that of the request that is its owner, byte for byte."""
        batch = self.assembler.assemble_slots(slots, owners=owners)
        return [
            slot
            for i, (slot, owner) in enumerate(zip(slots, owners, strict=True))
            if any((raw(batch.tensors[name][i]) != raw(values)).any() for name, values in row(owner).items())
        ]

    def written(self) -> list[int]:
        """The slots of whose records any byte is not zero."""
        records = ctypes.string_at(self.info.address, self.info.num_bytes)
        size = self.info.record_bytes
        return [slot for slot in range(NUM_SLOTS) if any(records[slot * size : (slot + 1) * size])]

    def aux_rows(self, slot: int) -> list[list[int]]:
        return [table[slot].tolist() for table in self.aux]


class PrefillNode(Engine):
    """Packs rows, and writes them into a decode node's mailbox."""

    def __init__(self, fields: Sequence[dg.Field] = FIELDS) -> None:
        super().__init__()
        self.writer = dg.RecordWriter(fields, NUM_SLOTS, pin_memory=False)
        self.register(*self.writer.buffer_info()[:2])
        self.aux = self.register_aux()

    def connect(self, told: tuple[str, str, list[int]]) -> None:
        session, text, aux = told
        address = dg.MailboxAddress.from_json(text)
        self.writer.check(address)
        self.peer, self.address, self.peer_aux = session, address, aux

    def send(self, held: Sequence[tuple[int, int]], owners: Sequence[int]) -> int:
        """One transfer for all of them: record i goes into slot held[i][0]. The engine's status."""
        self.pack(held, owners)
        return self.transfer([(i, self.address.record(slot)) for i, (slot, _) in enumerate(held)])

    def pack(self, held: Sequence[tuple[int, int]], owners: Sequence[int]) -> None:
        for i, ((_, generation), owner) in enumerate(zip(held, owners, strict=True)):
            self.writer.pack(i, owner, generation, **row(owner))

    def transfer(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Whole records, to any addresses."""
        sources = [self.writer.address_of(i) for i, _ in pairs]
        sizes = [self.address.record_bytes] * len(pairs)
        return int(self.engine.batch_transfer_sync_write(self.peer, sources, [to for _, to in pairs], sizes))

    def record(self, slot: int) -> int:
        return self.address.record(slot)

    def send_aux(self, index: int, slot: int, held: tuple[int, int], owner: int) -> int:
        """As sglang does it: lists paired by position, ptr[i] + item_len[i] * slot; the record is the last entry."""
        self.writer.pack(index, owner, held[1], **row(owner))
        for number, table in enumerate(self.aux):
            table[index] = 100 * number + torch.arange(table.shape[1])
        record_bytes = self.writer.buffer_info().record_bytes
        pointers = [table.data_ptr() for table in self.aux] + [self.writer.buffer_info().address]
        item_lens = [table[0].nbytes for table in self.aux] + [record_bytes]
        peer_pointers = [*self.peer_aux, self.address.address]
        sources = [pointer + size * index for pointer, size in zip(pointers, item_lens, strict=True)]
        destinations = [pointer + size * slot for pointer, size in zip(peer_pointers, item_lens, strict=True)]
        return int(self.engine.batch_transfer_sync_write(self.peer, sources, destinations, item_lens))


class OtherPrefillNode(PrefillNode):
    """One that was started with another field list."""

    def __init__(self) -> None:
        super().__init__(OTHER_FIELDS)


class Node:
    """A node's process. What its method raises comes back as its class's name and text."""

    def __init__(self, kind: type[Engine]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(kind, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, method: str, *arguments: Any) -> None:
        self.connection.send((method, arguments))

    def answer(self) -> Any:
        assert self.connection.poll(PATIENCE_SECONDS), "the node says nothing"
        is_good, value = self.connection.recv()
        if not is_good:
            raise NodeError(value)
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_SECONDS)

    def end(self) -> None:
        self.connection.close()
        self.process.join(PATIENCE_SECONDS)
        if self.process.is_alive():
            self.kill()


class NodeError(Exception):
    pass


def _serve(kind: type[Engine], connection: Connection) -> None:
    torch.set_num_threads(1)
    node = kind()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            # The engine's threads do not end by themselves.
            os._exit(0)
        try:
            answer = True, getattr(node, method)(*arguments)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)
