"""Starts the two nodes as processes of their own, and leaves none behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from pd_pair.decode import Served, run_decode
from pd_pair.model import Model
from pd_pair.prefill import run_prefill
from pd_pair.workload import Run

# For one run's result; for the nodes to end after the last; and for those beside one that failed.
_RUN_SECONDS, _END_SECONDS, _FAILED_SECONDS = 120.0, 20.0, 5.0


class PairError(RuntimeError):
    """A node failed, or said nothing for too long; its own error is on stderr."""


def run_pair(model: Model, runs: Sequence[Run], on_served: Callable[[Run], None] = lambda _: None) -> list[Served]:
    """Serve all runs on one pair of nodes; on_served is told of each one done. Raises PairError."""
    context = get_context("spawn")
    with TemporaryDirectory() as folder:
        # Both nodes load one checkpoint: a fit of their own might differ in a last bit.
        checkpoint = Path(folder) / "model.pt"
        model.save(checkpoint)
        prefill_end, decode_end = context.Pipe()
        results, results_end = context.Pipe(duplex=False)
        nodes: list[BaseProcess] = [
            context.Process(target=run_prefill, args=(checkpoint, runs, prefill_end), name="prefill", daemon=True),
            context.Process(
                target=run_decode, args=(checkpoint, runs, decode_end, results_end), name="decode", daemon=True
            ),
        ]
        try:
            for node in nodes:
                node.start()
            # Only the nodes hold these now: when one ends, the other finds its connection closed.
            for end in (prefill_end, decode_end, results_end):
                end.close()
            served = []
            for run in runs:
                served.append(_next_result(results, nodes))
                on_served(run)
            for node in nodes:
                node.join(_END_SECONDS)
                if node.exitcode != 0:
                    raise PairError(f"{node.name} ended with {node.exitcode}, expected 0")
            return served
        finally:
            for node in nodes:
                if node.is_alive():
                    node.kill()
                    node.join()
            results.close()


def _next_result(results: Connection, nodes: Sequence[BaseProcess]) -> Served:
    ready = wait([results, *(node.sentinel for node in nodes)], _RUN_SECONDS)
    try:
        if results in ready:
            served: Served = results.recv()
            return served
    except EOFError:  # the decode node ends, or has ended
        pass
    for node in nodes:
        node.join(_FAILED_SECONDS)
    states = [f"{node.name} {'runs' if node.is_alive() else f'ended with {node.exitcode}'}" for node in nodes]
    raise PairError(f"a run brought no result (the limit is {_RUN_SECONDS:.0f} s): {', '.join(states)}")
