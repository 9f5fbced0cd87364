"""The collector: every figure of `metrics()` is in the text that Prometheus reads, and nothing else."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields as figures_of
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import draftgather as dg
from draftgather import prometheus
from draftgather.observe import AssemblerMetrics, FutureMapMetrics, Histogram, MailboxMetrics, Metrics

# A number of its own for every figure: one in the place of another shows.
NOW = Metrics(
    AssemblerMetrics(
        living=2,
        calls={"slots": 3, "pointers": 4, "staged": 5, "empty": 6},
        rows={"slots": 30, "pointers": 40, "staged": 50, "empty": 0},
        call_seconds={
            "assemble_slots": Histogram((1e-5, 0.1), (7, 8, 9), 10.5),
            "assemble_rows": Histogram((1e-5, 0.1), (11, 12, 13), 14.5),
        },
        refused_calls={"SlotError": 15},
        bad_rows={"SlotError": 16, "MissingRowError": 17},
        late_compiles=18,
        staging_buffers=19,
        staging_buffers_made=20,
        staging_buffers_busy=21,
    ),
    MailboxMetrics(
        living=22,
        slots=23,
        slots_in_use=24,
        slots_draining=25,
        acquired=26,
        put=27,
        accepted=28,
        released=29,
        refused_calls={"MailboxFullError": 31},
        bad_rows={"RowShapeError": 32},
    ),
    FutureMapMetrics(
        living=33,
        published=34,
        stashed=35,
        resolved_rows=36,
        resolve_seconds=Histogram((1e-5, 0.1), (37, 38, 39), 41.5),
        fence_waits=42,
        refused_calls={"RelayError": 43},
    ),
)
EXPECTED = {
    "calls_total{route=slots}": 3,
    "calls_total{route=pointers}": 4,
    "calls_total{route=staged}": 5,
    "calls_total{route=empty}": 6,
    "rows_total{route=slots}": 30,
    "rows_total{route=pointers}": 40,
    "rows_total{route=staged}": 50,
    "rows_total{route=empty}": 0,
    "refused_calls_total{error=SlotError,part=assembler}": 15,
    "refused_calls_total{error=MailboxFullError,part=mailbox}": 31,
    "refused_calls_total{error=RelayError,part=future_map}": 43,
    "bad_rows_total{error=SlotError,part=assembler}": 16,
    "bad_rows_total{error=MissingRowError,part=assembler}": 17,
    "bad_rows_total{error=RowShapeError,part=mailbox}": 32,
    "late_compiles_total": 18,
    "staging_buffers_made_total": 20,
    "staging_buffers_busy_total": 21,
    "mailbox_acquired_total": 26,
    "mailbox_put_total": 27,
    "mailbox_accepted_total": 28,
    "mailbox_released_total": 29,
    "published_total": 34,
    "stashed_total": 35,
    "resolved_rows_total": 36,
    "fence_waits_total": 42,
    "call_seconds_bucket{call=assemble_slots,le=1e-05}": 7,
    "call_seconds_bucket{call=assemble_slots,le=0.1}": 15,
    "call_seconds_bucket{call=assemble_slots,le=+Inf}": 24,
    "call_seconds_count{call=assemble_slots}": 24,
    "call_seconds_sum{call=assemble_slots}": 10.5,
    "call_seconds_bucket{call=assemble_rows,le=1e-05}": 11,
    "call_seconds_bucket{call=assemble_rows,le=0.1}": 23,
    "call_seconds_bucket{call=assemble_rows,le=+Inf}": 36,
    "call_seconds_count{call=assemble_rows}": 36,
    "call_seconds_sum{call=assemble_rows}": 14.5,
    "call_seconds_bucket{call=resolve,le=1e-05}": 37,
    "call_seconds_bucket{call=resolve,le=0.1}": 75,
    "call_seconds_bucket{call=resolve,le=+Inf}": 114,
    "call_seconds_count{call=resolve}": 114,
    "call_seconds_sum{call=resolve}": 41.5,
    "assemblers": 2,
    "staging_buffers": 19,
    "mailboxes": 22,
    "mailbox_slots": 23,
    "mailbox_slots_in_use": 24,
    "mailbox_slots_draining": 25,
    "future_maps": 33,
}


def scraped() -> dict[str, float]:
    """What a scrape reads, by name and labels, without the prefix."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(prometheus.Collector())
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            name = sample.name.removeprefix("draftgather_") + (f"{{{labels}}}" if labels else "")
            assert sample.name.startswith("draftgather_") and name not in samples, name
            samples[name] = sample.value
    return samples


def test_every_figure_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a figure that is left out, put in another's place, or counted twice."""
    monkeypatch.setattr(prometheus, "metrics", lambda: NOW)
    assert scraped() == EXPECTED


def numbers_in(value: Any) -> list[float]:
    """Every number of a snapshot."""
    if isinstance(value, (int, float)):
        return [value]
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers_in(inner)]
    if isinstance(value, Histogram):
        return [*value.cumulative, value.total_seconds]
    return [number for figure in figures_of(value) for number in numbers_in(getattr(value, figure.name))]


def test_the_expectation_has_every_figure() -> None:
    """Guards the test above from a new figure that neither the collector nor the expectation knows."""
    assert set(numbers_in(NOW)) == set(EXPECTED.values())


def test_a_real_scrape() -> None:
    """Guards the way from a call to the text: two rows are two rows more."""
    assembler = dg.DraftAssembler((dg.Field("a", 2, torch.int64),))
    before = scraped()
    assembler.assemble_rows(a=[torch.zeros(2, dtype=torch.int64)] * 2)
    after = scraped()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    seconds = changed.pop("call_seconds_sum{call=assemble_rows}")
    assert 0 < seconds < math.inf
    assert {name: n for name, n in changed.items() if "bucket" not in name} == {
        "calls_total{route=pointers}": 1,
        "rows_total{route=pointers}": 2,
        "call_seconds_count{call=assemble_rows}": 1,
    }
    assert changed["call_seconds_bucket{call=assemble_rows,le=+Inf}"] == 1


def test_without_the_client() -> None:
    """Guards an environment without the extra: importing says what to install."""
    code = "import sys; sys.modules['prometheus_client'] = None; import draftgather; import draftgather.prometheus"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: draftgather.prometheus needs the client: pip install 'draftgather[metrics]'"
    )
