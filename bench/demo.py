"""The demo: arrivals replayed through the whole path, beside plain torch.stack, every byte compared.

Time is simulated. What is measured is the host's time in the two calls that do the same work.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch

from draftgather import draft_assembler
from draftgather.bench.arrivals import Arrival
from draftgather.bench.torch_stack import METADATA_WIDTH, ArrivedRow, StackedBatch, StackRelay, stack_rows
from draftgather.draft_assembler import DraftAssembler
from draftgather.draft_batch import DraftBatch
from draftgather.draft_input import EagleDraftInput
from draftgather.fields import eagle_fields
from draftgather.future_map import FutureMap, Relay
from draftgather.mailbox import DraftMailbox
from draftgather.schedule_batch import ScheduleBatch

# How long a token keeps a request alive, several of them accepted a step.
_MS_PER_TOKEN = 10.0
# Lines of the metadata pool into which the transfer engine writes rows, one after the other.
_POOL_LINES = 64
# Row n is the random slab from a place of its own on: distinct for this many rows in turn.
_NUM_PLACES = 1 << 16
_VOCAB_SIZE = 151_936
# Every such batch is resolved together with what is left of the one before it.
_MERGE_EVERY = 3

_CPU = torch.device("cpu")
_ROWS = ("topk_p", "topk_index", "hidden_states")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    hidden_size: int = 7168
    dtype: torch.dtype = torch.bfloat16
    topk: int = 4
    num_steps: int = 1
    tick_ms: float = 20.0  # from one scheduler iteration to the next
    speed_up: float = 1.0  # the trace's clock, arrivals and lifetimes alike, runs this much faster
    device: torch.device = _CPU
    seed: int = 0
    threads: int = 1  # of torch, during the replay
    max_batch_size: int = 512
    num_slots: int = 1024  # of the mailbox (requests that wait) and of the future map (requests that live)


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """What the replay measured. Times are of the host, in microseconds."""

    requests: int
    batches: int
    mismatches: int  # batches with any byte other than the reference's
    route: str
    launches: int  # counted inside our assemble calls
    ours_us_p50: float  # a batch: assemble, publish and stash
    ours_us_p99: float
    torch_stack_us_p50: float  # a batch: the same work by stack_rows, publish and stash
    torch_stack_us_p99: float
    speedup_p50: float  # torch_stack_us_p50 / ours_us_p50
    put_us_p50: float  # an arriving row: acquire and put
    clone_us_p50: float  # an arriving row: sglang's three clones
    batch_size_p50: int
    batch_size_p99: int
    batch_size_max: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request whose row has come in, and that is in no batch yet."""

    number: int  # also its owner
    arrival: Arrival
    slot: int  # of the mailbox
    row: ArrivedRow  # the baseline's own copy


def replay(
    arrivals: Iterator[Arrival], options: DemoOptions, on_progress: Callable[[int], None] = lambda _: None
) -> DemoFigures:
    """Run all arrivals, in the order of time, through both paths. on_progress: told of each batch's requests."""
    with torch_threads(options.threads), _counted_launches() as count:
        run = _Replay(options, count)
        run.warm_up()
        run.run(arrivals, on_progress)
        return run.figures()


class RowSource:
    """Rows as a transfer engine leaves them in the metadata pool: random bytes, different for each request.

    A row is overwritten by the one that comes `_POOL_LINES` later.
    """

    def __init__(self, num_states: int, hidden_size: int, dtype: torch.dtype, seed: int) -> None:
        width = max(METADATA_WIDTH, num_states)
        generator = torch.Generator().manual_seed(seed)

        def slab(width: int, dtype: torch.dtype) -> torch.Tensor:
            shape = ((width + _NUM_PLACES) * dtype.itemsize,)
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)

        self._slabs = (slab(width, torch.float32), slab(width, torch.int64), slab(hidden_size, dtype))
        self._pools = tuple(
            torch.zeros((_POOL_LINES, size), dtype=slab.dtype)
            for size, slab in zip((width, width, hidden_size), self._slabs, strict=True)
        )

    def receive(self, number: int) -> ArrivedRow:
        """The row of request `number`, in its line of the pool."""
        # An odd factor visits every place once before any comes again.
        place = number * 40_503 % _NUM_PLACES
        rows = [pool[number % _POOL_LINES] for pool in self._pools]
        for row, slab in zip(rows, self._slabs, strict=True):
            row.copy_(slab[place : place + len(row)])
        return ArrivedRow(*rows)


class PoolIndices:
    """Request pool indices 1..num_slots-1, distinct among the living, first in first out."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(range(1, num_slots))
        self._living: list[tuple[int, int]] = []  # heap of (the tick of its end, index)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_end(self) -> int:
        return self._living[0][0]

    def take(self, end_tick: int) -> int:
        index = self._free.popleft()
        heapq.heappush(self._living, (end_tick, index))
        return index

    def free_until(self, tick: int) -> None:
        while self._living and self._living[0][0] <= tick:
            self._free.append(heapq.heappop(self._living)[1])


class _Replay:
    """The state of one run. Memory is bounded by `num_slots`, whatever the number of requests."""

    def __init__(self, options: DemoOptions, launch_count: list[int]) -> None:
        o = self._options = options
        self._launch_count = launch_count
        self._num_states = o.topk * o.num_steps
        fields = eagle_fields(o.topk, o.hidden_size, o.dtype, o.num_steps)
        self._source = RowSource(self._num_states, o.hidden_size, o.dtype, o.seed)
        self._rng = np.random.default_rng(o.seed)
        self._mailbox = DraftMailbox(fields, o.num_slots)
        self._future_map = FutureMap(fields, o.num_slots, o.device)
        self._device = self._future_map.device
        self._assembler = DraftAssembler(fields, self._device, o.max_batch_size, self._mailbox)
        self._plain_relay = self._new_plain_relay(o.num_slots)
        self._indices = PoolIndices(o.num_slots)
        self._waiting: deque[_Waiting] = deque()
        self._last: list[tuple[int, int]] = []  # (index, end tick) of the last batch's requests
        self._num_requests = self._launches = self._mismatches = 0
        self._routes: set[str] = set()
        self._ours_ns, self._plain_ns, self._put_ns, self._clone_ns = (array("q") for _ in range(4))
        self._batch_sizes = array("q")

    def warm_up(self) -> None:
        """Compile, call and touch all once: what is measured is neither a compiler nor a page's first use."""
        self._assembler.warmup()
        relay, index = self._new_plain_relay(2), torch.ones(1, dtype=torch.int64, device=self._device)
        stacked = stack_rows([self._source.receive(0)], self._num_states, self._device)
        relay.publish(index, index)
        relay.stash(index, stacked, index)
        ours, plain = self._future_map, self._plain_relay
        for buffer in (*ours.buffers.values(), plain.topk_p, plain.topk_index, plain.hidden_states):
            buffer.zero_()

    def run(self, arrivals: Iterator[Arrival], on_progress: Callable[[int], None]) -> None:
        upcoming, tick = next(arrivals, None), 0
        while upcoming is not None or self._waiting:
            # Ticks without work are skipped. Who still waits does so for an index, and all are taken.
            if self._waiting or upcoming is None:
                tick = self._indices.next_end
            else:
                tick = max(tick + 1, self._tick_of(upcoming))
            self._indices.free_until(tick)
            # With the mailbox full, arrivals stay with their sender until the next tick.
            while upcoming is not None and self._tick_of(upcoming) <= tick and self._mailbox.num_free:
                self._receive(upcoming)
                upcoming = next(arrivals, None)
            while self._waiting and self._indices.num_free:
                size = min(len(self._waiting), self._indices.num_free, self._options.max_batch_size)
                self._run_batch(tick, [self._waiting.popleft() for _ in range(size)])
                on_progress(size)

    def figures(self) -> DemoFigures:
        ours, plain = _us(self._ours_ns, 50), _us(self._plain_ns, 50)
        # Bytes outside of every batch's rows must agree too. Not counted twice: a mismatch spoils the map for good.
        is_stray = self._mismatches == 0 and not self._is_relay_same()
        return DemoFigures(
            requests=self._num_requests,
            batches=len(self._batch_sizes),
            mismatches=self._mismatches + is_stray,
            route="+".join(sorted(self._routes)),
            launches=self._launches,
            ours_us_p50=ours,
            ours_us_p99=_us(self._ours_ns, 99),
            torch_stack_us_p50=plain,
            torch_stack_us_p99=_us(self._plain_ns, 99),
            speedup_p50=round(plain / ours, 3),
            put_us_p50=_us(self._put_ns, 50),
            clone_us_p50=_us(self._clone_ns, 50),
            batch_size_p50=int(np.percentile(self._batch_sizes, 50, method="higher")),
            batch_size_p99=int(np.percentile(self._batch_sizes, 99, method="higher")),
            batch_size_max=max(self._batch_sizes),
        )

    # -- a row comes in

    def _receive(self, arrival: Arrival) -> None:
        """Keep the row on both sides: ours in the mailbox, the baseline's as sglang's three clones."""
        number = self._num_requests
        self._num_requests += 1
        pooled = self._source.receive(number)
        # Who comes first finds the row no warmer than who comes second, over all rows.
        if number % 2:
            slot = self._put(number, pooled)
            row = self._clone(pooled)
        else:
            row = self._clone(pooled)
            slot = self._put(number, pooled)
        self._waiting.append(_Waiting(number, arrival, slot, row))

    def _put(self, number: int, pooled: ArrivedRow) -> int:
        start = perf_counter_ns()
        slot = self._mailbox.acquire()
        self._mailbox.put(
            slot,
            number,
            topk_p=pooled.topk_p[: self._num_states],
            topk_index=pooled.topk_index[: self._num_states],
            hidden_states=pooled.hidden_states,
        )
        self._put_ns.append(perf_counter_ns() - start)
        return slot

    def _clone(self, pooled: ArrivedRow) -> ArrivedRow:
        start = perf_counter_ns()
        row = ArrivedRow(pooled.topk_p.clone(), pooled.topk_index.clone(), pooled.hidden_states.clone())
        self._clone_ns.append(perf_counter_ns() - start)
        return row

    # -- a batch goes out

    def _run_batch(self, tick: int, requests: list[_Waiting]) -> None:
        ends = [tick + self._lifetime(request.arrival) for request in requests]
        relay = self._relay(requests, ends)
        before = self._launch_count[0]
        if len(self._batch_sizes) % 2:
            batch = self._assemble(requests, relay)
            stacked = self._stack(requests, relay)
        else:
            stacked = self._stack(requests, relay)
            batch = self._assemble(requests, relay)
        self._launches += self._launch_count[0] - before
        self._batch_sizes.append(len(requests))
        self._routes.add(batch.route)
        # At once, as a scheduler would: the mailbox itself keeps a slot that a launch still reads.
        self._mailbox.release([request.slot for request in requests])
        self._mismatches += not self._is_batch_same(tick, batch, stacked, relay.future_indices)
        self._last = list(zip(relay.future_indices.tolist(), ends, strict=True))

    def _relay(self, requests: list[_Waiting], ends: list[int]) -> Relay:
        """What both paths are told about a batch beside its rows."""
        indices = [self._indices.take(end) for end in ends]
        seq_lens = [request.arrival.input_length for request in requests]
        bonus_tokens = self._rng.integers(0, _VOCAB_SIZE, len(requests)).tolist()
        vectors = [torch.tensor(v, dtype=torch.int64, device=self._device) for v in (indices, seq_lens, bonus_tokens)]
        return Relay(self._future_map, *vectors)

    def _assemble(self, requests: list[_Waiting], relay: Relay) -> DraftBatch:
        slots, owners = [r.slot for r in requests], [r.number for r in requests]
        self._synchronize()
        start = perf_counter_ns()
        batch = self._assembler.assemble_slots(slots, owners, owners, relay=relay)
        self._ours_ns.append(perf_counter_ns() - start)
        return batch

    def _stack(self, requests: list[_Waiting], relay: Relay) -> StackedBatch:
        rows = [request.row for request in requests]
        self._synchronize()
        start = perf_counter_ns()
        stacked = stack_rows(rows, self._num_states, self._device)
        self._plain_relay.publish(relay.future_indices, relay.seq_lens)
        self._plain_relay.stash(relay.future_indices, stacked, relay.bonus_tokens)
        self._plain_ns.append(perf_counter_ns() - start)
        return stacked

    # -- are both the same

    def _is_batch_same(self, tick: int, batch: DraftBatch, stacked: StackedBatch, indices: torch.Tensor) -> bool:
        return (
            all(same_bytes(batch.tensors[name], getattr(stacked, name)) for name in _ROWS)
            and self._is_relay_same(indices)
            and self._is_resolved_same(tick, indices)
        )

    def _is_relay_same(self, rows: torch.Tensor | slice = slice(None)) -> bool:
        ours, plain = self._future_map, self._plain_relay
        return (
            all(same_bytes(ours.buffers[name][rows], getattr(plain, name)[rows]) for name in _ROWS)
            and same_bytes(ours.new_seq_lens_buf[rows], plain.seq_lens[rows])
            and same_bytes(ours.output_tokens_buf[rows], plain.bonus_tokens[rows])
        )

    def _is_resolved_same(self, tick: int, indices: torch.Tensor) -> bool:
        """Resolve as the next iteration does, some batches after a filter and a merge that change the order."""
        draft_input = EagleDraftInput(future_indices=indices)
        expected = indices
        alive = [i for i, (_, end) in enumerate(self._last) if end > tick]
        if alive and len(self._batch_sizes) % _MERGE_EVERY == 0:
            kept = self._rng.permutation(alive)[: (len(alive) + 1) // 2].tolist()
            last = torch.tensor([index for index, _ in self._last], device=self._device)
            draft_input = EagleDraftInput(future_indices=last)
            draft_input.filter_batch(torch.tensor(kept, device=self._device))
            draft_input.merge_batch(EagleDraftInput(future_indices=indices))
            # Worked out anew from the lists: a filter or merge that goes wrong must show.
            order = [self._last[i][0] for i in kept] + indices.tolist()
            expected = torch.tensor(order, device=self._device)
        none = torch.zeros(len(expected), dtype=torch.int64, device=self._device)
        batch = ScheduleBatch([], self._device, expected, none, spec_info=draft_input)
        self._future_map.resolve(batch)
        plain, resolved = self._plain_relay, batch.spec_info
        return same_bytes(batch.seq_lens, plain.seq_lens[expected]) and all(
            same_bytes(getattr(resolved, name), getattr(plain, name)[expected]) for name in (*_ROWS, "bonus_tokens")
        )

    # -- small things

    def _tick_of(self, arrival: Arrival) -> int:
        """The tick at whose start the request is there."""
        return int(arrival.time_ms / self._options.speed_up / self._options.tick_ms) + 1

    def _lifetime(self, arrival: Arrival) -> int:
        """In ticks."""
        milliseconds = arrival.output_length * _MS_PER_TOKEN / self._options.speed_up
        return max(1, int(milliseconds / self._options.tick_ms))

    def _new_plain_relay(self, num_slots: int) -> StackRelay:
        o = self._options
        return StackRelay(num_slots, self._num_states, o.hidden_size, o.dtype, self._device)

    def _synchronize(self) -> None:
        """Before the clock starts, so that neither path pays for what the other has queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit agree. As numbers NaN would differ from itself, and -0.0 equal 0.0."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    as_integers = _INTEGERS[first.dtype.itemsize]
    return torch.equal(first.view(as_integers), second.view(as_integers))


def _us(times_ns: array[int], percentile: float) -> float:
    return round(float(np.percentile(times_ns, percentile)) / 1000, 3)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _counted_launches() -> Iterator[list[int]]:
    """Count the launches of assemblers: the one element of the list yielded."""
    count, module = [0], vars(draft_assembler)
    launch = module["launch"]

    def counted(*args: object) -> object:
        count[0] += 1
        return launch(*args)

    module["launch"] = counted
    try:
        yield count
    finally:
        module["launch"] = launch
