"""Nodes with a real transfer engine, each in a process of its own; without the engine this folder is left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For `import wire_nodes`, here and in the nodes' processes.
sys.path.insert(0, str(Path(__file__).parent))

try:
    import mooncake.engine  # noqa: F401
except ImportError:  # not installed, or without libibverbs.so.1
    collect_ignore_glob = ["test_*.py"]
else:
    from wire_nodes import DecodeNode, Node, PrefillNode

    @pytest.fixture
    def nodes() -> Iterator[list[Node]]:
        """Ended after the test, whatever it did: no process outlives it."""
        started: list[Node] = []
        yield started
        for node in started:
            node.end()
        assert [node for node in started if node.process.is_alive()] == []

    @pytest.fixture
    def decode(nodes: list[Node]) -> Node:
        # Both at once: most of a start is importing torch.
        nodes += [Node(DecodeNode), Node(PrefillNode)]
        return nodes[0]

    @pytest.fixture
    def prefill(nodes: list[Node], decode: Node) -> Node:
        nodes[1].call("connect", decode.call("told"))
        return nodes[1]
