"""A whole batch, its relay included, by every way that a decode node could go: the same rows, the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

import draftgather as dg
from draftgather.bench.demo import same_bytes
from draftgather.bench.gpu_device import Device
from draftgather.bench.torch_stack import METADATA_WIDTH, ArrivedRow, StackedBatch, StackRelay, stack_rows

TOPK = 4
Rows = list[torch.Tensor]  # [b] rows of one field
Path = Callable[[], Sequence[torch.Tensor]]  # gives the batch's tensors

STOCK, TEN_LINES, VIEWS = "stock: torch.stack", "stack into kept pinned memory", "torch.stack of zero-copy views"
ARENA, FOREACH = "one pinned arena, one upload", "_foreach_copy_ of pinned rows"
SLOTS, FROM_DEVICE, FROM_PINNED, STAGED = "slots", "pointers, device rows", "pointers, pinned rows", "staged rows"
OURS = (SLOTS, FROM_DEVICE, FROM_PINNED, STAGED)
OTHERS = (STOCK, TEN_LINES, VIEWS, ARENA, FOREACH)


class BatchPaths:
    """One batch of `num_rows`, hot: the same rows at each call.

    Kept memory of the other ways is written over at each call: the caller waits for the device between calls, where
    a server would keep several sets and ask for their completion.
    """

    def __init__(self, device: Device, num_rows: int, hidden_size: int) -> None:
        self._device, self._num_rows = device, num_rows
        generator = torch.Generator().manual_seed(num_rows)
        self._pageable = [
            ArrivedRow(
                torch.rand(METADATA_WIDTH, generator=generator),
                torch.randint(0, 1 << 17, (METADATA_WIDTH,), generator=generator),
                torch.randn(hidden_size, generator=generator).to(torch.bfloat16),
            )
            for _ in range(num_rows)
        ]
        self._fields = dg.eagle_fields(TOPK, hidden_size)
        self._names = [f.name for f in self._fields]
        self._expected = [torch.stack(rows) for rows in self._narrow()]  # [b, width] a field
        self._pinned = [device.pin(block) for block in self._expected]
        self._on_device = [block.to(device.device) for block in self._expected]
        self._indices_cpu = torch.arange(1, num_rows + 1)
        self._indices = self._indices_cpu.to(device.device)
        self._relay = StackRelay(num_rows + 1, TOPK, hidden_size, torch.bfloat16, device.device)
        self._future_map = dg.FutureMap(self._fields, num_rows + 1, device.device, machine=device.machine)
        self.calls: dict[str, Path] = {
            STOCK: self._stock,
            TEN_LINES: self._into_kept,
            ARENA: self._arena_way(),
            FOREACH: self._foreach,
            **self._ours(),
        }
        self.unavailable = ""
        try:
            self.calls[VIEWS] = self._views_way()
        except (RuntimeError, TypeError, ValueError) as error:
            self.unavailable = f"{VIEWS}: {error}"

    def check(self, name: str) -> None:
        """The batch and the relay hold the rows' bytes."""
        for relayed in (*vars(self._relay).values(), *self._future_map.buffers.values()):
            relayed.zero_()
        batch = [tensor.cpu() for tensor in self.calls[name]()]
        tables = self._future_map.buffers if name in OURS else vars(self._relay)
        relayed = [tables[n].cpu()[1:] for n in self._names]
        for field, got, there, expected in zip(self._names, batch, relayed, self._expected, strict=True):
            assert same_bytes(got, expected), f"the batch's {field} differs"
            assert same_bytes(there, expected), f"the relay's {field} differs"

    # -- the other ways

    def _relayed(self, batch: StackedBatch) -> Sequence[torch.Tensor]:
        self._relay.publish(self._indices, self._indices)
        self._relay.stash(self._indices, batch, self._indices)
        return batch.topk_p, batch.topk_index, batch.hidden_states

    def _narrow(self) -> tuple[Rows, Rows, Rows]:
        rows = self._pageable
        return [r.topk_p[:TOPK] for r in rows], [r.topk_index[:TOPK] for r in rows], [r.hidden_states for r in rows]

    def _stock(self) -> Sequence[torch.Tensor]:
        return self._relayed(stack_rows(self._pageable, TOPK, self._device.device))

    def _into_kept(self) -> Sequence[torch.Tensor]:
        uploads = []
        for rows, kept in zip(self._narrow(), self._pinned, strict=True):
            torch.stack(rows, out=kept)
            uploads.append(kept.to(self._device.device, non_blocking=True))
        return self._relayed(StackedBatch(*uploads))

    def _arena_way(self) -> Path:
        places, end = [], 0
        for block in self._expected:
            places.append((end, end + block.nbytes, block))
            end += -(-block.nbytes // 16) * 16
        arena = self._device.pin(torch.zeros(end, dtype=torch.uint8))

        def segments(of: torch.Tensor) -> list[torch.Tensor]:
            return [of[start:stop].view(block.dtype).view(block.shape) for start, stop, block in places]

        kept = segments(arena)

        def call() -> Sequence[torch.Tensor]:
            for rows, segment in zip(self._narrow(), kept, strict=True):
                torch.stack(rows, out=segment)
            return self._relayed(StackedBatch(*segments(arena.to(self._device.device, non_blocking=True))))

        return call

    def _views_way(self) -> Path:
        rows = [list(self._device.view(block).unbind(0)) for block in self._pinned]
        return lambda: self._relayed(StackedBatch(*[torch.stack(of_field) for of_field in rows]))

    def _foreach(self) -> Sequence[torch.Tensor]:
        outputs = [torch.empty_like(block) for block in self._on_device]
        there = [row for output in outputs for row in output.unbind(0)]
        here = [row for block in self._pinned for row in block.unbind(0)]
        torch._foreach_copy_(there, here, non_blocking=True)
        return self._relayed(StackedBatch(*outputs))

    # -- ours

    def _ours(self) -> dict[str, Path]:
        device, n = self._device, self._num_rows
        mailbox = dg.DraftMailbox(self._fields, n, pin_memory=device.machine.pins)
        for slot in range(n):
            mailbox.put(slot, slot, **{name: b[slot] for name, b in zip(self._names, self._expected, strict=True)})
        # Rows as they arrive are wider than the top-k: the first columns count.
        wide = (*[dg.Field(f.name, f.width, f.dtype, leading=True) for f in self._fields[:2]], self._fields[2])
        by_slot, by_address, staged = (
            dg.DraftAssembler(given, device.device, n, records, machine=machine)
            for given, records, machine in (
                (self._fields, mailbox, device.machine),
                (self._fields, None, device.machine),
                (wide, None, device.machine_with(reads_rows=False)),
            )
        )
        slots = list(range(n))
        arrived = [[getattr(row, name) for row in self._pageable] for name in self._names]
        given = {
            FROM_DEVICE: (by_address, [list(block.unbind(0)) for block in self._on_device]),
            FROM_PINNED: (by_address, [list(block.unbind(0)) for block in self._pinned]),
            STAGED: (staged, arrived),
        }
        return {
            SLOTS: lambda: self._tensors(by_slot.assemble_slots(slots, slots, relay=self._to_map())),
            **{name: partial(self._by_row, *how) for name, how in given.items()},
        }

    def _by_row(self, assembler: dg.DraftAssembler, rows: Sequence[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
        topk_p, topk_index, hidden = rows
        return self._tensors(
            assembler.assemble_rows(topk_p=topk_p, topk_index=topk_index, hidden_states=hidden, relay=self._to_map())
        )

    def _to_map(self) -> dg.Relay:
        return dg.Relay(self._future_map, self._indices, self._indices, self._indices, self._indices_cpu)

    def _tensors(self, batch: dg.DraftBatch) -> Sequence[torch.Tensor]:
        return [batch.tensors[name] for name in self._names]
