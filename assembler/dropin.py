"""The drop-in for sglang's builder and transfer gate: what it does in each mode. `sglang_plugin` puts it in place.

Nothing here imports sglang: `Engine` holds what differs from version to version.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Any, NamedTuple

import torch

from draftgather.builder import RequestRows, eagle_rows
from draftgather.dropin_mailbox import ArrivalMailbox, Arrived, describe_size
from draftgather.dropin_relay import SglangRelay, can_fuse, check_relay_format
from draftgather.dropin_shadow import Comparison, ShadowMap, compare
from draftgather.errors import DraftRowError, MissingRowError, RelayError, RowDtypeError, RowShapeError, SlotError
from draftgather.future_map import Relay
from draftgather.machine import as_device
from draftgather.rows import NO_STORAGE

logger = logging.getLogger("draftgather.sglang")

# sglang's KVPoll.
_FAILED, _SUCCESS = 0, 4
_DEVICES = ("cpu", "cuda")
_SHADOW_LOG_EVERY = 1000
# Below so many rows sglang's own publish and stash cost a CPU less than our launch (docs/sglang.md).
_FUSE_FROM_ON_CPU = 16


class Mode(str, Enum):
    """off: sglang's own code runs. shadow: both run, sglang's result is served. on: ours is."""

    OFF = "off"
    SHADOW = "shadow"
    ON = "on"


class BadRows(str, Enum):
    """What becomes of a request whose row is missing, unwritten or another owner's."""

    WARN = "warn"  # what sglang does: it goes on, and verification corrects the draft
    ABORT = "abort"  # the request fails, on every tensor-parallel rank


@dataclass(frozen=True, slots=True)
class DropInOptions:
    """The operator's choices. From the environment: DRAFTGATHER_SGLANG, and that with _FUSED and so on behind."""

    mode: Mode = Mode.OFF
    fused: bool = False  # publish and stash in the gathering launch
    bad_rows: BadRows = BadRows.WARN
    sample: int = 10  # shadow compares every sample-th batch
    mailbox_slots: int = 0  # 0: rows stay sglang's clones

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> DropInOptions:
        """Raises ValueError, naming the variable, for a value that is none of those it takes."""
        name = "DRAFTGATHER_SGLANG"

        def choice(suffix: str, values: Mapping[str, Any], default: str) -> Any:
            given = environment.get(name + suffix, "").strip().lower() or default
            if given not in values:
                raise ValueError(f"{name + suffix} is {given!r}, expected one of {', '.join(values)}")
            return values[given]

        def number(suffix: str, default: int) -> int:
            given = environment.get(name + suffix, "").strip() or str(default)
            if not given.isdecimal() or int(given) < 1:
                raise ValueError(f"{name + suffix} is {given!r}, expected an integer of at least 1")
            return int(given)

        has_mailbox, num_slots = choice("_MAILBOX", {"0": False, "1": True}, "0"), number("_MAILBOX_SLOTS", 4096)
        return cls(
            mode=choice("", {m.value: m for m in Mode}, "off"),
            fused=choice("_FUSED", {"0": False, "1": True}, "0"),
            bad_rows=choice("_BAD_ROWS", {b.value: b for b in BadRows}, "warn"),
            sample=number("_SAMPLE", 10),
            mailbox_slots=num_slots if has_mailbox else 0,
        )


class Engine(NamedTuple):
    """One version of sglang, as far as the drop-in depends on it."""

    version: str
    make_draft_input: Callable[..., Any]  # (topk_p, topk_index, hidden_states, bonus_tokens) -> its EagleDraftInput
    make_payload: Callable[[Any], Any]  # what its FutureMap.stash takes of an EagleDraftInput
    has_seeds: bool  # requests may bring sparse-attention seeds
    needs_seeds: Callable[[Any, Any], bool]  # (batch, settings): a seed is part of this model's draft input
    relays_hidden_states: Callable[[], bool]  # now; it does not in multi-layer mode
    has_stock_relay: Callable[[Any], bool]  # of a future map: its class, publish and stash are sglang's own


@dataclass(slots=True)
class DropInStats:
    """What happened in this process so far. Times are host times, nanoseconds, the last thousand of each."""

    batches: int = 0  # served or shadowed by draftgather
    fused: int = 0  # of them, published and stashed in the gathering launch
    handed_over: Counter[str] = field(default_factory=Counter)  # left to sglang's own code, by reason
    fallbacks: int = 0  # an unexpected error: sglang's own code served the batch
    refused: int = 0  # configuration faults
    bad_rows: Counter[str] = field(default_factory=Counter)  # requests, by fault
    kept: int = 0  # arrived rows that went into the mailbox
    mailbox_full: int = 0  # arrived rows that found no record: sglang's clones
    compared: int = 0  # shadow: batches
    different: int = 0  # of them
    sglang_ns: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    ours_ns: deque[int] = field(default_factory=lambda: deque(maxlen=1000))

    def summary(self) -> str:
        """One line for the log."""
        times = ""
        if self.ours_ns:
            stock, ours = median(self.sglang_ns) / 1e3, median(self.ours_ns) / 1e3
            times = f"; median host time {ours:.0f} us, sglang's {stock:.0f} us"
        return (
            f"{self.batches} batches, {self.compared} compared, {self.different} different, "
            f"{self.fallbacks} fallbacks, {sum(self.handed_over.values())} handed over{times}"
        )


class DropIn:
    """The builder and the gate of one scheduler process. Not for several threads at once, as sglang's are not."""

    def __init__(self, options: DropInOptions, engine: Engine) -> None:
        self.options = options
        self.mode = options.mode  # may be set at any time: off passes through
        self.engine = engine
        self.fuse_from_on_cpu = _FUSE_FROM_ON_CPU  # rows
        self.stats = DropInStats()
        self.arrivals: ArrivalMailbox | None = None  # made when the gate first sees sglang's metadata buffers
        self._arriving: Any = None  # the request whose transfer is being committed
        self._arrived: Arrived | None = None
        self._hidden: tuple[int, torch.dtype] | None = None  # of the metadata rows: sglang's own answer
        self._relay: SglangRelay | None = None
        self._last_rows: tuple[Any, RequestRows] | None = None  # of a configuration
        self._shadowed: ShadowMap | None = None
        self._comparisons: deque[Comparison] = deque()
        self._said: set[str] = set()

    # -- the builder

    def build(
        self, stock: Callable[[Any], Any], batch: Any, settings: Any, last_tokens_tensor: torch.Tensor, future_map: Any
    ) -> Any:
        """The draft input of `batch`. stock: sglang's own builder, given the future map to publish and stash to.

        Raises RowShapeError, RowDtypeError or RelayError for a configuration fault, before anything is written.
        """
        if self.mode is Mode.OFF:
            return stock(future_map)
        reason = self._reason_to_hand_over(batch, settings)
        if reason is not None:
            self.stats.handed_over[reason] += 1
            return stock(future_map)
        if self.mode is Mode.SHADOW:
            return self._shadow(stock, batch, settings, last_tokens_tensor, future_map)
        try:
            draft_input, is_fused = self._gather(batch, settings, last_tokens_tensor, future_map)
        except (DraftRowError, _FormatError) as error:
            if self._note_fault(error):
                raise
            # Whether the other ranks have the row is not known here, so no request is failed here.
            return stock(future_map)
        except Exception:
            self.stats.fallbacks += 1
            self._say_once("fallback", logging.ERROR, "failed; sglang's own builder serves this batch", exc_info=True)
            return stock(future_map)
        self.stats.batches += 1
        self.stats.fused += is_fused
        if batch.enable_overlap and not is_fused:
            self._publish_and_stash(batch, draft_input, future_map)
        return draft_input

    def _reason_to_hand_over(self, batch: Any, settings: Any) -> str | None:
        """Why this batch is not ours; None when it is."""
        reqs = batch.reqs
        if not reqs:
            return "empty batch"
        if str(batch.device).partition(":")[0] not in _DEVICES:
            return f"device {batch.device}"
        if getattr(settings, "speculative_use_rejection_sampling", False):
            return "rejection sampling"
        if self.engine.has_seeds:
            if any([getattr(req, "output_dsa_topk_indices", None) is not None for req in reqs]):
                return "sparse-attention seeds"
            if self.engine.needs_seeds(batch, settings):
                return "sparse-attention seeds"
        return None

    def _gather(self, batch: Any, settings: Any, last_tokens_tensor: torch.Tensor, future_map: Any) -> tuple[Any, bool]:
        """The draft input, and whether it is published and stashed already."""
        rows = self._rows_of(batch, settings, future_map)
        relay = None
        if batch.enable_overlap:
            try:
                check_relay_format(future_map, rows.fields)
            except RelayError as error:
                raise _FormatError(str(error)) from None
            relay = self._fused_relay(batch, last_tokens_tensor, future_map)
        tensors = rows.assemble(batch.reqs, relay)
        draft_input = self.engine.make_draft_input(
            tensors["topk_p"], tensors["topk_index"], tensors["hidden_states"], last_tokens_tensor
        )
        if batch.enable_overlap:
            draft_input.future_indices = batch.req_pool_indices
        return draft_input, relay is not None

    def _rows_of(self, batch: Any, settings: Any, future_map: Any) -> RequestRows:
        """As configured now. Width and dtype of the hidden states are those of sglang's metadata buffers."""
        hidden = self._hidden
        if hidden is None:
            buffer = getattr(future_map, "hidden_states_buf", None)
            # Before anything arrived through the gate, and without a relay, the first row is all there is.
            row = batch.reqs[0].hidden_states_tensor if buffer is None else buffer
            if not isinstance(row, torch.Tensor):
                row = next((r for r in (q.hidden_states_tensor for q in batch.reqs) if r is not None), None)
            hidden = (1, torch.float32) if row is None else (row.shape[-1], row.dtype)
        topk, steps = settings.speculative_eagle_topk, settings.speculative_num_steps
        if not settings.enable_multi_layer_eagle:
            steps = 1
        mailbox = None if self.arrivals is None else self.arrivals.mailbox
        configuration = (topk, steps, hidden, batch.device, mailbox)
        if self._last_rows is None or self._last_rows[0] != configuration:
            # Exact: sglang keeps the rows' own dtype, and what we serve is what it would.
            rows = eagle_rows(topk, steps, *hidden, as_device(batch.device), exact=True, mailbox=mailbox)
            self._last_rows = configuration, rows
        return self._last_rows[1]

    def _fused_relay(self, batch: Any, last_tokens_tensor: torch.Tensor, future_map: Any) -> Relay | None:
        if not self.options.fused or not self.engine.has_stock_relay(future_map):
            return None
        # With rows in the mailbox there is a launch anyway.
        if self.arrivals is None and len(batch.reqs) < self.fuse_from_on_cpu and batch.req_pool_indices.is_cpu:
            return None
        if not can_fuse(future_map, self.engine.relays_hidden_states()):
            return None
        if self._relay is None or not self._relay.writes(future_map):
            self._relay = SglangRelay(future_map)
        return Relay(self._relay, batch.req_pool_indices, batch.seq_lens, last_tokens_tensor)

    def _publish_and_stash(self, batch: Any, draft_input: Any, future_map: Any) -> None:
        future_map.publish(draft_input.future_indices, batch.seq_lens)
        future_map.stash(draft_input.future_indices, self.engine.make_payload(draft_input))

    # -- shadow

    def _shadow(
        self, stock: Callable[[Any], Any], batch: Any, settings: Any, last_tokens_tensor: torch.Tensor, future_map: Any
    ) -> Any:
        """Serve sglang's result; then do the same into a copy of the future map, and compare."""
        start = time.perf_counter_ns()
        served = stock(future_map)
        sglang_ns = time.perf_counter_ns() - start
        try:
            copied = self._shadow_map(future_map, batch.req_pool_indices) if batch.enable_overlap else None
            start = time.perf_counter_ns()
            draft_input, is_fused = self._gather(batch, settings, last_tokens_tensor, copied)
            if batch.enable_overlap and not is_fused:
                self._publish_and_stash(batch, draft_input, copied)
            ours_ns = time.perf_counter_ns() - start
            if self.stats.batches % self.options.sample == 0:
                self._comparisons.append(compare(served, draft_input, future_map, copied, batch))
            self._finish_comparisons()
        except (DraftRowError, _FormatError) as error:
            self._note_fault(error)
            return served
        except Exception:
            self.stats.fallbacks += 1
            self._say_once("fallback", logging.ERROR, "failed in shadow; sglang's result is served", exc_info=True)
            return served
        self.stats.batches += 1
        self.stats.fused += is_fused
        self.stats.sglang_ns.append(sglang_ns)
        self.stats.ours_ns.append(ours_ns)
        if self.stats.batches in (1, 10, 100) or self.stats.batches % _SHADOW_LOG_EVERY == 0:
            logger.info("draftgather shadow: %s", self.stats.summary())
        return served

    def _shadow_map(self, future_map: Any, written: torch.Tensor) -> Any:
        if self._shadowed is None or not self._shadowed.shadows(future_map):
            self._shadowed = ShadowMap(future_map)
            # It was copied after sglang's stash: without this, rows that we fail to write would be equal.
            self._shadowed.spoil(written)
        return self._shadowed.copy

    def _finish_comparisons(self) -> None:
        """Count those whose flags have arrived on the host; nothing is waited for."""
        while self._comparisons and self._comparisons[0].marker.query():
            comparison = self._comparisons.popleft()
            self.stats.compared += 1
            names = comparison.different()
            if names:
                self.stats.different += 1
                logger.error("draftgather shadow: %s differ for requests %s", names, comparison.request_ids)

    # -- arrival

    def commit(self, stock: Callable[[], Any], req: Any) -> Any:
        """sglang's commit of one finished transfer; what `get_buf` reads meanwhile is the row of `req`."""
        if self.arrivals is None:
            return stock()
        self._arriving = req if self.mode is Mode.ON else None
        try:
            return stock()
        finally:
            arrived, self._arriving, self._arrived = self._arrived, None, None
            try:
                self.stats.kept += self.arrivals.settle(arrived, req)
            except Exception:
                self.stats.fallbacks += 1
                self._say_once("settle", logging.ERROR, "failed to keep an arrived row", exc_info=True)

    def read_metadata(self, stock: Callable[[Any], Any], buffers: Any, index: int) -> Any:
        """sglang's `get_buf`: of a request that arrives the draft rows are views of a record, and not clones."""
        if self._arriving is None or self.arrivals is None or not self.arrivals.is_of(buffers):
            return stock(buffers)
        try:
            self._arrived = self.arrivals.receive(index, self._arriving.bootstrap_room or 0)
            if self._arrived is not None:
                return stock(self._arrived.instead_of(buffers))
            self.stats.mailbox_full += 1
            self._say_once("full", logging.WARNING, "the mailbox is full: rows that find no record are cloned")
        except Exception:
            self.stats.fallbacks += 1
            self._say_once("arrival", logging.ERROR, "failed at an arriving row; sglang clones it", exc_info=True)
        return stock(buffers)

    # -- the gate

    def check_arrivals(
        self,
        polls: list[int],
        decode_reqs: Sequence[Any],
        metadata_buffers: Any,
        is_fake: Callable[[Any], bool],
    ) -> None:
        """After sglang's own gate, before its all-reduce: count and log requests whose draft row is not theirs.

        In mode on with BadRows.ABORT such a request's poll becomes Failed here, and by the all-reduce's
        minimum on every rank.
        """
        if self.mode is Mode.OFF or not metadata_buffers.output_topk_p.is_cpu:
            return
        try:
            self._look_at_arrivals(polls, decode_reqs, metadata_buffers, is_fake)
        except Exception:
            # sglang's own gate has had its say: its polls stand.
            self.stats.fallbacks += 1
            self._say_once("gate", logging.ERROR, "failed to look at arrived rows", exc_info=True)

    def _look_at_arrivals(
        self, polls: list[int], decode_reqs: Sequence[Any], metadata_buffers: Any, is_fake: Callable[[Any], bool]
    ) -> None:
        hidden = metadata_buffers.output_hidden_states
        self._hidden = (hidden.shape[1], hidden.dtype)
        if self.options.mailbox_slots and self.arrivals is None:
            self._make_mailbox(metadata_buffers, self._hidden)
        for i, poll in enumerate(polls):
            if poll == _SUCCESS and not is_fake(decode_reqs[i].req):
                fault = _arrival_fault(decode_reqs[i], metadata_buffers)
                if fault is not None:
                    self._note_arrival_fault(decode_reqs[i], *fault)
                    if self._aborts:
                        polls[i] = _FAILED

    def _make_mailbox(self, metadata_buffers: Any, hidden: tuple[int, torch.dtype]) -> None:
        num_slots = self.options.mailbox_slots
        try:
            self.arrivals = ArrivalMailbox(metadata_buffers, num_slots)
        except Exception:
            # Not tried again, and the gate goes on.
            self.options = replace(self.options, mailbox_slots=0)
            self.stats.fallbacks += 1
            self._say_once("mailbox", logging.ERROR, "has no mailbox: rows stay sglang's clones", exc_info=True)
            return
        pinned = "pinned" if self.arrivals.mailbox.is_pinned else "not pinned"
        logger.info("draftgather: arriving rows go into a mailbox of %s, %s", describe_size(num_slots, *hidden), pinned)

    def _note_arrival_fault(self, decode_req: Any, kind: str, words: str) -> None:
        """Once a request: it is polled until all ranks have it."""
        if getattr(decode_req, "draftgather_fault", None) == kind:
            return
        decode_req.draftgather_fault = kind
        self.stats.bad_rows[kind] += 1
        req = decode_req.req
        logger.warning("draftgather: request %s (bootstrap_room=%s): %s", req.rid, req.bootstrap_room, words)
        record_failure = getattr(getattr(decode_req.kv_receiver, "kv_mgr", None), "record_failure", None)
        if self._aborts and record_failure is not None:
            record_failure(req.bootstrap_room, f"draftgather: {words}")

    @property
    def _aborts(self) -> bool:
        return self.mode is Mode.ON and self.options.bad_rows is BadRows.ABORT

    # -- what is said

    def _note_fault(self, error: DraftRowError | _FormatError) -> bool:
        """Count and log. True for what sglang's builder must not be given: it would go on in silence, or crash.

        That is a fault of the configuration (no batch would be any better), a row whose memory is gone, or a
        record that is another request's by now.
        """
        problems = error.problems if isinstance(error, DraftRowError) else ()
        silent = (RowShapeError, RowDtypeError, SlotError)
        if not problems or any([p.error in silent or p.got.startswith(NO_STORAGE) for p in problems]):
            self.stats.refused += 1
            self._say_once("refused", logging.ERROR, "refused, before anything was written: %s", error)
            return True
        for problem in problems:
            self.stats.bad_rows["missing" if problem.error is MissingRowError else problem.error.__name__] += 1
        logger.warning("draftgather: %s; sglang's own builder serves this batch", error)
        return False

    def _say_once(self, key: str, level: int, message: str, *args: object, exc_info: bool = False) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.log(level, f"draftgather on sglang {self.engine.version}: {message}", *args, exc_info=exc_info)


class _FormatError(RelayError):
    """The configured rows do not fit the future map."""


def _arrival_fault(decode_req: Any, metadata_buffers: Any) -> tuple[str, str] | None:
    """What is wrong with the draft row that has arrived for a request: its kind, and in words."""
    slot = decode_req.metadata_buffer_index
    expected, room = decode_req.req.bootstrap_room or 0, int(metadata_buffers.bootstrap_room[slot, 0])
    if room != expected:
        return "wrong owner", f"its metadata row {slot} belongs to room {room}, expected {expected}"
    # Of the first top-k probabilities none is zero in a row that prefill wrote.
    if not metadata_buffers.output_topk_p[slot].any() and not metadata_buffers.output_hidden_states[slot].any():
        return "unwritten", f"its draft row {slot} is zero: prefill sent none (does it run the same algorithm?)"
    return None
