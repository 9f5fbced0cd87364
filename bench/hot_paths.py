"""The hot paths for pytest-benchmark, next to torch.stack: `pytest bench/hot_paths.py`. On the CPU, one thread.

`draftgather bench` takes paths in turns and is what figures come from; this watches one call over time
(`--benchmark-autosave`, `--benchmark-compare`). Every byte is compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import draftgather as dg
from draftgather.bench.paths import PATHS, Workload

_PATHS = {path.name: path for path in PATHS}


@pytest.fixture(scope="module")
def work() -> Iterator[Workload]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Workload(7168, 4, 1, torch.bfloat16, pool=256, max_batch_size=256, device=torch.device("cpu"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
@pytest.mark.parametrize("name", ["torch.stack", "rows", "slots"])
def test_a_batch(benchmark: BenchmarkFixture, work: Workload, name: str, num_rows: int) -> None:
    """With overlap, the same batch at each call."""
    benchmark.group = f"a batch of {num_rows}"
    (batch,) = work.batches(num_rows, is_hot=True)
    work.check_equal([_PATHS[name]], batch, overlap=True)
    benchmark(_PATHS[name].call, work, batch, True)


@pytest.mark.parametrize("name", ["clones", "put"])
def test_an_arriving_row(benchmark: BenchmarkFixture, work: Workload, name: str) -> None:
    benchmark.group = "an arriving row"
    row, mailbox = work.rows[3], work.mailbox
    rows = work.narrow(row)

    def clones() -> None:
        for tensor in (row.topk_p, row.topk_index, row.hidden_states):
            tensor.clone()

    benchmark(clones if name == "clones" else lambda: mailbox.put(3, 3, **rows))


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
@pytest.mark.parametrize("name", ["indexing", "resolve"])
def test_resolve(benchmark: BenchmarkFixture, work: Workload, name: str, num_rows: int) -> None:
    """The next iteration's gather out of the future map, next to an index a buffer."""
    benchmark.group = f"resolve {num_rows}"
    (batch,) = work.batches(num_rows, is_hot=True)
    work.check_equal([_PATHS["slots"]], batch, overlap=True)
    ours = work.future_map
    buffers = [*ours.buffers.values(), ours.output_tokens_buf, ours.new_seq_lens_buf]
    running = dg.ScheduleBatch(
        [], "cpu", batch.indices, batch.seq_lens, spec_info=dg.EagleDraftInput(future_indices=batch.indices)
    )
    ours.resolve(running)
    assert torch.equal(running.spec_info.hidden_states, ours.buffers["hidden_states"][batch.indices])
    if name == "resolve":
        benchmark(ours.resolve, running)
    else:
        benchmark(lambda: [buffer[batch.indices] for buffer in buffers])
