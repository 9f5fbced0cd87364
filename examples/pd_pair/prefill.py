"""The prefill node: computes prompts, and writes KV and draft rows into the decode node's memory."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import draftgather as dg
from pd_pair.decoder import packed_rows, prefill
from pd_pair.model import DTYPE, HIDDEN_SIZE, MAX_LENGTH, NUM_LAYERS, Model
from pd_pair.wire import FIELDS, MAX_RUNNING, Bootstrap, Completed, Engine, Wanted, num_bytes, receive
from pd_pair.workload import Run


class PrefillNode:
    """Record and KV line i of its own memory are for the i-th request of a message: all are written before the next."""

    def __init__(self, model: Model, bootstrap: Bootstrap) -> None:
        self.model = model
        self.session, self.kv_address = bootstrap.session, bootstrap.kv_address
        self.mailbox = dg.MailboxAddress.from_json(bootstrap.mailbox)
        self.records = dg.RecordWriter(FIELDS, MAX_RUNNING)
        self.records.check(self.mailbox)
        self.kv = torch.zeros(MAX_RUNNING, MAX_LENGTH, NUM_LAYERS, 2, HIDDEN_SIZE, dtype=DTYPE)
        self.engine = Engine()
        self.engine.register(self.kv.data_ptr(), num_bytes(self.kv))
        self.engine.register(*self.records.buffer_info()[:2])

    def hand_over(self, wanted: Wanted, run: Run) -> Completed:
        """Compute the wanted requests, and write their KV and their draft rows where the decode node holds room."""
        first_tokens, kv_bytes = {}, []
        for i, (number, _, _, generation) in enumerate(wanted.reservations):
            prefilled = prefill(self.model, run.mix.requests[number].prompt)
            first_tokens[number] = prefilled.first_token
            self.kv[i, : prefilled.kv.shape[1]] = prefilled.kv[0]
            kv_bytes.append(num_bytes(prefilled.kv))
            rows = packed_rows(self.model, run.mix.requests, number, prefilled.rows, run.kind)
            self.records.pack(i, number, generation, **{name: row[0] for name, row in rows._asdict().items()})
        line_bytes = num_bytes(self.kv[0])
        self.engine.write(
            self.session,
            [self.kv[i].data_ptr() for i in range(len(kv_bytes))],
            [self.kv_address + reservation.line * line_bytes for reservation in wanted.reservations],
            kv_bytes,
        )
        self.engine.write(
            self.session,
            [self.records.address_of(i) for i in range(len(kv_bytes))],
            [self.mailbox.record(reservation.slot) for reservation in wanted.reservations],
            [self.mailbox.record_bytes] * len(kv_bytes),
        )
        return Completed(first_tokens)


def run_prefill(checkpoint: Path, runs: Sequence[Run], decode: Connection) -> None:
    """The process: serves until the decode node closes the connection."""
    torch.set_num_threads(1)
    node = PrefillNode(Model.load(checkpoint), receive(decode))
    while True:
        try:
            wanted = receive(decode)
        except EOFError:
            return
        decode.send(node.hand_over(wanted, runs[wanted.run]))
