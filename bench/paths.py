"""The paths that are compared: the same rows into the same batch and relay, by each baseline and by ours.

Baselines upload to a GPU. Without one nothing is uploaded, and `RowPath.on_cpu` says what stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

import draftgather as dg
from draftgather.bench.torch_stack import METADATA_WIDTH, ArrivedRow, StackedBatch, StackRelay, stack_rows

# What relays hold before a path is checked: it must have written, and nothing but its own rows.
_POISON = 0xA5

PLAIN, FLOOR = "torch.stack", "memcpy"


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one call, made before it is timed, as a scheduler has them at hand."""

    slots: list[int]
    rows: list[ArrivedRow]
    indices: torch.Tensor  # [b] future indices
    seq_lens: torch.Tensor  # [b]
    bonus_tokens: torch.Tensor  # [b]
    start: int  # of the floor's rows, which lie one after the other


@dataclass(frozen=True, slots=True)
class RowPath:
    """One way from rows to a batch; with overlap also into the relay."""

    name: str
    on_cpu: str | None  # what is done, in words; None: needs a GPU
    on_gpu: str
    call: Callable[[Workload, Batch, bool], object]  # with overlap or not: a DraftBatch, StackedBatch or packed bytes
    relay: str = "stack"  # which it writes: stack | future map | packed

    def in_words(self, device: torch.device) -> str | None:
        """None: not on this device."""
        return self.on_gpu if device.type == "cuda" else self.on_cpu


class BytesDiffer(Exception):
    """A path has not written what torch.stack writes: there are no figures."""


class KeptBuffers:
    """Host buffers used again at each call, pinned beside a GPU; a call waits for the upload of the one before."""

    def __init__(self, rows: Sequence[torch.Tensor], num_rows: int, device: torch.device) -> None:
        """rows: one of each field."""
        self._device, self._is_cuda = device, device.type == "cuda"
        self.buffers = [torch.empty((num_rows, *r.shape), dtype=r.dtype, pin_memory=self._is_cuda) for r in rows]
        self._uploaded: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Copies on the device; on the CPU copies all the same, as the buffers are not the caller's."""
        if not self._is_cuda:
            return [tensor.clone() for tensor in tensors]
        uploaded = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        if self._uploaded is None:
            self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._uploaded.record()
        return uploaded


class Workload:
    """A pool of rows, in every form in which a path takes them, and the relays."""

    def __init__(
        self,
        hidden_size: int,
        topk: int,
        num_steps: int,
        dtype: torch.dtype,
        pool: int,
        max_batch_size: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.device, self.is_cuda, self.num_states = device, device.type == "cuda", topk * num_steps
        self.fields = dg.eagle_fields(topk, hidden_size, dtype, num_steps)
        width = max(METADATA_WIDTH, self.num_states)
        self.rows = [
            ArrivedRow(
                torch.rand(width, generator=generator),
                torch.randint(0, 1 << 17, (width,), generator=generator),
                torch.randn(hidden_size, generator=generator).to(dtype),
            )
            for _ in range(pool)
        ]
        self.mailbox = dg.DraftMailbox(self.fields, pool, pin_memory=None if self.is_cuda else False)
        for slot, row in enumerate(self.rows):
            self.mailbox.put(slot, slot, **self.narrow(row))
        self.order: list[int] = torch.randperm(pool, generator=generator).tolist()
        self.relay_order = torch.randperm(pool, generator=generator) + 1

        narrow = [self.narrow(row) for row in self.rows]
        self._pool = [self._host_table([row[field.name] for row in narrow]) for field in self.fields]
        # The floor's: whole rows, one after the other in the order of the batches.
        packed = torch.cat([table.view(torch.uint8) for table in self._pool], 1)[self.order]
        self._packed = self._host_table(list(packed))
        self._views = [list(self._seen_by_device(table)) for table in self._pool]

        first = self.rows[0]
        arrived = (first.topk_p, first.topk_index, first.hidden_states)
        self._stacks = KeptBuffers(arrived, max_batch_size, device)
        self._arena = KeptBuffers([torch.cat([row.view(torch.uint8) for row in arrived])], max_batch_size, device)
        self._selected = KeptBuffers([table[0] for table in self._pool], max_batch_size, device)

        self.future_map = dg.FutureMap(self.fields, pool + 1, device)
        self._relay = StackRelay(pool + 1, self.num_states, hidden_size, dtype, device)
        self._packed_relay = torch.empty_like(packed, device=device)
        self._copied = torch.empty_like(packed[:max_batch_size], device=device)
        self._by_slot = dg.DraftAssembler(self.fields, device, max_batch_size, self.mailbox)
        wide = [replace(field, leading=field.name != "hidden_states") for field in self.fields]
        self._by_row = dg.DraftAssembler(wide, device, max_batch_size)
        for assembler in (self._by_slot, self._by_row):
            assembler.warmup()
        # Steady state: every page of the relays has been written before.
        for buffer in (*self._relay_buffers("stack"), *self._relay_buffers("future map"), self._packed_relay):
            buffer.fill_(1)

    def batches(self, num_rows: int, is_hot: bool) -> list[Batch]:
        """The whole pool, each row in one batch; one batch only where it is to be hot."""
        batches = []
        for start in range(0, len(self.order) - num_rows + 1, num_rows):
            slots = self.order[start : start + num_rows]
            indices = self.relay_order[start : start + num_rows].to(self.device)
            rows = [self.rows[slot] for slot in slots]
            batches.append(Batch(slots, rows, indices, indices + 1000, indices + 7, start))
            if is_hot:
                break
        return batches

    def narrow(self, row: ArrivedRow) -> dict[str, torch.Tensor]:
        """As `put` takes it."""
        top = slice(self.num_states)
        return {"topk_p": row.topk_p[top], "topk_index": row.topk_index[top], "hidden_states": row.hidden_states}

    def check_equal(self, paths: Sequence[RowPath], batch: Batch, overlap: bool) -> None:
        """BytesDiffer unless each path writes the plain path's bytes, and with overlap its relay rows and vectors."""
        expected: dict[str, torch.Tensor] = {}
        for path in (PATHS[0], *paths):
            written = self._written(path, batch, overlap)
            expected = expected or written
            for name, got in written.items():
                if not torch.equal(got, expected[name]):
                    raise BytesDiffer(
                        f"{path.name}: {name} differs from {PLAIN}, at {len(batch.slots)} rows: no figures"
                    )

    # -- baselines

    def torch_stack(self, batch: Batch, overlap: bool) -> StackedBatch:
        return self._relayed(batch, overlap, stack_rows(batch.rows, self.num_states, self.device))

    def pinned_stack(self, batch: Batch, overlap: bool) -> StackedBatch:
        self._stacks.wait()
        stacked = [
            torch.stack(rows, out=buffer[: len(rows)])
            for rows, buffer in zip(_columns(batch.rows), self._stacks.buffers, strict=True)
        ]
        return self._relayed(batch, overlap, self._leading(*self._stacks.upload(*stacked)))

    def one_arena(self, batch: Batch, overlap: bool) -> StackedBatch:
        self._arena.wait()
        topk_p, topk_index, hidden_states = _columns(batch.rows)
        arena, end = self._arena.buffers[0].view(-1), 0
        blocks = []
        # The widest elements first: every block is aligned.
        for rows in (topk_index, topk_p, hidden_states):
            start, end = end, end + len(rows) * rows[0].nbytes
            torch.stack(rows, out=arena[start:end].view(rows[0].dtype).view(len(rows), -1))
            blocks.append((start, end, rows[0].dtype))
        (uploaded,) = self._arena.upload(arena[:end])
        index, p, hidden = (uploaded[start:end].view(dtype).view(len(batch.rows), -1) for start, end, dtype in blocks)
        return self._relayed(batch, overlap, self._leading(p, index, hidden))

    def index_select(self, batch: Batch, overlap: bool) -> StackedBatch:
        slots = torch.tensor(batch.slots)
        if not self.is_cuda:
            return self._relayed(batch, overlap, StackedBatch(*(table.index_select(0, slots) for table in self._pool)))
        self._selected.wait()
        selected = [
            torch.index_select(table, 0, slots, out=buffer[: len(slots)])
            for table, buffer in zip(self._pool, self._selected.buffers, strict=True)
        ]
        return self._relayed(batch, overlap, StackedBatch(*self._selected.upload(*selected)))

    def zero_copy_stack(self, batch: Batch, overlap: bool) -> StackedBatch:
        stacked = [torch.stack([views[slot] for slot in batch.slots]) for views in self._views]
        return self._relayed(batch, overlap, StackedBatch(*stacked))

    def foreach_copy(self, batch: Batch, overlap: bool) -> StackedBatch:
        stacked = []
        for views in self._views:
            rows = [views[slot] for slot in batch.slots]
            stacked.append(torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, device=self.device))
            torch._foreach_copy_(stacked[-1].unbind(), rows)
        return self._relayed(batch, overlap, StackedBatch(*stacked))

    def memcpy(self, batch: Batch, overlap: bool) -> torch.Tensor:
        rows = slice(batch.start, batch.start + len(batch.slots))
        # Into kept memory: in fresh memory, a new mapping's page faults would be part of the floor.
        copied = self._copied[: len(batch.slots)]
        copied.copy_(self._packed[rows], non_blocking=True)
        if overlap:
            self._packed_relay[rows].copy_(copied)
        return copied

    def _leading(self, topk_p: torch.Tensor, topk_index: torch.Tensor, hidden_states: torch.Tensor) -> StackedBatch:
        """Whole rows were uploaded: the batch's top-k are strided views."""
        return StackedBatch(topk_p[:, : self.num_states], topk_index[:, : self.num_states], hidden_states)

    def _relayed(self, batch: Batch, overlap: bool, stacked: StackedBatch) -> StackedBatch:
        """Every baseline publishes and stashes alike: an index_put a buffer."""
        if overlap:
            self._relay.publish(batch.indices, batch.seq_lens)
            self._relay.stash(batch.indices, stacked, batch.bonus_tokens)
        return stacked

    # -- ours

    def assemble_slots(self, batch: Batch, overlap: bool) -> dg.DraftBatch:
        return self._by_slot.assemble_slots(batch.slots, batch.slots, relay=self._our_relay(batch, overlap))

    def assemble_rows(self, batch: Batch, overlap: bool) -> dg.DraftBatch:
        topk_p, topk_index, hidden_states = _columns(batch.rows)
        return self._by_row.assemble_rows(
            topk_p=topk_p,
            topk_index=topk_index,
            hidden_states=hidden_states,
            relay=self._our_relay(batch, overlap),
        )

    def _our_relay(self, batch: Batch, overlap: bool) -> dg.Relay | None:
        return dg.Relay(self.future_map, batch.indices, batch.seq_lens, batch.bonus_tokens) if overlap else None

    # -- what a path has written

    def _written(self, path: RowPath, batch: Batch, overlap: bool) -> dict[str, torch.Tensor]:
        """Bytes on the host: the batch's rows [b, row_bytes], the relay's, and what is relayed beside rows."""
        buffers = [_as_bytes(buffer) for buffer in self._relay_buffers(path.relay)]
        where = slice(batch.start, batch.start + len(batch.slots)) if path.relay == "packed" else batch.indices
        for buffer in buffers:
            buffer[where] = _POISON
        result = path.call(self, batch, overlap)
        if isinstance(result, dg.DraftBatch):
            tensors = [result.tensors[field.name] for field in self.fields]
        elif isinstance(result, StackedBatch):
            tensors = [getattr(result, field.name) for field in self.fields]
        else:
            assert isinstance(result, torch.Tensor)
            tensors = [result]
        if len(tensors) > 1:
            for tensor, field in zip(tensors, self.fields, strict=True):
                if (tensor.dtype, tensor.shape, tensor.device.type) != (
                    field.dtype, (len(batch.slots), field.width), self.device.type,
                ):  # fmt: skip
                    raise BytesDiffer(f"{path.name}: {field.name} has another shape, dtype or device: no figures")
        written = {
            "batch": torch.cat([_as_bytes(tensor.contiguous()) for tensor in tensors], 1).cpu(),
            "relay": torch.cat([buffer[where] for buffer in buffers[: len(tensors)]], 1).cpu(),
        }
        if path.relay != "packed":
            written["relayed seq_lens or bonus tokens"] = torch.cat([buffer[where] for buffer in buffers[-2:]], 1).cpu()
        return written

    def _relay_buffers(self, relay: str) -> list[torch.Tensor]:
        """In the order of the fields, then sequence lengths and bonus tokens."""
        if relay == "packed":
            return [self._packed_relay]
        if relay == "future map":
            ours = self.future_map
            return [*(ours.buffers[f.name] for f in self.fields), ours.new_seq_lens_buf, ours.output_tokens_buf]
        return [*(getattr(self._relay, f.name) for f in self.fields), self._relay.seq_lens, self._relay.bonus_tokens]

    # -- small things

    def _host_table(self, rows: list[torch.Tensor]) -> torch.Tensor:
        table = torch.stack(rows)
        return table.pin_memory() if self.is_cuda else table

    def _seen_by_device(self, table: torch.Tensor) -> torch.Tensor:
        """The same memory as the device addresses it."""
        if not self.is_cuda:
            return table
        words = table.view(torch.uint8)
        described = type("Pinned", (), {})()
        described.__cuda_array_interface__ = {
            "shape": tuple(words.shape), "typestr": "|u1", "data": (words.data_ptr(), False), "version": 2,
        }  # fmt: skip
        return torch.as_tensor(described, device=self.device).view(table.dtype)


def _columns(rows: Sequence[ArrivedRow]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    return [row.topk_p for row in rows], [row.topk_index for row in rows], [row.hidden_states for row in rows]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n, row_bytes] of [n, width] or [n]: the same memory."""
    return (tensor.unsqueeze(1) if tensor.ndim == 1 else tensor).view(torch.uint8)


# The first is the plain one, with which the others are compared; the last is the floor.
PATHS = (
    RowPath(
        PLAIN,
        "2N slices and a stack a field, each into fresh memory",
        "2N slices and a stack a field, each into fresh pinned memory, an upload a field",
        Workload.torch_stack,
    ),
    RowPath(
        "pinned stack",
        "a stack of whole rows a field into kept memory, then a copy in place of the upload",
        "a stack of whole rows a field into kept pinned memory, an upload a field",
        Workload.pinned_stack,
    ),
    RowPath(
        "arena",
        "the same stacks into one kept block, then one copy in place of the upload",
        "the same stacks into one kept pinned block, one upload",
        Workload.one_arena,
    ),
    RowPath(
        "index_select",
        "of a pool with a row a slot, straight into the batch",
        "of a host pool with a row a slot into kept pinned memory, an upload a field",
        Workload.index_select,
    ),
    RowPath(
        "zero-copy stack", None, "a stack a field over the device's views of pinned rows", Workload.zero_copy_stack
    ),
    RowPath(
        "foreach_copy",
        None,
        "torch._foreach_copy_ a field from the device's views of pinned rows",
        Workload.foreach_copy,
    ),
    RowPath(
        "slots",
        "draftgather, rows in the mailbox",
        "draftgather, rows in the pinned mailbox",
        Workload.assemble_slots,
        "future map",
    ),
    RowPath(
        "rows",
        "draftgather, separate tensors",
        "draftgather, separate pageable tensors",
        Workload.assemble_rows,
        "future map",
    ),
    RowPath(
        FLOOR,
        "the floor: a memcpy of the same bytes into kept memory, with overlap a second one",
        "the floor: an upload of the same bytes from pinned memory, with overlap a copy on the device",
        Workload.memcpy,
        "packed",
    ),
)
