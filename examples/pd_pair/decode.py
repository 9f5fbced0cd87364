"""The decode node: holds room for requests, assembles the draft rows that arrive, drafts, verifies and relays.

What a step computes reaches the next one through the future map only, as under an overlap schedule; the step itself
is not overlapped here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

import draftgather as dg
from pd_pair.decoder import NUM_STEPS, DraftRows, Output, Step, draft_paths, next_rows, verify
from pd_pair.model import DTYPE, HIDDEN_SIZE, MAX_LENGTH, NUM_LAYERS, Model
from pd_pair.wire import FIELDS, MAX_RUNNING, Bootstrap, Engine, Reservation, Wanted, num_bytes, receive
from pd_pair.workload import Request, Run


class Served(NamedTuple):
    outputs: list[Output]  # by request number
    assembled: list[int]  # rows of each assembled batch


@dataclass
class _Running:
    reservation: Reservation
    request: Request
    tokens: list[int]
    steps: list[Step] = field(default_factory=list)


class DecodeNode:
    """Memory for MAX_RUNNING requests: each holds its line until it ends, its slot until its draft row is assembled."""

    def __init__(self, model: Model, prefill: Connection) -> None:
        self.model, self.prefill = model, prefill
        self.kv = torch.zeros(MAX_RUNNING + 1, MAX_LENGTH, NUM_LAYERS, 2, HIDDEN_SIZE, dtype=DTYPE)
        self.mailbox = dg.DraftMailbox(FIELDS, MAX_RUNNING)
        self.future_map = dg.FutureMap(FIELDS, MAX_RUNNING + 1, debug=True)
        # Not in debug mode: that would refuse the zeroed rows, whose harm is to be seen.
        self.assembler = dg.DraftAssembler(FIELDS, max_batch_size=MAX_RUNNING, mailbox=self.mailbox)
        self.assembler.warmup()
        self.engine = Engine()
        self.engine.register(self.kv.data_ptr(), num_bytes(self.kv))
        self.engine.register(*self.mailbox.buffer_info()[:2])
        self.prefill.send(
            Bootstrap(self.engine.session, self.kv.data_ptr(), dg.MailboxAddress.of(self.mailbox).to_json())
        )

    def serve(self, run_number: int, run: Run) -> Served:
        """Continuous batching of the run's requests, of which at most `max_running` hold a line."""
        requests, arrivals, max_running = run.mix.requests, run.mix.arrivals, run.mix.max_running
        if not 1 <= max_running <= MAX_RUNNING:
            raise ValueError(f"{run.mix.name}: max_running is {max_running}, expected 1 to {MAX_RUNNING}")
        to_come, lines = deque(range(len(requests))), deque(range(1, max_running + 1))
        in_prefill: dict[int, Reservation] = {}
        served = Served([Output([], [])] * len(requests), [])
        nothing = torch.empty(0, dtype=torch.int64)
        batch = dg.ScheduleBatch([], "cpu", nothing, nothing, spec_info=dg.EagleDraftInput(future_indices=nothing))
        for iteration in count():
            wanted = []
            while to_come and lines and arrivals[to_come[0]] <= iteration:
                number = to_come.popleft()
                wanted.append(self._reserve(number, requests[number], lines.popleft()))
            if wanted:
                self.prefill.send(Wanted(run_number, tuple(wanted)))
                in_prefill |= {reservation.number: reservation for reservation in wanted}
            # The node waits for prefill only where it has nothing to decode.
            while in_prefill and (not batch.reqs or self.prefill.poll()):
                completed = receive(self.prefill)
                arrived = [
                    _Running(in_prefill.pop(number), requests[number], [token])
                    for number, token in completed.first_tokens.items()
                ]
                self._admit(batch, arrived)
                served.assembled.append(len(arrived))
            for ended in self._filter(batch):
                served.outputs[ended.reservation.number] = Output(ended.tokens[: ended.request.num_tokens], ended.steps)
                lines.append(ended.reservation.line)
            if not (to_come or in_prefill or batch.reqs):
                return served
            if batch.reqs:
                self._step(batch)
        raise AssertionError("unreachable")

    def _reserve(self, number: int, request: Request, line: int) -> Reservation:
        longest = len(request.prompt) + request.num_tokens + NUM_STEPS + 1
        if longest > MAX_LENGTH:
            raise ValueError(f"request {number}: may grow to {longest} tokens, expected at most {MAX_LENGTH}")
        slot = self.mailbox.acquire()
        return Reservation(number, line, slot, self.mailbox.generation(slot))

    def _admit(self, batch: dg.ScheduleBatch, arrived: Sequence[_Running]) -> None:
        """Assemble the rows that prefill has written, into the future map, and merge their requests into the batch."""
        numbers = [running.reservation.number for running in arrived]
        slots = [running.reservation.slot for running in arrived]
        self.mailbox.accept(slots, numbers)
        indices = torch.tensor([running.reservation.line for running in arrived])
        relay = dg.Relay(
            self.future_map,
            future_indices=indices,
            seq_lens=torch.tensor([len(running.request.prompt) for running in arrived]),
            bonus_tokens=torch.tensor([running.tokens[-1] for running in arrived]),
        )
        self.assembler.assemble_slots(slots, owners=numbers, request_ids=numbers, relay=relay, batch_outputs=False)
        self.mailbox.release(slots)
        batch.reqs = [*batch.reqs, *arrived]
        batch.spec_info.merge_batch(dg.EagleDraftInput(future_indices=indices))

    def _step(self, batch: dg.ScheduleBatch) -> None:
        """Resolve, draft, verify, then publish and stash for the next step."""
        self.future_map.resolve(batch)
        draft_input, seq_lens = batch.spec_info, batch.seq_lens
        indices = draft_input.future_indices
        rows = DraftRows(draft_input.topk_p, draft_input.topk_index, draft_input.hidden_states)
        past = self.kv[indices, : int(seq_lens.max())]
        verified = verify(self.model, draft_input.bonus_tokens, draft_paths(self.model, rows), past, seq_lens)
        self.future_map.publish(indices, seq_lens + verified.num_accepted + 1)
        following = next_rows(self.model, verified.hidden, verified.bonus_tokens)
        self.future_map.stash(indices, dg.EagleDraftInput(**following._asdict(), bonus_tokens=verified.bonus_tokens))
        for i, running in enumerate(batch.reqs):
            length, num_new = int(seq_lens[i]), int(verified.num_accepted[i]) + 1
            self.kv[running.reservation.line, length : length + num_new] = verified.kv[i, :num_new]
            running.steps.append(Step(len(running.tokens), num_new - 1))
            running.tokens += verified.tokens[i, :num_new].tolist()

    def _filter(self, batch: dg.ScheduleBatch) -> list[_Running]:
        """Take the requests that have all their tokens out of the batch."""
        has_ended = [len(running.tokens) >= running.request.num_tokens for running in batch.reqs]
        ended = [running for running, is_over in zip(batch.reqs, has_ended, strict=True) if is_over]
        if ended:
            batch.reqs = [running for running, is_over in zip(batch.reqs, has_ended, strict=True) if not is_over]
            batch.spec_info.filter_batch(~torch.tensor(has_ended))
        return ended


def run_decode(checkpoint: Path, runs: Sequence[Run], prefill: Connection, results: Connection) -> None:
    """The process: serves one run after the other, sends what it served, and ends."""
    torch.set_num_threads(1)
    node = DecodeNode(Model.load(checkpoint), prefill)
    for number, run in enumerate(runs):
        results.send(node.serve(number, run))
