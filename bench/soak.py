"""The soak: arrivals at full speed on the real path, among faults that must be refused, every byte compared."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from traceback import extract_tb
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

import draftgather as dg
from draftgather.bench.arrivals import generate
from draftgather.bench.demo import PoolIndices, RowSource, same_bytes
from draftgather.describe import StagingRing
from draftgather.machine import Machine, machine_for
from draftgather.notices import refusals_expected

NUM_SAMPLES = 200  # of resident memory, evenly over the time
# Between the medians of the second and of the last tenth of the samples.
DRIFT_BOUND_BYTES = 16 << 20

_TICK_MS = 120.0  # of the arrivals' clock
_TOKENS_PER_TICK = 100  # of the lifetime of a request: few enough live at once
_P_ABORT, _P_RETRACT = 0.02, 0.1
# What a refused call would write, and what lies where it would write: no request has such values.
_SENTINEL, _SENTINEL_BYTE = -7, 0xA5

_CPU, _DTYPE = torch.device("cpu"), torch.bfloat16
_ROWS = ("topk_p", "topk_index", "hidden_states")


@dataclass(frozen=True, slots=True)
class SoakOptions:
    minutes: float = 1.0  # longer where a fault has not had its turn by then
    hidden_size: int = 1024
    topk: int = 4
    device: torch.device = _CPU
    seed: int = 0
    num_slots: int = 1024  # of the mailbox and of the future map, at least 3
    max_batch_size: int = 256
    fault_every: int = 8  # ticks
    machine: Machine | None = None  # what the device can do; None probes it


@dataclass(slots=True)
class FaultCount:
    injected: int = 0
    refused: int = 0  # with the right error, and nothing written


@dataclass(slots=True)
class SoakReport:
    """What a soak has seen so far. All is well if `problems` is empty at the end."""

    seconds: float = 0.0
    rows_assembled: int = 0  # each compared
    rows_own_copy: int = 0  # of those: the caller's separate tensors
    rows_resolved: int = 0  # each compared
    rows_stashed: int = 0
    batches: int = 0
    mismatches: int = 0  # rows with any byte other than the reference's
    faults: dict[str, FaultCount] = field(default_factory=dict)
    aborts: int = 0  # requests that went away before they were assembled
    retractions: int = 0
    resumes: int = 0  # retracted requests that were assembled again, from the same record
    overflows: int = 0  # requests that found the mailbox full, and kept their own copies
    slot_reuses: int = 0
    leaked_slots: int | None = None  # None where the soak ended before they were counted
    drift_bytes: int | None = None  # of resident memory; None where the system does not tell
    pinned_bytes: int = 0  # the mailbox and the staging rings
    staging_buffers: int = 0  # how far the rings have grown
    problems: list[str] = field(default_factory=list)


def soak(options: SoakOptions, on_progress: Callable[[int], None] = lambda _: None) -> SoakReport:
    """Run for the time given, or until something unexpected is raised. on_progress: told of each sample."""
    run = _Soak(options)
    try:
        with refusals_expected():
            run.warm_up()
            run.run(on_progress)
            run.finish()
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        run.tell(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
    return run.report


class Reference(RowSource):
    """Rows, lengths and tokens worked out from numbers alone, whole batches at once, in memory of their own."""

    def __init__(self, topk: int, hidden_size: int, seed: int) -> None:
        super().__init__(topk, hidden_size, _DTYPE, seed)
        self._num_places = len(self._slabs[2]) - hidden_size
        integers = [slab.view(torch.uint8).numpy().view(f"i{slab.itemsize}") for slab in self._slabs]
        self._windows = [sliding_window_view(*pair) for pair in zip(integers, (topk, topk, hidden_size), strict=True)]

    def rows(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        """[b, width] a field: the slabs from a place of each number's own on."""
        places = np.array(numbers, np.int64) * 40_503 % self._num_places
        tables = zip(_ROWS, self._windows, self._slabs, strict=True)
        return {name: torch.from_numpy(windows[places]).view(slab.dtype) for name, windows, slab in tables}

    def row(self, number: int) -> dict[str, torch.Tensor]:
        """[width] a field."""
        return {name: rows[0] for name, rows in self.rows([number]).items()}

    def relayed(self, numbers: list[int], device: torch.device) -> dict[str, torch.Tensor]:
        """The rows, and `seq_lens` and `bonus_tokens` [b]."""
        vector = torch.tensor(numbers, dtype=torch.int64)
        tensors = self.rows(numbers) | {"seq_lens": vector % 131_071, "bonus_tokens": vector * 48_271 % 151_936}
        return {name: tensor.to(device) for name, tensor in tensors.items()}


@dataclass(slots=True, eq=False)
class _Request:
    number: int  # also its owner
    num_ticks: int  # of a stint in the running batch
    slot: int = -1  # of the mailbox; -1: the caller keeps its own copy
    rows: dict[str, torch.Tensor] = field(default_factory=dict)  # the own copy
    index: int = 0  # of the future map
    start: int = 0  # the tick of its last assembly; 0: never assembled
    until: int = 0  # the tick at which its stint ends or, retracted, it comes back

    def content(self, tick: int) -> int:
        """The number of the row that the future map holds: its own, then another at each step of the draft."""
        return self.number + (tick - self.start) * 7919


class _Fault(NamedTuple):
    error: type[Exception]
    words: str  # in the error's text: which reason it was
    attempt: Callable[[], object]


class _Soak:
    """The state of one run. Memory is bounded by the options, whatever the number of requests."""

    def __init__(self, options: SoakOptions) -> None:
        o = self._options = options
        fields = dg.eagle_fields(o.topk, o.hidden_size, _DTYPE)
        self._rng = np.random.default_rng(o.seed)
        self._future_map = dg.FutureMap(fields, o.num_slots, o.device, machine=o.machine)
        self._device = self._future_map.device
        self._machine = o.machine or machine_for(self._device)
        self._mailbox = dg.DraftMailbox(fields, o.num_slots)
        common = (fields, self._device, o.max_batch_size, self._mailbox)
        self._fixed = dg.DraftAssembler(*common, outputs="fixed", machine=o.machine)
        self._assemblers = (dg.DraftAssembler(*common, machine=o.machine), self._fixed)
        self._fixed_outputs = self._fixed.assemble_slots([], pad_to=o.max_batch_size).tensors
        self._reference = Reference(o.topk, o.hidden_size, o.seed)
        info = self._mailbox.buffer_info()
        memory = (ctypes.c_uint8 * info.num_bytes).from_address(info.address)
        self._records = np.ctypeslib.as_array(memory).reshape(-1, info.record_bytes)
        self._arrivals = generate(sys.maxsize, o.seed)
        self._upcoming = next(self._arrivals)
        self._indices = PoolIndices(o.num_slots)
        self._input = dg.EagleDraftInput.create_idle_input(self._device, o.hidden_size, _DTYPE, o.topk)
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []  # row i of the draft input is request i's
        self._away: list[_Request] = []  # retracted
        self._former = [-1] * o.num_slots  # a slot's last owner that is gone; below 0: the warm-up's
        self._held: list[int] = []  # slots of nobody, so that the mailbox is full
        self._good: list[_Request] = []  # two that a fault is mixed with
        self._tick = self._num_requests = 0
        self._samples: list[int] = []
        self._written = (*self._future_map.buffers.values(), self._future_map.new_seq_lens_buf)
        self._written += (self._future_map.output_tokens_buf, *self._fixed_outputs.values())
        self._copies = [tensor.clone() for tensor in self._written]
        self._sentinels = dict.fromkeys(("seq_lens", "bonus_tokens"), torch.full((2,), _SENTINEL, device=self._device))
        self._faults = self._make_faults()
        self.report = SoakReport(faults={name: FaultCount() for name in self._faults})

    def warm_up(self) -> None:
        """Compile everything and touch all memory, so that what grows later is drift."""
        num_slots = self._options.num_slots
        self._assemblers[0].warmup()
        for _ in range(num_slots):
            self._mailbox.put(self._mailbox.acquire(), -1, **self._reference.row(0))
        # Batches of every size that memory is kept for, the largest first.
        for shift in range(num_slots.bit_length()):
            self._warm_up_batch(num_slots - 1 >> shift)
        self._mailbox.release(range(num_slots))

    def _warm_up_batch(self, num_rows: int) -> None:
        indices = torch.arange(1, num_rows + 1, device=self._device)
        self._stash(indices, list(range(num_rows)))
        self._input = dg.EagleDraftInput(future_indices=indices)
        self._future_map.resolve(dg.ScheduleBatch([], self._device, indices, indices, spec_info=self._input))
        slots = range(min(num_rows, self._options.max_batch_size))
        for assembler in self._assemblers:
            assembler.assemble_slots(slots)

    def run(self, on_progress: Callable[[int], None]) -> None:
        start, faults, samples = perf_counter(), self.report.faults.values(), self._samples
        while len(samples) < NUM_SAMPLES or not all(fault.injected for fault in faults):
            self._run_tick()
            self.report.seconds = round(perf_counter() - start, 3)
            share = self.report.seconds / max(self._options.minutes * 60, 1e-3)
            num_due = int(min(share, 1.0) * NUM_SAMPLES) - len(samples)
            if num_due:
                samples += [_resident_bytes()] * num_due
                on_progress(num_due)

    def finish(self) -> None:
        """Count slots: as many in use as requests have, and none once those are released."""
        self._synchronize()
        living = self._living()
        num_slots, report = self._options.num_slots, self.report
        in_use = num_slots - self._mailbox.num_free
        self._mailbox.release([*(r.slot for r in living), *self._held])
        report.leaked_slots = max(abs(in_use - len(living) - len(self._held)), num_slots - self._mailbox.num_free)
        if report.leaked_slots:
            self.tell(f"{report.leaked_slots} slots leaked")
        self._judge_memory()

    def _judge_memory(self) -> None:
        report, tenth = self.report, NUM_SAMPLES // 10
        if all(self._samples):
            report.drift_bytes = int(median(self._samples[-tenth:]) - median(self._samples[tenth : 2 * tenth]))
            if report.drift_bytes > DRIFT_BOUND_BYTES:
                self.tell(f"resident memory grew by {report.drift_bytes} bytes, more than {DRIFT_BOUND_BYTES}")
        report.staging_buffers = sum(assembler.num_staging_buffers for assembler in self._assemblers)
        ring_bytes = report.staging_buffers * StagingRing.bytes_for(self._mailbox.fields, self._options.max_batch_size)
        slab_bytes = self._mailbox.buffer_info().num_bytes
        report.pinned_bytes = slab_bytes * self._mailbox.is_pinned + ring_bytes * self._machine.pins

    def tell(self, problem: str) -> None:
        # Of many the first say all.
        if len(self.report.problems) < 20:
            self.report.problems.append(f"tick {self._tick}: {problem}")

    # -- a tick

    def _run_tick(self) -> None:
        self._tick += 1
        self._retire()
        if self._tick % self._options.fault_every == 0:
            self._inject()
        self._receive()
        self._abort()
        self._assemble()
        self._decode()

    def _retire(self) -> None:
        """End stints: a request's last one, or it is retracted and comes back later."""
        self._indices.free_until(self._tick)
        order = np.arange(len(self._running))
        if self._tick % 4 == 0:
            self._rng.shuffle(order)
        kept = [i for i in order.tolist() if self._running[i].until > self._tick]
        left = [r for r in self._running if r.until <= self._tick]
        self._input.filter_batch(torch.tensor(kept, dtype=torch.int64, device=self._device))
        self._running = [self._running[i] for i in kept]
        ended = []
        for request, draw in zip(left, self._rng.random(len(left)).tolist(), strict=True):
            if draw < _P_RETRACT:
                request.until = self._tick + 1 + request.number % 5
                self._away.append(request)
            else:
                ended.append(request)
        self.report.retractions += len(left) - len(ended)
        self._drop(ended)

    def _receive(self) -> None:
        """Rows come in: by `put`, by the transfer engine, or as the caller's own copies."""
        self._waiting += [r for r in self._away if r.until <= self._tick]
        self._away = [r for r in self._away if r.until > self._tick]
        # Where more come than a batch takes, they stay with their sender.
        new: list[_Request] = []
        room = self._options.max_batch_size - len(self._waiting)
        while self._upcoming.time_ms <= self._tick * _TICK_MS and len(new) < room:
            new.append(self._admit(self._upcoming.output_length))
            self._upcoming = next(self._arrivals)
        sent = [r for r in _slotted(new) if r.number % 2]
        if sent:
            slots, numbers = [r.slot for r in sent], [r.number for r in sent]
            self._transfer(slots, numbers)
            self._mailbox.accept(slots, numbers)
        self._waiting += new
        if new:
            self._mailbox.release(self._held)
            self._held.clear()

    def _admit(self, output_length: int) -> _Request:
        request = _Request(self._num_requests, 1 + output_length // _TOKENS_PER_TICK)
        self._num_requests += 1
        if request.number % 10:
            try:
                request.slot = self._mailbox.acquire()
                self.report.slot_reuses += self._former[request.slot] >= 0
            except dg.MailboxFullError:
                self.report.overflows += 1
        if request.slot < 0:
            request.rows = self._reference.row(request.number)
        elif request.number % 2 == 0:
            self._mailbox.put(request.slot, request.number, **self._reference.row(request.number))
        return request

    def _transfer(self, slots: list[int], numbers: list[int], *, age: int = 0, word: int | None = None) -> None:
        """Write whole records as bytes, as a transfer engine does. age: of the generation, in tenancies."""
        layout, rows = self._mailbox.layout, self._reference.rows(numbers)
        records = np.zeros((len(slots), layout.record_bytes), np.uint8)
        for f, offset in zip(layout.fields, layout.offsets, strict=True):
            records[:, offset : offset + f.row_bytes] = rows[f.name].view(torch.uint8).numpy()
        tags = np.zeros((len(slots), 3), np.int64)
        tags[:, 0], tags[:, 1] = numbers, [self._mailbox.generation(slot) - age for slot in slots]
        tags[:, 2] = layout.layout_word([]) if word is None else word
        records[:, layout.tag_offset :] = tags.view(np.uint8)
        self._records[slots] = records

    def _abort(self) -> None:
        """Requests that were never assembled go away."""
        draws = self._rng.random(len(self._waiting)).tolist()
        gone = [r for r, draw in zip(self._waiting, draws, strict=True) if draw < _P_ABORT and not r.start]
        self._waiting = [r for r in self._waiting if r not in gone]
        self._drop(gone)
        self.report.aborts += len(gone)

    def _assemble(self) -> None:
        size = min(len(self._waiting), self._indices.num_free, self._options.max_batch_size)
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        for request in batch:
            self.report.resumes += request.start > 0
            request.start, request.until = self._tick, self._tick + request.num_ticks
            request.index = self._indices.take(request.until)
        for group in (_slotted(batch), [r for r in batch if r.slot < 0]):
            if group:
                self._assemble_group(group)

    def _assemble_group(self, group: list[_Request]) -> None:
        """Requests that all have a slot, or all an own copy."""
        numbers, report = [r.number for r in group], self.report
        expected = self._reference.relayed(numbers, self._device)
        relay = self._relay([r.index for r in group], expected)
        assembler = self._assemblers[self._tick % 2]
        if group[0].slot >= 0:
            batch = assembler.assemble_slots([r.slot for r in group], numbers, numbers, relay=relay)
        else:
            own_rows: dict[str, Any] = {name: [r.rows[name] for r in group] for name in _ROWS}
            batch = assembler.assemble_rows(numbers, relay=relay, **own_rows)
            report.rows_own_copy += len(group)
        self._compare(f"route {batch.route}", batch.tensors, {name: expected[name] for name in _ROWS})
        report.batches += 1
        report.rows_assembled += len(group)
        self._input.merge_batch(dg.EagleDraftInput(future_indices=relay.future_indices))
        self._running += group

    def _decode(self) -> None:
        """Resolve the running batch; then its draft goes on: other rows are published and stashed."""
        if not self._running:
            return
        indices = torch.tensor([r.index for r in self._running], device=self._device)
        batch = dg.ScheduleBatch([], self._device, indices, torch.zeros_like(indices), spec_info=self._input)
        self._future_map.resolve(batch)
        resolved = {name: getattr(self._input, name) for name in (*_ROWS, "bonus_tokens")}
        resolved["seq_lens"] = batch.seq_lens
        contents = [r.content(self._tick) for r in self._running]
        self._compare("resolve", resolved, self._reference.relayed(contents, self._device))
        self.report.rows_resolved += len(indices)
        self._stash(indices, [r.content(self._tick + 1) for r in self._running])
        self.report.rows_stashed += len(indices)

    def _stash(self, indices: torch.Tensor, contents: list[int]) -> None:
        rows: dict[str, Any] = self._reference.relayed(contents, self._device)
        self._future_map.publish(indices, rows.pop("seq_lens"))
        self._future_map.stash(indices, dg.EagleDraftInput(**rows))

    # -- faults

    def _make_faults(self) -> dict[str, _Fault]:
        slots, rows, width = self._try_slots, self._try_rows, self._options.hidden_size
        word = self._mailbox.layout.layout_word([])
        return {
            "wrong owner": _Fault(dg.SlotError, "owned by", lambda: slots(owner=-5)),
            "late put of a former owner": _Fault(dg.SlotError, "holds the row of owner", self._try_late_put),
            "former generation": _Fault(dg.SlotError, "of generation", lambda: self._try_record(age=1)),
            "torn record": _Fault(dg.SlotError, "is torn", lambda: self._try_record(word=0)),
            "foreign layout": _Fault(dg.SlotError, "foreign layout", lambda: self._try_record(word=word ^ 256)),
            "double release": _Fault(dg.SlotError, "is free", self._try_double_release),
            "unwritten slot": _Fault(dg.SlotError, "not written yet", self._try_unwritten),
            "slot out of range": _Fault(dg.SlotError, "0 to", lambda: slots(slot=self._mailbox.num_slots)),
            "row of wrong width": _Fault(dg.RowShapeError, "shape", lambda: rows(hidden_states=torch.zeros(width + 1))),
            "row of wrong dtype": _Fault(dg.RowDtypeError, "dtype", lambda: rows(hidden_states=torch.zeros(width))),
            "missing row": _Fault(dg.MissingRowError, "topk_index is missing", lambda: rows(topk_index=None)),
            "duplicate future index": _Fault(dg.RelayError, "is given for rows", lambda: slots(index=1)),
            "future index out of range": _Fault(
                dg.RelayError, "out of range", lambda: slots(index=self._future_map.num_slots)
            ),
            "mailbox full": _Fault(dg.MailboxFullError, "slots are in use", self._fill_mailbox),
        }

    def _inject(self) -> None:
        """The fault whose turn it is, mixed with good rows: the right error, and nothing written."""
        candidates = _slotted(self._running)
        if not candidates or not self._mailbox.num_free:
            return  # at a later tick
        self._good = [candidates[i] for i in self._rng.integers(0, len(candidates), 2)]
        name, count = min(self.report.faults.items(), key=lambda item: item[1].injected)
        fault, got = self._faults[name], "no error"
        self._synchronize()
        for tensor in self._fixed_outputs.values():
            tensor.view(torch.uint8).fill_(_SENTINEL_BYTE)
        for copy, tensor in zip(self._copies, self._written, strict=True):
            copy.copy_(tensor)
        mailbox_before = self._mailbox_rows()
        count.injected += 1
        try:
            fault.attempt()
        except Exception as error:
            is_right = type(error) is fault.error and fault.words in str(error)
            got = "" if is_right else f"{type(error).__name__}: {error}"
        if got:
            self.tell(f"{name}: expected {fault.error.__name__} ({fault.words}), got {got}")
        pairs = zip((*self._copies, *mailbox_before), (*self._written, *self._mailbox_rows()), strict=True)
        is_same = all(same_bytes(*pair) for pair in pairs)
        if not is_same:
            self.tell(f"{name}: memory was changed")
        count.refused += is_same and not got

    def _mailbox_rows(self) -> list[torch.Tensor]:
        """Copies of what the mailbox holds of the living."""
        mailbox, slots = self._mailbox, [r.slot for r in self._living()]
        tables = [*map(mailbox.view, _ROWS), torch.from_numpy(mailbox.owners), torch.from_numpy(mailbox.states)]
        return [*(table[slots] for table in tables), torch.tensor([mailbox.num_free + len(self._held)])]

    def _try_slots(self, slot: int | None = None, owner: int | None = None, index: int = 2) -> None:
        good, bad = self._good
        slots = [good.slot, bad.slot if slot is None else slot]
        owners = [good.number, bad.number if owner is None else owner]
        self._fixed.assemble_slots(slots, owners, relay=self._relay([1, index], self._sentinels))

    def _try_rows(self, **bad: torch.Tensor | None) -> None:
        good = self._reference.row(self._good[0].number)
        lists: dict[str, Any] = {name: [row, bad.get(name, row)] for name, row in good.items()}
        self._fixed.assemble_rows(relay=self._relay([1, 2], self._sentinels), **lists)

    def _try_late_put(self) -> None:
        slot = self._good[0].slot
        self._mailbox.put(slot, self._former[slot], **self._reference.row(self._tick))

    def _try_record(self, *, age: int = 0, word: int | None = None) -> None:
        with self._held_slot() as slot:
            self._transfer([slot], [self._num_requests], age=age, word=word)
            self._mailbox.accept([slot], [self._num_requests])

    def _try_unwritten(self) -> None:
        with self._held_slot() as slot:
            self._try_slots(slot)

    def _try_double_release(self) -> None:
        with self._held_slot() as slot:
            pass
        self._mailbox.release(slot)

    def _fill_mailbox(self) -> None:
        """The next requests that come will find it full, and keep their own copies."""
        for _ in range(self._mailbox.num_slots + 1):
            self._held.append(self._mailbox.acquire())

    # -- small things

    @contextmanager
    def _held_slot(self) -> Iterator[int]:
        slot = self._mailbox.acquire()
        try:
            yield slot
        finally:
            self._mailbox.release(slot)

    def _living(self) -> list[_Request]:
        """All that have a slot."""
        return _slotted([*self._waiting, *self._running, *self._away])

    def _drop(self, requests: list[_Request]) -> None:
        """They are gone for good, and their slots free."""
        self._mailbox.release([r.slot for r in _slotted(requests)])
        for request in _slotted(requests):
            self._former[request.slot] = request.number

    def _relay(self, indices: list[int], tensors: Mapping[str, torch.Tensor]) -> dg.Relay:
        on_host = torch.tensor(indices)
        vectors = tensors["seq_lens"], tensors["bonus_tokens"]
        return dg.Relay(self._future_map, on_host.to(self._device), *vectors, on_host)

    def _compare(self, what: str, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
        different = torch.stack([_different_rows(got[name], rows) for name, rows in expected.items()]).any(0)
        num_rows = int(different.sum())
        if num_rows:
            self.report.mismatches += num_rows
            self.tell(f"{what}: {num_rows} of {len(different)} rows differ")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _slotted(requests: list[_Request]) -> list[_Request]:
    return [request for request in requests if request.slot >= 0]


def _different_rows(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[b] bool on the host."""
    if same_bytes(got, expected):
        return torch.zeros(len(expected), dtype=torch.bool)
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return torch.ones(len(expected), dtype=torch.bool)
    first, second = (t.contiguous().view(len(expected), -1).view(torch.uint8) for t in (got, expected))
    return (first != second).any(1).cpu()


def _resident_bytes() -> int:
    """0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
