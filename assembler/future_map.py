"""The relay between iterations: publish and stash now, resolve in the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from draftgather.check import check_future_indices, check_relay_vector
from draftgather.draft_input import EagleDraftInput
from draftgather.errors import RelayError, shown
from draftgather.fields import Field
from draftgather.kernels.row_tables import FieldSource, LaunchDescriptor, RelayTarget, RowFormat, RowTable
from draftgather.launch import launch
from draftgather.machine import Machine, as_device, machine_for
from draftgather.memory import HostBlockCache, allocate_table
from draftgather.notices import tell_refusal
from draftgather.rows import has_memory
from draftgather.slot_numbers import SlotNumbers
from draftgather.tallies import FUTURE_MAPS, FutureMapTally

_POISON = -1
_INTEGER = RowFormat.of(1, torch.int64)
_FLAG = RowFormat.of(1, torch.bool)


class RelayTables(NamedTuple):
    """Where the rows of each of an assembler's fields are relayed to."""

    fields: tuple[RowTable | None, ...]
    valid: tuple[torch.Tensor | None, ...]


class RelayMemory(Protocol):
    """What a launch that relays writes to: a FutureMap, or an engine's own."""

    device: torch.device
    num_slots: int
    slot_numbers: SlotNumbers
    seq_lens_table: RowTable
    bonus_tokens_table: RowTable

    def tables_for(self, fields: Sequence[Field]) -> RelayTables: ...

    def raise_fence(self) -> None: ...


class FutureMap:
    """Draft rows, bonus tokens and sequence lengths by request pool index, at fixed addresses.

    Slot 0 is the padding sink: padded rows of a CUDA graph may write and read it, and nothing in
    it means anything. What the map holds is overwritten by the next stash to the same index; who
    may write when is the scheduler's order of streams, as in sglang: all work runs on the
    caller's current stream.

    debug: rows start poisoned, resolve asserts that what it reads was published and stashed
    since it was last read, and poisons it again (consume once).
    """

    def __init__(
        self,
        fields: Sequence[Field],
        num_slots: int,
        device: torch.device | str = "cpu",
        debug: bool = False,
        *,
        machine: Machine | None = None,
    ) -> None:
        """fields may be empty: a relay of bonus tokens and sequence lengths only (DFLASH).

        machine: what the device can do; None probes it.
        """
        self.fields = tuple(fields)
        if not all([isinstance(field, Field) for field in self.fields]):
            raise ValueError(f"expected a sequence of draftgather.Field, got {shown(self.fields)}")
        if len({field.name for field in self.fields}) < len(self.fields):
            raise ValueError(f"field names repeat: {[field.name for field in self.fields]}")
        if not isinstance(num_slots, int) or isinstance(num_slots, bool) or num_slots < 2:
            raise ValueError(f"num_slots is {num_slots!r}, expected an integer of at least 2 (slot 0 is padding)")
        self.num_slots = num_slots
        self.device = as_device(device)
        self.debug = debug
        self._machine = machine_for(self.device) if machine is None else machine
        self.slot_numbers = SlotNumbers(num_slots)
        self._formats = tuple(field.format for field in self.fields)
        self._tables = tuple(self._table(row) for row in self._formats)
        self._valid = {field.name: self._table(_FLAG) for field in self.fields if field.optional}
        self.seq_lens_table, self.bonus_tokens_table = self._table(_INTEGER), self._table(_INTEGER)
        self._blocks = HostBlockCache()

        # The same memory as tensors: sglang's names for the two vectors, and a tensor a field.
        self.new_seq_lens_buf = self.seq_lens_table.tensor[:, 0]  # [num_slots] int64
        self.output_tokens_buf = self.bonus_tokens_table.tensor[:, 0]  # [num_slots] int64
        self.buffers = {
            field.name: table.tensor for field, table in zip(self.fields, self._tables, strict=True)
        }  # [num_slots, width] a field
        self.valid = {name: table.tensor[:, 0] for name, table in self._valid.items()}  # [num_slots] bool
        self.publish_ready: torch.cuda.Event | None = None
        if debug:
            self.new_seq_lens_buf.fill_(_POISON)
            self.output_tokens_buf.fill_(_POISON)
        self.tally = FUTURE_MAPS.enter(self, FutureMapTally())

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a FutureMap is not copied or pickled: its memory is at fixed addresses")

    # -- what the assembler's fused launch writes

    def tables_for(self, fields: Sequence[Field]) -> RelayTables:
        """A table and a validity vector for each of `fields`, None where this map does not relay it.

        Raises RelayError where this map relays a field that `fields` lacks, or in another width or dtype.
        """
        given = {field.name: field for field in fields}
        for own in self.fields:
            field = given.get(own.name)
            if field is None:
                raise RelayError(f"the future map relays {own.name!r}, which is not one of {sorted(given)}")
            if (field.width, field.dtype) != (own.width, own.dtype):
                raise RelayError(
                    f"{own.name}: the rows are {field.width} {field.dtype}, the future map's {own.width} {own.dtype}"
                )
            if field.optional and not own.optional:
                raise RelayError(f"{own.name} is optional for the rows, but not for the future map")
        tables = {own.name: table for own, table in zip(self.fields, self._tables, strict=True)}
        return RelayTables(tuple(tables.get(f.name) for f in fields), tuple(self.valid.get(f.name) for f in fields))

    def raise_fence(self) -> None:
        """Record that sequence lengths are published: the scheduler waits for this, and only this."""
        if self.device.type == "cuda":
            if self.publish_ready is None:
                self.publish_ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.publish_ready.record(torch.cuda.current_stream(self.device))

    # -- the two-call mode

    def publish(self, future_indices: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Write sequence lengths [b] and raise the fence. An empty batch does nothing."""
        try:
            self._publish(future_indices, seq_lens)
        except Exception as error:
            self._refused("publish", error)
            raise

    def _publish(self, future_indices: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._machine.refuse_capture()
        num_rows = self._check_indices(future_indices)
        check_relay_vector(seq_lens, "seq_lens", num_rows, self.device)
        if num_rows == 0:
            return
        self.new_seq_lens_buf[future_indices.long()] = seq_lens.long()
        self.raise_fence()
        self.tally.published += 1

    def stash(self, future_indices: torch.Tensor, draft_input: Any) -> None:
        """Write the bonus tokens and every field of `draft_input` into the rows of `future_indices`.

        draft_input: an EagleDraftInput, or anything with `bonus_tokens` [b] and an attribute [b, width] a
        field. An optional field that is None makes the rows' validity false; another missing field,
        and any other width, dtype or device, is a RelayError, and nothing is written.
        """
        try:
            self._stash(future_indices, draft_input)
        except Exception as error:
            self._refused("stash", error)
            raise

    def _stash(self, future_indices: torch.Tensor, draft_input: Any) -> None:
        self._machine.refuse_capture()
        num_rows = self._check_indices(future_indices)
        bonus_tokens = getattr(draft_input, "bonus_tokens", None)
        check_relay_vector(bonus_tokens, "bonus_tokens", num_rows, self.device)
        assert isinstance(bonus_tokens, torch.Tensor)
        tensors = [_field_of(draft_input, field.name) for field in self.fields]
        for field, tensor in zip(self.fields, tensors, strict=True):
            self._check_rows(field, tensor, num_rows)
        # Rows that were resolved as invalid stay so.
        known = getattr(draft_input, "valid", {})
        if not isinstance(known, Mapping):
            raise RelayError(f"the draft input's validity is {shown(known)}, expected a mapping by field name")
        for name in self.valid.keys() & known.keys():
            self._check_flags(name, known[name], num_rows)
        if num_rows == 0:
            return

        def presence(field: Field, tensor: torch.Tensor | None) -> torch.Tensor | None:
            if not field.optional:
                return None
            flags: torch.Tensor | None = known.get(field.name)
            if tensor is not None and flags is not None:
                return self._compiled_for(flags).view(torch.uint8)
            # Always flags for the kernel: one compiled variant.
            is_all = tensor is not None and not self._machine.has_kernel
            return None if is_all else torch.full((num_rows,), tensor is not None, device=self.device).view(torch.uint8)

        self._launch(
            num_rows,
            self._formats,
            # The source of an absent field is never looked at: its presence says so.
            sources=tuple(
                FieldSource(pool=self._output(num_rows, row) if t is None else RowTable.over(self._compiled_for(t)))
                for t, row in zip(tensors, self._formats, strict=True)
            ),
            slots=None,
            present=tuple(presence(field, t) for field, t in zip(self.fields, tensors, strict=True)),
            outputs=(None,) * len(self.fields),
            relay=RelayTarget(
                future_indices=future_indices,
                is_in_range=future_indices.is_cpu,
                seq_lens=None,
                bonus_tokens=bonus_tokens,
                seq_lens_buf=self.seq_lens_table,
                bonus_tokens_buf=self.bonus_tokens_table,
                fields=self._tables,
                valid=tuple(self.valid.get(field.name) for field in self.fields),
            ),
        )
        self.tally.stashed += 1

    def resolve(self, batch: Any) -> None:
        """Fill `batch.spec_info` and `batch.seq_lens` with the rows of `batch.spec_info.future_indices`.

        One launch. Row i is that of future_indices[i], after any filter and merge. An optional field
        that `spec_info.present` calls absent becomes None; of the others `spec_info.valid[name]` [b]
        bool tells which rows are real. No draft input, or an empty one: nothing is done.
        """
        start = perf_counter()
        try:
            num_rows = self._resolve(batch)
        except Exception as error:
            self._refused("resolve", error)
            raise
        if num_rows:
            self.tally.resolved_rows += num_rows
            self.tally.resolve_times.count(perf_counter() - start)

    def _resolve(self, batch: Any) -> int:
        """The number of rows."""
        # Before the fence is waited for: a wait for an event of another stream would end the capture.
        self._machine.refuse_capture()
        draft_input = batch.spec_info
        indices = None if draft_input is None else draft_input.future_indices
        # A nested tensor need not have a length: it is refused with its name.
        if indices is None or (not getattr(indices, "is_nested", False) and len(indices) == 0):
            return 0
        num_rows = self._check_indices(indices, may_repeat=True)
        if self.publish_ready is not None:
            self.publish_ready.wait(torch.cuda.current_stream(self.device))
            self.tally.fence_waits += 1
        tables = (*self._tables, *self._valid.values(), self.seq_lens_table, self.bonus_tokens_table)
        formats = (*self._formats, *[_FLAG] * len(self._valid), _INTEGER, _INTEGER)
        outputs = tuple(self._output(num_rows, row) for row in formats)
        self._launch(
            num_rows,
            formats,
            sources=tuple(FieldSource(pool=table) for table in tables),
            slots=indices.contiguous(),
            present=(None,) * len(tables),
            outputs=outputs,
            relay=None,
        )
        seq_lens, bonus_tokens = outputs[-2].tensor[:, 0], outputs[-1].tensor[:, 0]
        if self.debug:
            self._consume(indices, seq_lens, bonus_tokens)
        batch.seq_lens = seq_lens
        draft_input.bonus_tokens = bonus_tokens
        presence = getattr(draft_input, "present", {})
        for field, table in zip(self.fields, outputs, strict=False):
            is_present = presence.get(field.name, True)
            _set_field(draft_input, field.name, table.tensor if is_present else None)
        valid = zip(self._valid, outputs[len(self.fields) :], strict=False)
        draft_input.valid = {name: table.tensor[:, 0] for name, table in valid}
        return num_rows

    # -- inside

    def _refused(self, call: str, error: Exception) -> None:
        self.tally.refusals.count(error)
        tell_refusal(call, error)

    def _table(self, row: RowFormat) -> RowTable:
        return allocate_table(self.num_slots, row, self.device, pin=False)

    def _output(self, num_rows: int, row: RowFormat) -> RowTable:
        if self.device.type == "cpu":
            return self._blocks.table(num_rows, row)
        return RowTable.over(torch.empty((num_rows, row.width), dtype=row.dtype, device=self.device))

    def _launch(
        self,
        num_rows: int,
        formats: tuple[RowFormat, ...],
        *,
        sources: tuple[FieldSource, ...],
        slots: torch.Tensor | None,
        present: tuple[torch.Tensor | None, ...],
        outputs: tuple[RowTable | None, ...],
        relay: RelayTarget | None,
    ) -> None:
        descriptor = LaunchDescriptor(
            num_rows=num_rows,
            num_padded=num_rows,
            sources=sources,
            slots=slots,
            present=present,
            outputs=outputs,
            formats=formats,
            relay=relay,
        )
        launch(descriptor, self._machine)

    def _compiled_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` [b, ...], copied where it lies as no tensor of its own does: that would compile another variant."""
        dense = tensor.resolve_neg().contiguous()
        if self._machine.has_kernel and (dense.data_ptr() % 16 or dense.stride(0) != dense[0].numel()):
            return dense.clone(memory_format=torch.contiguous_format)
        return dense

    def _check_indices(self, future_indices: object, may_repeat: bool = False) -> int:
        """The number of rows."""
        if not isinstance(future_indices, torch.Tensor) or future_indices.ndim != 1:
            raise RelayError(f"future_indices is {shown(future_indices)}, expected a tensor [b] of integers")
        num_rows = len(future_indices)
        check_relay_vector(future_indices, "future_indices", num_rows, self.device)
        if num_rows and future_indices.is_cpu:
            check_future_indices(future_indices, self.slot_numbers, may_repeat)
        return num_rows

    def _check_rows(self, field: Field, tensor: object, num_rows: int) -> None:
        if tensor is None and field.optional:
            return
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
            raise RelayError(f"{field.name} is {shown(tensor)}, expected a tensor [{num_rows}, {field.width}]")
        got = (tuple(tensor.shape), tensor.dtype, tensor.device)
        expected = ((num_rows, field.width), field.dtype, self.device)
        if got == expected and not has_memory(tensor):
            raise RelayError(f"{field.name} has no storage any more")
        if got != expected:
            raise RelayError(
                f"{field.name} is {got[0]} {got[1]} on {got[2]}, expected {expected[0]} {expected[1]} on {expected[2]}"
            )

    def _check_flags(self, name: str, flags: object, num_rows: int) -> None:
        is_flags = isinstance(flags, torch.Tensor) and flags.dtype is torch.bool and has_memory(flags)
        if not is_flags or flags.shape != (num_rows,) or flags.device != self.device:  # type: ignore[attr-defined]
            raise RelayError(f"the validity of {name} is {shown(flags)}, expected a tensor [{num_rows}] of bools")

    def _consume(self, indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor) -> None:
        """Debug: every row read was written since it was last read; poison it for the next."""
        is_fresh = (seq_lens >= 0) & (bonus_tokens >= 0) | (indices == 0)
        if self.device.type == "cpu":
            stale = indices[~is_fresh].tolist()
            if stale:
                raise RelayError(
                    f"future indices {stale} were resolved without a publish and stash since the last time"
                )
        else:
            torch._assert_async(is_fresh.all())
        self.new_seq_lens_buf[indices.long()] = _POISON
        self.output_tokens_buf[indices.long()] = _POISON


@dataclass(frozen=True, slots=True)
class Relay:
    """Publish and stash in the assembler's launch. Tensors lie on the future map's device.

    future_indices: [b] int64 or int32, request pool indices; out-of-range or repeated ones are
        refused where the host can see them (on the CPU, or by `future_indices_cpu`), and otherwise
        out-of-range ones are left out and repeated ones are the caller's duty.
    seq_lens, bonus_tokens: [b] int64 or int32.

    None of the vectors may be a view of what the same launch writes (the future map, fixed outputs): rows are
    read before, vectors are not.
    """

    future_map: RelayMemory
    future_indices: torch.Tensor
    seq_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    future_indices_cpu: torch.Tensor | None = None


def _field_of(draft_input: Any, name: str) -> torch.Tensor | None:
    if isinstance(draft_input, EagleDraftInput):
        return draft_input.rows(name)
    return getattr(draft_input, name, None)


def _set_field(draft_input: Any, name: str, rows: torch.Tensor | None) -> None:
    if isinstance(draft_input, EagleDraftInput):
        draft_input.set_rows(name, rows)
    else:
        setattr(draft_input, name, rows)
