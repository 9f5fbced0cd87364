"""The drop-in without sglang: its options, and that it stays out of the way. The rest is in tests/contract."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from draftgather import sglang_plugin
from draftgather.dropin import BadRows, DropInOptions, Mode

NO_SGLANG = importlib.util.find_spec("sglang") is None


def test_options_from_the_environment():
    assert DropInOptions.from_environment({}) == DropInOptions(Mode.OFF, False, BadRows.WARN, 10)
    environment = {
        "DRAFTGATHER_SGLANG": " Shadow ",
        "DRAFTGATHER_SGLANG_FUSED": "1",
        "DRAFTGATHER_SGLANG_BAD_ROWS": "abort",
        "DRAFTGATHER_SGLANG_SAMPLE": "3",
    }
    assert DropInOptions.from_environment(environment) == DropInOptions(Mode.SHADOW, True, BadRows.ABORT, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("", "yes"), ("_FUSED", "true"), ("_BAD_ROWS", "drop"), ("_SAMPLE", "0"), ("_SAMPLE", "-1"), ("_SAMPLE", "1.5")],
)
def test_a_value_that_it_does_not_know_names_the_variable(name, value):
    with pytest.raises(ValueError, match=f"DRAFTGATHER_SGLANG{name} is '{value}', expected"):
        DropInOptions.from_environment({f"DRAFTGATHER_SGLANG{name}": value})


def test_off_is_silent(monkeypatch, caplog):
    """Installing changes nothing."""
    monkeypatch.delenv("DRAFTGATHER_SGLANG", raising=False)
    sglang_plugin.load()
    assert sglang_plugin.drop_in() is None and not caplog.records


@pytest.mark.skipif(not NO_SGLANG, reason="sglang is installed: tests/contract loads the plug-in")
def test_on_without_sglang_stays_off_with_one_line(monkeypatch, caplog):
    monkeypatch.setenv("DRAFTGATHER_SGLANG", "on")
    with caplog.at_level(logging.INFO):
        sglang_plugin.load()
    assert sglang_plugin.drop_in() is None
    assert len(caplog.records) == 1 and "sglang not installed is not one that it knows" in caplog.text
    assert sglang_plugin.describe_installed() == "sglang is not installed here"
    with pytest.raises(RuntimeError, match="not in place"):
        sglang_plugin.set_mode("on")
