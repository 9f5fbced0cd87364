"""The Triton kernel, and the cheapest sound way to launch it.

`gather_rows` takes the same `LaunchDescriptor` as its twin on the CPU, `gather_rows_torch`, and writes the
same bytes. Nothing is checked here: `draftgather.check` has done it before.

What can be looked at once (dtypes, alignment, widths, fixed addresses, the compiled variant) is a
`LaunchPlan`; a launch from a plan passes addresses and counts straight to the compiled kernel. That way
nothing is checked, so nothing that a variant was compiled for may differ: see `_kinds_of`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from draftgather.kernels.row_tables import FEW_SLOTS, FieldSource, LaunchDescriptor

logger = logging.getLogger("draftgather")

# One program moves this many bytes of one field's row: 128 threads x 16 bytes.
TILE_BYTES, NUM_THREADS = 2048, 128
_ALIGNMENT = 16


@triton.jit
def _integer_at(words_ptr, row, is_wide, mask):  # type: ignore[no-untyped-def]
    """Integer `row` of a vector, as int64. Read as 32-bit words, int64 and int32 take the same compiled variant."""
    words_ptr += row * tl.where(is_wide, 2, 1)
    low = tl.load(words_ptr, mask=mask, other=0).to(tl.int64)
    high = tl.load(words_ptr + 1, mask=mask & is_wide, other=0).to(tl.int64)
    return tl.where(is_wide, (high << 32) | (low & 0xFFFFFFFF), low)


_SLOT_PARAMETERS = ("slots_01", "slots_23", "slots_45", "slots_67")
_VECTORS = ("slots_ptr", "future_indices_ptr", "seq_lens_ptr", "bonus_tokens_ptr")


# No number is specialised: one variant a field list and way of finding rows, whatever the batch size.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*_SLOT_PARAMETERS, "num_rows", "num_relay_slots", "wide_vectors"],
    do_not_specialize_on_alignment=[*_VECTORS, "seq_lens_buf_ptr", "bonus_tokens_buf_ptr"],
)
def _gather_rows_kernel(  # type: ignore[no-untyped-def]
    slots_ptr,  # [num_rows] integers; None: the four below, or row i of the source
    slots_01,  # two slots of 32 bits each, or None
    slots_23,
    slots_45,
    slots_67,
    source_ptrs,  # a field: pool of rows, or table of addresses [num_rows] int64
    source_strides,  # a field: elements from one row of the pool to the next
    present_ptrs,  # a field: [num_rows] uint8, or None
    output_ptrs,  # a field: [num_padded, WIDTH], or None
    relay_ptrs,  # a field: [num_relay_slots, WIDTH], or None
    valid_ptrs,  # a field: [num_relay_slots] uint8, or None
    future_indices_ptr,  # [num_rows] integers, or None without a relay
    seq_lens_ptr,  # [num_rows] integers, or None
    bonus_tokens_ptr,  # [num_rows] integers
    seq_lens_buf_ptr,  # [num_relay_slots] int64
    bonus_tokens_buf_ptr,  # [num_relay_slots] int64
    num_rows,
    num_relay_slots,
    wide_vectors,  # bits: which of slots, future_indices, seq_lens, bonus_tokens are int64, not int32
    BY_ADDRESS: tl.constexpr,
    SOURCE_DTYPES: tl.constexpr,  # a field: element type of the rows
    ALIGNED: tl.constexpr,  # a field: every row starts at a multiple of 16 bytes
    WIDTHS: tl.constexpr,  # a field
    BLOCKS: tl.constexpr,  # a field: elements a tile, a power of two
):
    # 64 bits before any multiplication: pools pass 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    is_row = row < num_rows

    in_relay = False
    relay_row = row
    if future_indices_ptr is not None:
        relay_row = _integer_at(future_indices_ptr, row, (wide_vectors & 2) != 0, is_row)
        in_relay = is_row & (relay_row >= 0) & (relay_row < num_relay_slots)
        if tile == 0:
            if seq_lens_ptr is not None:
                seq_len = _integer_at(seq_lens_ptr, row, (wide_vectors & 4) != 0, in_relay)
                tl.store(seq_lens_buf_ptr + relay_row, seq_len, mask=in_relay)
            bonus_token = _integer_at(bonus_tokens_ptr, row, (wide_vectors & 8) != 0, in_relay)
            tl.store(bonus_tokens_buf_ptr + relay_row, bonus_token, mask=in_relay)

    slot = row
    if slots_ptr is not None:
        slot = _integer_at(slots_ptr, row, (wide_vectors & 1) != 0, is_row)
    if slots_01 is not None:
        low_pairs = tl.where(row < 2, slots_01.to(tl.int64), slots_23.to(tl.int64))
        high_pairs = tl.where(row < 6, slots_45.to(tl.int64), slots_67.to(tl.int64))
        slot = (tl.where(row < 4, low_pairs, high_pairs) >> ((row & 1) * 32)) & 0x7FFFFFFF

    for f in tl.static_range(len(WIDTHS)):
        start = tile * BLOCKS[f]
        if start < WIDTHS[f]:
            is_present = is_row
            if present_ptrs[f] is not None:
                is_present = tl.load(present_ptrs[f] + row, mask=is_row, other=0) != 0
            columns = start + tl.arange(0, BLOCKS[f])
            # A condition of the whole row goes into the row's end, not into a mask: Triton 3.9's
            # interpreter makes integers of a scalar condition that it spreads over a block.
            source_end = tl.where(is_present, WIDTHS[f], 0)

            if BY_ADDRESS:
                address = tl.load(source_ptrs[f] + row, mask=is_present, other=0)
                source = address.to(tl.pointer_type(SOURCE_DTYPES[f]), bitcast=True)
            else:
                source = source_ptrs[f] + slot * source_strides[f]
            if ALIGNED[f]:
                source = tl.multiple_of(source, 16)
            # The one load of each element; padding and absent rows touch no memory.
            values = tl.load(source + columns, mask=columns < source_end, other=0)

            if output_ptrs[f] is not None:
                output = output_ptrs[f] + row * WIDTHS[f]
                tl.store(output + columns, values.to(output_ptrs[f].dtype.element_ty), mask=columns < WIDTHS[f])
            if relay_ptrs[f] is not None:
                relay = relay_ptrs[f] + relay_row * WIDTHS[f]
                relay_end = tl.where(in_relay, source_end, 0)
                tl.store(relay + columns, values.to(relay_ptrs[f].dtype.element_ty), mask=columns < relay_end)
                if valid_ptrs[f] is not None:
                    if tile == 0:
                        tl.store(valid_ptrs[f] + relay_row, is_present.to(tl.uint8), mask=in_relay)


_MOVE_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRITON_DTYPES = {
    torch.uint8: tl.uint8, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32,
    torch.int64: tl.int64, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32, torch.float64: tl.float64, torch.bool: tl.int1,
}  # fmt: skip
CASTABLE = frozenset(_TRITON_DTYPES)  # dtypes between which rows may be converted


@dataclass(frozen=True, slots=True)
class _Pointer:
    """What the compiler makes of a tensor; to it this is one, without memory."""

    dtype: torch.dtype
    is_aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else 1


class _Arguments(NamedTuple):
    """The kernel's arguments in their order."""

    slots: Any
    slot_pairs: tuple[Any, ...]  # four of them
    sources: tuple[Any, ...]
    strides: tuple[int, ...]
    present: tuple[Any, ...]
    outputs: tuple[Any, ...]
    relayed: tuple[Any, ...]
    valid: tuple[Any, ...]
    vectors: tuple[Any, ...]  # future indices, sequence lengths, bonus tokens
    buffers: tuple[Any, ...]  # of sequence lengths and bonus tokens
    numbers: tuple[int, ...]  # num_rows, num_relay_slots, wide_vectors
    constants: tuple[Any, ...]

    def flat(self) -> tuple[Any, ...]:
        return (
            self.slots, *self.slot_pairs, self.sources, self.strides, self.present, self.outputs, self.relayed,
            self.valid, *self.vectors, *self.buffers, *self.numbers, *self.constants,
        )  # fmt: skip


# For the compiler: numbers of 32 and of 64 bits that nothing is specialised for.
_NUMBER, _LONG = 3, (1 << 40) + 3

_NO_PAIRS = (None,) * (FEW_SLOTS // 2)
_NO_VECTORS = (None,) * 3
_NO_BUFFERS = (None,) * 2


def _arguments(d: LaunchDescriptor) -> _Arguments:
    """Of one launch, pointers as tensors."""
    relay, num_fields = d.relay, len(d.sources)
    sources: list[torch.Tensor | None] = []
    source_dtypes, own_dtypes, strides, aligned = [], [], [], []
    for source, row in zip(d.sources, d.formats, strict=True):
        # Rows that keep their dtype travel as integers, so that no bit of them is interpreted.
        own = _MOVE_AS[row.dtype.itemsize]
        if source.pool is not None:
            pool = source.pool.tensor.view(own)
            sources.append(pool)
            strides.append(pool.stride(0))
            aligned.append((pool.data_ptr() | pool.stride(0) * pool.element_size()) % _ALIGNMENT == 0)
            source_dtype = own
        else:
            assert source.dtype is not None
            if source.dtype is not row.dtype:
                own = row.dtype
            source_dtype = own if source.dtype is row.dtype else source.dtype
            sources.append(source.addresses_ptr)
            strides.append(0)
            aligned.append(source.is_aligned)
        source_dtypes.append(source_dtype)
        own_dtypes.append(own)
    if d.by_address:  # one class for all fields: two variants, not two to the number of fields
        aligned = [all(aligned)] * num_fields

    def views(tables: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([None if t is None else t.tensor.view(own) for t, own in zip(tables, own_dtypes, strict=True)])

    blocks = [
        min(TILE_BYTES // dtype.itemsize, 1 << (row.width - 1).bit_length())
        for dtype, row in zip(source_dtypes, d.formats, strict=True)
    ]
    nothing = (None,) * num_fields
    return _Arguments(
        slots=_words(d.slots),
        slot_pairs=_pairs(d.few_slots),
        sources=tuple(sources),
        strides=tuple(strides),
        present=d.present,
        outputs=views(d.outputs),
        relayed=nothing if relay is None else views(relay.fields),
        valid=nothing if relay is None else tuple([None if v is None else v.view(torch.uint8) for v in relay.valid]),
        vectors=_NO_VECTORS
        if relay is None
        else (_words(relay.future_indices), _words(relay.seq_lens), _words(relay.bonus_tokens)),
        buffers=_NO_BUFFERS if relay is None else (relay.seq_lens_buf.tensor, relay.bonus_tokens_buf.tensor),
        numbers=(d.num_rows, 0 if relay is None else len(relay.bonus_tokens_buf.tensor), _wide_vectors(d)),
        constants=(
            d.by_address,
            tuple([_TRITON_DTYPES[dtype] for dtype in source_dtypes]),
            tuple(aligned),
            tuple([row.width for row in d.formats]),
            tuple(blocks),
        ),
    )


def _words(vector: torch.Tensor | None) -> torch.Tensor | None:
    """A vector of integers as the kernel reads it: dense, in words of 32 bits."""
    if vector is None:
        return None
    # A single number is contiguous at any stride, but torch views it as words at stride 1 only.
    if len(vector) == 1 and vector.stride(0) != 1:
        vector = vector.as_strided((1,), (1,))
    dense = vector.contiguous()
    return dense.view(torch.int32)


def _dense(d: LaunchDescriptor) -> LaunchDescriptor:
    """`d` with dense vectors in its relay; itself where they are."""
    relay = d.relay
    if relay is None:
        return d
    indices, lengths, tokens = relay.future_indices, relay.seq_lens, relay.bonus_tokens
    if indices.is_contiguous() and (lengths is None or lengths.is_contiguous()) and tokens.is_contiguous():
        return d
    lengths = None if lengths is None else lengths.contiguous()
    indices, tokens = indices.contiguous(), tokens.contiguous()
    return d._replace(relay=relay._replace(future_indices=indices, seq_lens=lengths, bonus_tokens=tokens))


def _pairs(few_slots: tuple[int, ...]) -> tuple[int | None, ...]:
    """At most FEW_SLOTS slots, two a parameter."""
    if not few_slots:
        return _NO_PAIRS
    a, b, c, d, e, f, g, h = few_slots + (0,) * (FEW_SLOTS - len(few_slots))
    return a | b << 32, c | d << 32, e | f << 32, g | h << 32


def _wide_vectors(d: LaunchDescriptor) -> int:
    """Bits: which vectors are int64."""
    wide, relay = 0, d.relay
    if d.slots is not None and d.slots.dtype is torch.int64:
        wide = 1
    if relay is not None:
        if relay.future_indices.dtype is torch.int64:
            wide |= 2
        if relay.seq_lens is not None and relay.seq_lens.dtype is torch.int64:
            wide |= 4
        if relay.bonus_tokens.dtype is torch.int64:
            wide |= 8
    return wide


def _grid(d: LaunchDescriptor, constants: tuple[Any, ...]) -> tuple[int, int, int]:
    has_outputs = any([table is not None for table in d.outputs])
    # Without fields there is still a bonus token a row to relay.
    num_tiles = max([-(-width // block) for width, block in zip(*constants[-2:], strict=True)], default=1)
    return d.num_padded if has_outputs else d.num_rows, num_tiles, 1


# -- launching


def num_warps() -> int:
    """For the current device: AMD's warps are 64 threads."""
    return NUM_THREADS // int(driver.active.get_current_target().warp_size)


class _CompiledKernels:
    """The variants of this process, and whether this Triton lets them be run directly.

    They are kept: from Triton 3.8 on a compiled kernel unloads its code when it goes.
    """

    def __init__(self) -> None:
        self._variants: dict[tuple[Any, ...], Any] = {}
        # Not under the interpreter, nor in a form that nobody has looked at.
        known = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9."))
        self.run_directly = known and isinstance(_gather_rows_kernel, JITFunction)

    def get(self, arguments: _Arguments) -> tuple[Any, bool]:
        """The kernel for these arguments, and whether it was compiled just now; None where it is not run directly."""
        if not self.run_directly:
            return None, False
        kinds = _kinds_of(arguments)
        key = (driver.active.get_current_device(), kinds)
        kernel = self._variants.get(key)
        if kernel is not None:
            return kernel, False
        kernel = _gather_rows_kernel.warmup(*kinds.flat(), grid=(1,), num_warps=num_warps())
        if not all([hasattr(kernel, name) for name in ("run", "function", "packed_metadata", "launch_metadata")]):
            self.give_up("a compiled kernel lacks what it is run by")
            return None, False
        self._variants[key] = kernel
        return kernel, True

    def give_up(self, why: str) -> None:
        """Launch in Triton's plain way from now on."""
        self.run_directly = False
        logger.warning("draftgather: %s; launches go Triton's plain way, and take longer", why)


_compiled = _CompiledKernels()


def gather_rows(descriptor: LaunchDescriptor, plan: LaunchPlan | None = None) -> None:
    """Launch the kernel once on the current stream of the current device.

    plan: that of an earlier descriptor which agrees with this one in all that `LaunchPlan` names.
    """
    if descriptor.num_padded == 0:
        return
    if plan is not None:
        plan.launch(descriptor)
        return
    arguments = _arguments(descriptor)
    grid = _grid(descriptor, arguments.constants)
    kernel, _ = _compiled.get(arguments)
    if kernel is None:
        options = {"num_warps": num_warps()} if isinstance(_gather_rows_kernel, JITFunction) else {}
        _gather_rows_kernel[grid](*arguments.flat(), **options)
    else:
        _run(kernel, grid, _addresses(arguments.flat()))


def plan_launches(descriptor: LaunchDescriptor) -> LaunchPlan | None:
    """A plan for launches like this one; compiles the variant where it is new. None: there is no direct way."""
    descriptor = _dense(descriptor)
    arguments = _arguments(descriptor)
    kernel, is_new = _compiled.get(arguments)
    if kernel is None:
        return None
    plan = LaunchPlan(descriptor, arguments, kernel, is_new)
    if plan.arguments(descriptor) != _addresses(arguments.flat()):
        _compiled.give_up("a launch plan gives other arguments than it was made from")
        return None
    return plan


def _kinds_of(arguments: _Arguments) -> _Arguments:
    """All that a variant depends on, which is also what the compiler is given for it."""
    kinds = _Arguments(*_kinds(arguments._replace(constants=())))
    vector = _Pointer(torch.int32, False)  # the compiler does not look at their alignment
    return kinds._replace(
        slots=None if kinds.slots is None else vector,
        slot_pairs=tuple([None if kind is None else _LONG for kind in kinds.slot_pairs]),
        vectors=tuple([None if kind is None else vector for kind in kinds.vectors]),
        constants=arguments.constants,
    )


def _kinds(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple([_kinds(item) for item in argument])
    if isinstance(argument, torch.Tensor):
        return _Pointer(argument.dtype, argument.data_ptr() % _ALIGNMENT == 0)
    return _NUMBER if isinstance(argument, int) else argument


def _addresses(argument: Any) -> Any:
    """Arguments as the compiled kernel takes them."""
    if isinstance(argument, tuple):
        return tuple([_addresses(item) for item in argument])
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _run(kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel. Nothing is checked."""
    active, runtime = driver.active, knobs.runtime
    stream = active.get_current_stream(active.get_current_device())
    enter, leave = _hook(runtime.launch_enter_hook), _hook(runtime.launch_exit_hook)
    run = kernel.run  # loads the code, the first time
    is_watched = enter is not None or leave is not None
    metadata = kernel.launch_metadata(grid, stream, *arguments) if is_watched else None
    run(*grid, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave, *arguments)


def _hook(hook: Any) -> Any:
    """A profiler's hook; None for a chain of none, which the launcher would call all the same."""
    return hook if getattr(hook, "calls", True) else None


class LaunchPlan:
    """What stays the same from launch to launch, looked at once; the rest is put in its place at each.

    Launches of one plan agree in: device; formats; the dtypes and alignment of the sources, and whether they
    are found by address; few slots or many; which fields have an output, a presence, a relay row; and the
    relay's buffers. Who keeps a plan sees to that.
    """

    def __init__(self, descriptor: LaunchDescriptor, arguments: _Arguments, kernel: Any, is_new: bool) -> None:
        self.is_new = is_new  # the variant was compiled for it
        self._kernel = kernel
        self._by_address = descriptor.by_address
        self._has_outputs = any([table is not None for table in descriptor.outputs])
        self._num_tiles = _grid(descriptor, arguments.constants)[1]
        self._nothing = (None,) * len(descriptor.sources)
        self._sources = descriptor.sources
        self._source_addresses = self._addresses_of(descriptor.sources)
        self._has_present = any([present is not None for present in descriptor.present])
        self._relay_tables = _addresses((arguments.relayed, arguments.valid))
        self._buffers = _addresses(arguments.buffers)
        self._num_relay_slots = arguments.numbers[1]
        self._constants = arguments.constants

    def launch(self, d: LaunchDescriptor) -> None:
        """As `gather_rows`, for a descriptor that agrees with the plan's."""
        d = _dense(d)  # copies, if it made any, live until the launch
        grid = (d.num_padded if self._has_outputs else d.num_rows, self._num_tiles, 1)
        _run(self._kernel, grid, self.arguments(d))

    def _addresses_of(self, sources: tuple[FieldSource, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """And the strides of pools."""
        if self._by_address:
            return tuple([s.addresses_ptr.data_ptr() for s in sources]), (0,) * len(sources)  # type: ignore[union-attr]
        pools = [source.pool.tensor for source in sources]  # type: ignore[union-attr]
        return tuple([pool.data_ptr() for pool in pools]), tuple([pool.stride(0) for pool in pools])

    def arguments(self, d: LaunchDescriptor) -> tuple[Any, ...]:
        nothing = self._nothing
        # A mailbox's pools are the same ones at each call.
        sources, strides = self._source_addresses if d.sources is self._sources else self._addresses_of(d.sources)
        vectors: tuple[int | None, ...] = _NO_VECTORS
        if d.relay is not None:
            _, lengths, tokens, *_ = d.relay
            vectors = (
                d.relay.future_indices.data_ptr(), None if lengths is None else lengths.data_ptr(), tokens.data_ptr()
            )  # fmt: skip
        return (
            None if d.slots is None else d.slots.data_ptr(),
            *_pairs(d.few_slots),
            sources,
            strides,
            _addresses(d.present) if self._has_present else nothing,
            tuple([table.tensor.data_ptr() for table in d.outputs]) if self._has_outputs else nothing,  # type: ignore[union-attr]
            *self._relay_tables,
            *vectors,
            *self._buffers,
            d.num_rows,
            self._num_relay_slots,
            _wide_vectors(d),
            *self._constants,
        )
