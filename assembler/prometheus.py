"""`draftgather.metrics()` for Prometheus: `pip install 'draftgather[metrics]'`, then, once a process,

    from prometheus_client import REGISTRY
    from draftgather.prometheus import Collector

    REGISTRY.register(Collector())

The client's multiprocess mode (PROMETHEUS_MULTIPROC_DIR) takes no custom collectors: it merges files that its own
metric classes write, and this collector writes none. There each process has to be scraped by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector as ClientCollector
except ImportError as error:
    raise ImportError("draftgather.prometheus needs the client: pip install 'draftgather[metrics]'") from error

from draftgather.observe import Histogram, Metrics, metrics


class Collector(ClientCollector):
    """Reads `draftgather.metrics()` at each scrape; keeps nothing itself."""

    def collect(self) -> Iterator[Metric]:
        now = metrics()
        yield from _counters(now)
        yield from _histograms(now)
        yield from _gauges(now)


def _counters(now: Metrics) -> Iterator[Metric]:
    assembler, mailbox, future_map = now.assembler, now.mailbox, now.future_map
    yield _counter("calls", "Batches assembled", "route", assembler.calls)
    yield _counter("rows", "Rows assembled, padding left out", "route", assembler.rows)
    refused = {"assembler": assembler.refused_calls, "mailbox": mailbox.refused_calls}
    yield _by_error("refused_calls", "Calls refused", {**refused, "future_map": future_map.refused_calls})
    bad_rows = {"assembler": assembler.bad_rows, "mailbox": mailbox.bad_rows}
    yield _by_error("bad_rows", "Bad rows of refused calls", bad_rows)
    for name, text, value in (
        ("late_compiles", "Kernels compiled after warm-up", assembler.late_compiles),
        ("staging_buffers_made", "Staging buffers made", assembler.staging_buffers_made),
        ("staging_buffers_busy", "Staging buffers found in flight", assembler.staging_buffers_busy),
        ("mailbox_acquired", "Slots acquired", mailbox.acquired),
        ("mailbox_put", "Rows put", mailbox.put),
        ("mailbox_accepted", "Records accepted of a transfer engine", mailbox.accepted),
        ("mailbox_released", "Slots released", mailbox.released),
        ("published", "Calls of publish", future_map.published),
        ("stashed", "Calls of stash", future_map.stashed),
        ("resolved_rows", "Rows resolved", future_map.resolved_rows),
        ("fence_waits", "Waits for the fence that were queued on a stream", future_map.fence_waits),
    ):
        yield CounterMetricFamily(f"draftgather_{name}", text, value=value)


def _histograms(now: Metrics) -> Iterator[Metric]:
    calls = {**now.assembler.call_seconds, "resolve": now.future_map.resolve_seconds}
    family = HistogramMetricFamily("draftgather_call_seconds", "Host time of calls, not refused", labels=["call"])
    for call, histogram in calls.items():
        family.add_metric([call], _buckets(histogram), histogram.total_seconds)
    yield family


def _gauges(now: Metrics) -> Iterator[Metric]:
    for name, text, value in (
        ("assemblers", "DraftAssemblers alive", now.assembler.living),
        ("staging_buffers", "Staging buffers of those", now.assembler.staging_buffers),
        ("mailboxes", "DraftMailboxes alive", now.mailbox.living),
        ("mailbox_slots", "Slots of those", now.mailbox.slots),
        ("mailbox_slots_in_use", "Slots held or written", now.mailbox.slots_in_use),
        ("mailbox_slots_draining", "Slots released, perhaps still read", now.mailbox.slots_draining),
        ("future_maps", "FutureMaps alive", now.future_map.living),
    ):
        yield GaugeMetricFamily(f"draftgather_{name}", text, value=value)


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"draftgather_{name}", text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


def _by_error(name: str, text: str, values: Mapping[str, Mapping[str, int]]) -> Metric:
    family = CounterMetricFamily(f"draftgather_{name}", text, labels=["part", "error"])
    for part, numbers in values.items():
        for error, number in numbers.items():
            family.add_metric([part, error], number)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """As Prometheus has them: cumulative, by upper bound, the last one infinite."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, histogram.cumulative, strict=True))
