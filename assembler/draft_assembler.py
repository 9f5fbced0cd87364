"""`DraftAssembler`: check, locate, describe, launch, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType, SimpleNamespace

import torch

from draftgather.check import (
    are_slots_good,
    as_int64,
    as_owners,
    as_row_lists,
    check_batch_size,
    check_relay,
    check_request_ids,
    check_row_lists,
    converted_rows,
    plain_rows,
    row_problems,
    slot_problems,
    stacked_rows,
    value_problems,
)
from draftgather.completion import DONE, IN_FLIGHT, CompletionMarker
from draftgather.describe import StagingRing, describe
from draftgather.draft_batch import DraftBatch
from draftgather.draft_input import EagleDraftInput
from draftgather.errors import Problem, RelayError, raise_problems, shown
from draftgather.fields import Field, check_fields
from draftgather.future_map import FutureMap, Relay, RelayMemory, RelayTables
from draftgather.kernels.gather_rows import LaunchPlan
from draftgather.kernels.row_tables import FEW_SLOTS, FieldSource, LaunchDescriptor, RelayTarget, RowTable
from draftgather.launch import launch
from draftgather.locate import Located, locate_rows, locate_slots
from draftgather.machine import Machine, as_device, machine_for
from draftgather.mailbox import DraftMailbox, Int64Array
from draftgather.memory import HostBlockCache
from draftgather.notices import WARNINGS, tell_refusal
from draftgather.outputs import FreshOutputs, OutputMemory, OutputMode, make_outputs
from draftgather.routes import (
    DEFAULT_RULES,
    EMPTY,
    RECORDS_STAGED,
    ROWS_ON_HOST,
    SLOTS_IN_PLACE,
    SLOTS_ON_HOST,
    Route,
    RouteRule,
    staged_by_rule,
)
from draftgather.tallies import ASSEMBLERS, FUTURE_MAPS, MAILBOXES, AssemblerTally


class DraftAssembler:
    """Turns draft rows into batched tensors and future-map rows with one launch, without a host wait.

    Not for several threads at once: one assembler a scheduler thread.

    Memory: "fresh" outputs are the caller's. "fixed" outputs belong to the assembler and keep their
    addresses for its life; the next call overwrites them, and the caller orders that. Rows given to
    `assemble_rows` may be dropped or reused when the call returns if the device is the CPU or they
    came by the route "staged"; by "pointers" on a GPU they must keep their values until
    `batch.done`, and a reference to them is held until then. Rows may be views of what the same call
    writes, the future map or the fixed outputs: they are read before.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        device: torch.device | str = "cpu",
        max_batch_size: int = 512,
        mailbox: DraftMailbox | None = None,
        outputs: OutputMode = "fresh",
        output_memory: OutputMemory = "device",
        *,
        debug: bool = False,
        vocab_size: int | None = None,
        route_rules: Sequence[RouteRule] = DEFAULT_RULES,
        machine: Machine | None = None,
    ) -> None:
        """max_batch_size: most rows of a batch, padding included; more is a CapacityError.

        debug: also look at the rows before each launch: never written (all zero), `topk_index` outside
        `vocab_size`, `topk_p` not finite, a record that was written over since it was put or accepted.
        This reads every row on the host.
        route_rules: when rows in pinned memory are copied rather than read in place; the first that applies.
        machine: what the device can do; None probes it.
        """
        self.fields = check_fields(fields)
        if not isinstance(max_batch_size, int) or isinstance(max_batch_size, bool) or max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size!r}, expected an integer of at least 1")
        self.device = as_device(device)
        self.max_batch_size = max_batch_size
        self.mailbox = mailbox
        self._machine = machine_for(self.device) if machine is None else machine
        if mailbox is not None and not isinstance(mailbox, DraftMailbox):
            raise TypeError(f"mailbox is {shown(mailbox)}, expected a DraftMailbox")
        self._records = () if mailbox is None else mailbox.sources_for(self.fields)
        self._route_rules = tuple(route_rules)
        self._records_route = self._route_of_records()
        self._row_bytes = sum([field.row_bytes for field in self.fields])
        self.debug = debug
        self.vocab_size = vocab_size
        self._outputs = make_outputs(self.fields, max_batch_size, self.device, self._machine, outputs, output_memory)
        self._formats = tuple(field.format for field in self.fields)
        self._optional = tuple(field.optional for field in self.fields)
        self._names = tuple(field.name for field in self.fields)
        self._no_outputs = (None,) * len(self.fields)
        self._no_rows = {field.name: self._zeros(0, field) for field in self.fields}
        self._all_present = MappingProxyType(dict.fromkeys(self._names, True))
        self._blocks = HostBlockCache()
        self._ring: StagingRing | None = None
        if self._machine.has_kernel:
            self._ring = StagingRing(StagingRing.bytes_for(self.fields, max_batch_size), self._machine.pins)
        self._last_relay: tuple[RelayMemory, RelayTables] | None = None
        self._plans: dict[object, LaunchPlan] = {}
        self._is_warm = False
        self.tally = ASSEMBLERS.enter(self, AssemblerTally())
        if self._ring is not None:
            self.tally.staging = self._ring.counts

    # -- the two ways in

    def assemble_slots(
        self,
        slots: Sequence[int] | torch.Tensor | Int64Array,
        owners: Sequence[int] | torch.Tensor | Int64Array | None = None,
        request_ids: Sequence[object] | None = None,
        *,
        relay: Relay | None = None,
        pad_to: int | None = None,
        batch_outputs: bool = True,
    ) -> DraftBatch:
        """Assemble records of the mailbox: row i is that of slots[i] (a slot may repeat).

        slots, owners: [b] integers on the host. With owners, each record must be its owner's.
        relay: publish and stash in the same launch. pad_to: rows b.. of the batch are zero.
        batch_outputs=False: write the relay only.
        Raises SlotError, RelayError, CapacityError or CaptureError before anything is written.
        """
        start = perf_counter()
        try:
            batch = self._assemble_slots(slots, owners, request_ids, relay, pad_to, batch_outputs)
        except Exception as error:
            self._refused("assemble_slots", error)
            raise
        self.tally.count(self.tally.slots_times, batch.route, batch.num_rows, perf_counter() - start)
        return batch

    def _assemble_slots(
        self,
        slots: Sequence[int] | torch.Tensor | Int64Array,
        owners: Sequence[int] | torch.Tensor | Int64Array | None,
        request_ids: Sequence[object] | None,
        relay: Relay | None,
        pad_to: int | None,
        batch_outputs: bool,
    ) -> DraftBatch:
        self._machine.refuse_capture()
        mailbox = self._the_mailbox()
        numbers = as_int64(slots, "slots")
        tags = as_owners(owners, len(numbers))
        num_padded = self._check_call(len(numbers), request_ids, relay, pad_to, batch_outputs)
        read, done = mailbox.begin_read(numbers), DONE
        try:
            if not are_slots_good(mailbox, numbers, tags):
                raise_problems(slot_problems(mailbox, numbers, tags, request_ids))
            if self.debug:
                raise_problems(mailbox.late_writes(numbers, request_ids))
                rows = [[mailbox.row(field.name, slot) for slot in numbers.tolist()] for field in self.fields]
                raise_problems(value_problems(self.fields, rows, request_ids, self.vocab_size))
            route = self._records_route
            if self._route_rules and route is SLOTS_IN_PLACE:
                route = staged_by_rule(self._route_rules, self._machine, len(numbers), self._row_bytes) or route
            located = locate_slots(mailbox, self._records, route, numbers)
            batch = self._launch(located, relay, num_padded, batch_outputs)
            if located.route == "slots":
                done = batch.done
        finally:
            mailbox.end_read(read, done)
        return batch

    def assemble_rows(
        self,
        request_ids: Sequence[object] | None = None,
        *,
        relay: Relay | None = None,
        pad_to: int | None = None,
        batch_outputs: bool = True,
        **rows: Iterable[object] | None,
    ) -> DraftBatch:
        """Assemble separate rows: a keyword a field, each with a list of b rows, in the batch's order.

        A row is a tensor [width] on the CPU or the assembler's device (at any address, of any stride),
        a NumPy array, or a list. An optional field's list may be left out, or hold None.
        The rest as for `assemble_slots`. Raises MissingRowError, RowShapeError, RowDtypeError,
        RowDeviceError, RelayError, CapacityError or CaptureError before anything is written.
        """
        start = perf_counter()
        try:
            batch = self._assemble_rows(request_ids, relay, pad_to, batch_outputs, rows)
        except Exception as error:
            self._refused("assemble_rows", error)
            raise
        self.tally.count(self.tally.rows_times, batch.route, batch.num_rows, perf_counter() - start)
        return batch

    def _assemble_rows(
        self,
        request_ids: Sequence[object] | None,
        relay: Relay | None,
        pad_to: int | None,
        batch_outputs: bool,
        rows: Mapping[str, Iterable[object] | None],
    ) -> DraftBatch:
        self._machine.refuse_capture()
        lists = as_row_lists(rows)
        num_rows = check_row_lists(self.fields, lists)
        num_padded = self._check_call(num_rows, request_ids, relay, pad_to, batch_outputs)
        if num_rows == 0:
            return self._empty(num_padded, batch_outputs)
        if self._machine.has_kernel:
            plain = [plain_rows(field, lists.get(field.name), self.device) for field in self.fields]
        else:
            plain = [stacked_rows(field, lists.get(field.name), self._blocks) for field in self.fields]
        sources, is_copied = [source for source in plain if source is not None], False
        if len(sources) < len(plain):
            raise_problems(row_problems(self.fields, lists, request_ids, self.device))
            sources, is_copied = self._converted(plain, lists, num_rows)
        if self.debug:
            values = [source.rows for source in sources]
            raise_problems(value_problems(self.fields, values, request_ids, self.vocab_size))
        located = locate_rows(self.fields, sources, is_copied, request_ids, self._machine, self._route_rules)
        return self._launch(located, relay, num_padded, batch_outputs)

    def stacked(self, rows: Mapping[str, Sequence[object]]) -> dict[str, torch.Tensor] | None:
        """What `assemble_rows` gives for lists of one length, without its other steps, on the CPU: [b, width] a field.

        None where it takes more: a device, debug mode, fixed outputs, or a row that is not plainly right.
        """
        start = perf_counter()
        if self._machine.has_kernel or self.debug or not isinstance(self._outputs, FreshOutputs):
            return None
        tensors, num_rows = {}, 0
        for field in self.fields:
            source = stacked_rows(field, rows[field.name], self._blocks)
            if source is None or source.stacked is None:
                return None
            tensors[field.name] = source.stacked.tensor
            num_rows = len(source.rows)
        self.tally.count(self.tally.rows_times, ROWS_ON_HOST, num_rows, perf_counter() - start)
        return tensors

    # -- the same checks without raising

    def check_slots(
        self,
        slots: Sequence[int] | torch.Tensor | Int64Array,
        owners: Sequence[int] | torch.Tensor | Int64Array | None = None,
        request_ids: Sequence[object] | None = None,
    ) -> list[Problem]:
        """Every slot that `assemble_slots` would refuse (not: relay, capacity, debug values); empty when none."""
        numbers = as_int64(slots, "slots")
        check_request_ids(request_ids, len(numbers))
        return slot_problems(self._the_mailbox(), numbers, as_owners(owners, len(numbers)), request_ids)

    def check_rows(self, request_ids: Sequence[object] | None = None, **rows: Iterable[object] | None) -> list[Problem]:
        """Every row that `assemble_rows` would refuse (not: relay, capacity, debug values); empty when none."""
        lists = as_row_lists(rows)
        check_request_ids(request_ids, check_row_lists(self.fields, lists))
        return row_problems(self.fields, lists, request_ids, self.device)

    def warmup(self) -> None:
        """Compile and load every variant that serving uses, so that none is compiled later.

        Touches memory of the assembler's own only. Waits for the compiler: for start-up.
        """
        try:
            self._warm_up()
        except FileNotFoundError:
            # Another process tidied the compiler's cache folder at that moment. Once is bad luck, twice is a fault.
            self._warm_up()

    @property
    def num_staging_buffers(self) -> int:
        """How far the staging ring has grown; 0 where rows are never staged for a device."""
        return 0 if self._ring is None else self._ring.num_buffers

    # -- inside

    def _refused(self, call: str, error: Exception) -> None:
        self.tally.refusals.count(error)
        tell_refusal(call, error)

    def _warm_up(self) -> None:
        many = FEW_SLOTS + 1
        mailbox = DraftMailbox(self.fields, 1, pin_memory=self._machine.pins)
        MAILBOXES.leave_out(mailbox.tally)
        mailbox.put(
            0, 0, **{field.name: torch.zeros(field.width, dtype=field.dtype, device="cpu") for field in self.fields}
        )
        own = DraftAssembler(self.fields, self.device, many, mailbox, machine=self._machine)
        ASSEMBLERS.leave_out(own.tally)
        future_map = FutureMap(self.fields, many + 1, self.device, machine=self._machine)
        FUTURE_MAPS.leave_out(future_map.tally)
        indices = torch.arange(1, many + 1, device=self.device)
        relay, relay_one = (Relay(future_map, i, i, i) for i in (indices, indices[:1]))
        # At addresses that are multiples of 16, and at others.
        blocks = {f.name: torch.zeros(f.width + 1, dtype=f.dtype, device=self.device) for f in self.fields}
        aligned = {name: [block[:-1]] for name, block in blocks.items()}
        odd = {name: [block[1:]] for name, block in blocks.items()}
        for outputs, has_relay in ((True, False), (True, True), (False, True)):
            own.assemble_slots([0], relay=relay_one if has_relay else None, batch_outputs=outputs)
            own.assemble_slots([0] * many, relay=relay if has_relay else None, batch_outputs=outputs)
            for rows in (aligned, odd):
                own.assemble_rows(None, relay=relay_one if has_relay else None, batch_outputs=outputs, **rows)  # type: ignore[arg-type]
        # A future map of the same fields launches the same variants, whatever its size.
        running = SimpleNamespace(spec_info=EagleDraftInput(future_indices=indices), seq_lens=indices)
        future_map.resolve(running)
        future_map.stash(indices, running.spec_info)
        self._is_warm = True

    def _route_of_records(self) -> Route:
        if not self._machine.has_kernel:
            return SLOTS_ON_HOST
        pools = [source.pool for source in self._records]
        can_read = all([pool is not None and self._machine.can_read(pool.tensor) for pool in pools])
        return SLOTS_IN_PLACE if can_read else RECORDS_STAGED

    def _the_mailbox(self) -> DraftMailbox:
        if self.mailbox is None:
            raise ValueError("this assembler was made without a mailbox: DraftAssembler(..., mailbox=...)")
        return self.mailbox

    def _check_call(
        self,
        num_rows: int,
        request_ids: Sequence[object] | None,
        relay: Relay | None,
        pad_to: int | None,
        batch_outputs: bool,
    ) -> int:
        """The checks that do not look at rows. The number of rows of the outputs."""
        num_padded = check_batch_size(num_rows, pad_to, self.max_batch_size)
        check_request_ids(request_ids, num_rows)
        if relay is not None:
            if not isinstance(relay, Relay) or not hasattr(relay.future_map, "tables_for"):
                raise TypeError(f"relay is {shown(relay)}, expected a Relay to a FutureMap")
            if relay.future_map.device != self.device:
                raise RelayError(f"the future map is on {relay.future_map.device}, the assembler on {self.device}")
            self._relay_tables(relay.future_map)
            check_relay(relay, num_rows, self.device)
        elif not batch_outputs:
            raise ValueError("batch_outputs=False without a relay would write nothing")
        return num_padded

    def _converted(
        self, plain: Sequence[FieldSource | None], rows: Mapping[str, Sequence[object] | None], num_rows: int
    ) -> tuple[list[FieldSource], bool]:
        """The sources, those converted that are not plain; and whether some rows were copied for that."""
        converted = [
            (source, False) if source is not None else converted_rows(field, rows.get(field.name), num_rows)
            for field, source in zip(self.fields, plain, strict=True)
        ]
        return [source for source, _ in converted], any(is_copied for _, is_copied in converted)

    def _launch(self, located: Located, relay: Relay | None, num_padded: int, batch_outputs: bool) -> DraftBatch:
        if located.num_rows == 0:
            return self._empty(num_padded, batch_outputs)
        outputs = self._outputs.take(num_padded, located.sources) if batch_outputs else self._no_outputs
        staging = None if self._ring is None else self._ring.take()
        target = None if relay is None else self._relay_target(relay)
        descriptor = describe(
            self._formats, self._optional, located, outputs, num_padded, target, staging, self._machine
        )
        done = launch(descriptor, self._machine, self._plan_for(located.route, descriptor))
        if relay is not None:
            relay.future_map.raise_fence()
        if staging is not None:
            if staging.is_used:
                staging.marker = done
            IN_FLIGHT.hold(done, (descriptor, staging.slab))
        return self._batch(located, outputs, done, num_padded)

    def _plan_for(self, route: Route, d: LaunchDescriptor) -> LaunchPlan | None:
        """The plan of an earlier launch like this one. Plans hold a relay's addresses: `_relay_tables` drops them."""
        if self._ring is None:
            return None
        rows = tuple([(s.dtype, s.is_aligned) for s in d.sources]) if route == "pointers" else None
        key = (route, bool(d.few_slots), d.relay is None, d.outputs is self._no_outputs, rows)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._machine.plan(d)
            if plan is None:
                return None
            self._plans[key] = plan
            if plan.is_new and self._is_warm:
                self.tally.late_compiles += 1
                WARNINGS.warn(
                    "late compile",
                    "a kernel was compiled after warm-up, which takes long: route %s, rows of %s. Please "
                    "report it, unless rows come in another dtype than their field's",
                    route,
                    [str(s.dtype) for s in d.sources] if rows else self._names,
                )
        return plan

    def _batch(
        self, located: Located, outputs: Sequence[RowTable | None], done: CompletionMarker, num_padded: int
    ) -> DraftBatch:
        tensors = {name: table.tensor for name, table in zip(self._names, outputs, strict=True) if table is not None}
        present: Mapping[str, bool] = self._all_present
        if not located.all_present:
            present = {name: absent is None for name, absent in zip(self._names, located.present, strict=True)}
            tensors = {name: tensor for name, tensor in tensors.items() if present[name]}
        return DraftBatch(tensors, located.route, present, done, located.num_rows, num_padded)

    def _empty(self, num_padded: int, batch_outputs: bool) -> DraftBatch:
        """No rows: typed tensors of padding only, nothing launched, nothing relayed."""
        tensors, done = {}, DONE
        if batch_outputs and num_padded:
            tensors = {n: table.tensor for n, table in zip(self._names, self._outputs.take(num_padded), strict=True)}
            # Zeroing padding is work on the stream like any other.
            done = self._machine.zero(list(tensors.values()))
            if self._machine.has_kernel:
                IN_FLIGHT.hold(done, tensors)
        elif batch_outputs:
            tensors = dict(self._no_rows)
        return DraftBatch(tensors, EMPTY, self._all_present, done, 0, num_padded)

    def _zeros(self, num_rows: int, field: Field) -> torch.Tensor:
        return torch.zeros((num_rows, field.width), dtype=field.dtype, device=self.device)

    def _relay_tables(self, future_map: RelayMemory) -> RelayTables:
        """The map's tables for our fields; checked once for each map."""
        if self._last_relay is None or self._last_relay[0] is not future_map:
            self._last_relay = (future_map, future_map.tables_for(self.fields))
            self._plans.clear()
        return self._last_relay[1]

    def _relay_target(self, relay: Relay) -> RelayTarget:
        tables = self._relay_tables(relay.future_map)
        return RelayTarget(
            future_indices=relay.future_indices,
            seq_lens=relay.seq_lens,
            bonus_tokens=relay.bonus_tokens,
            seq_lens_buf=relay.future_map.seq_lens_table,
            bonus_tokens_buf=relay.future_map.bonus_tokens_table,
            fields=tables.fields,
            valid=tables.valid,
            is_in_range=relay.future_indices.is_cpu,
        )
