"""Two decode nodes with the same rows: one serves by sglang's own code, one by the drop-in."""

from __future__ import annotations

import dataclasses
import inspect

import torch

from draftgather.bench.sglang_node import Node, NodeOptions, relay_buffers
from draftgather.dropin import Mode


def make_rows(options: NodeOptions, count: int) -> list[dict[str, torch.Tensor]]:
    states = options.topk * options.num_steps
    return [
        {
            "topk_p": torch.rand(states),
            "topk_index": torch.randint(0, 1 << 17, (states,)),
            "hidden_states": torch.randn(options.hidden_size).to(options.dtype),
        }
        for _ in range(count)
    ]


class Twins:
    """`stock` with the drop-in off, `ours` with it in its mode."""

    def __init__(self, drop_in, **options) -> None:
        self.drop_in = drop_in
        self.options = NodeOptions(**options)
        self.stock, self.ours = Node(self.options), Node(self.options)
        rows = make_rows(self.options, self.options.max_requests)
        for node in self.nodes:
            for slot, row in enumerate(rows):
                node.write_row(slot, row, room=slot + 1)

    @property
    def nodes(self):
        return self.stock, self.ours

    def settle(self) -> None:
        """Past the first batch: every buffer exists, and every row of it has been written."""
        for node in self.nodes:
            self.run(node, Mode.OFF, lambda node: node.process(self.batch(node, range(self.options.max_requests))))
            for buffer in relay_buffers(node.future_map).values():
                # Nothing is relayed without overlap: then any value will do, and has to stay.
                buffer[0 if self.options.enable_overlap else slice(None)] = 7

    def batch(self, node, slots):
        return node.prebuilt([node.commit(slot, slot + 1) for slot in slots], [1000 + slot for slot in slots])

    def run(self, node, mode, action):
        before, self.drop_in.mode = self.drop_in.mode, mode
        try:
            return action(node)
        finally:
            self.drop_in.mode = before

    def both(self, action):
        """The results of action(node): stock's, then ours."""
        return self.run(self.stock, Mode.OFF, action), self.run(self.ours, self.drop_in.mode, action)

    def process(self, slots):
        """Both nodes process a batch of these metadata slots; the batches."""

        def process(node):
            batch = self.batch(node, slots)
            node.process(batch)
            return batch

        return self.both(process)

    def assert_equal_relays(self) -> None:
        stock, ours = relay_buffers(self.stock.future_map), relay_buffers(self.ours.future_map)
        assert stock.keys() == ours.keys()
        for name in stock:
            assert_same(stock[name], ours[name], name)
        for name in ("need_topk", "need_hidden_states", "_forward_buf_initialized", "_publish_fresh"):
            assert getattr(self.stock.future_map, name, None) == getattr(self.ours.future_map, name, None), name
        assert (self.stock.future_map.publish_ready is None) == (self.ours.future_map.publish_ready is None)


def assert_same(stock, ours, name) -> None:
    """The same value, tensors to the byte."""
    if isinstance(stock, torch.Tensor):
        assert isinstance(ours, torch.Tensor), name
        assert (ours.shape, ours.dtype, ours.device) == (stock.shape, stock.dtype, stock.device), name
        assert ours.is_contiguous() == stock.is_contiguous(), name
        assert ours.contiguous().view(torch.uint8).equal(stock.contiguous().view(torch.uint8)), name
    else:
        assert stock == ours, name


def assert_same_inputs(stock, ours) -> None:
    """Two spec inputs of sglang's: one class, every field equal."""
    assert type(stock) is type(ours)
    if stock is not None:
        for field in dataclasses.fields(stock):
            assert_same(getattr(stock, field.name), getattr(ours, field.name), field.name)


def takes(function, name: str) -> bool:
    return name in inspect.signature(function).parameters
