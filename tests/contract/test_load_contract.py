"""Loading: by sglang itself, in a fresh process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PREAMBLE = f"""
import json, logging, sys
sys.path.append({str(Path(__file__).parent / "stubs")!r})
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
import torch
def touched(*given, **named): raise AssertionError("CUDA was touched")
torch.cuda._lazy_init = touched
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from draftgather import sglang_plugin
"""

STATE = """
drop_in = sglang_plugin.drop_in()
def is_hooked(module, name):
    # What nobody has imported, nobody has hooked.
    return hasattr(getattr(sys.modules.get("sglang.srt." + module), name, None), "__wrapped__")
print(json.dumps({
    "mode": drop_in.mode.value if drop_in else None,
    "builder": is_hooked("speculative.eagle_disaggregation", "build_eagle_disagg_draft_input"),
    "gate": is_hooked("disaggregation.utils", "_apply_metadata_gate"),
}))
"""


def run(code, **environment):
    """The state that `code` leaves, and the log."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTGATHER")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREAMBLE + code + STATE],
        env={**clean, "TRITON_INTERPRET": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ours = [line for line in done.stderr.splitlines() if "draftgather" in line and "plugin" not in line]
    return json.loads(done.stdout.splitlines()[-1]), ours


def test_installed_it_is_off():
    """Installing changes nothing: no hook, and nothing of sglang's imported by us."""
    code = "before = set(sys.modules); load_plugins(); new = {m for m in set(sys.modules) - before if 'sglang' in m}\n"
    code += "assert new <= {'sglang_plugin'}, new\n"
    state, said = run(code)
    assert state == {"mode": None, "builder": False, "gate": False} and said == []


@pytest.mark.parametrize("mode", ["on", "shadow"])
def test_loaded_by_sglang(mode):
    """O34, O50: idempotent, no CUDA state, one line."""
    state, said = run("load_plugins(); load_plugins(); sglang_plugin.load()\n", DRAFTGATHER_SGLANG=mode)
    assert state == {"mode": mode, "builder": True, "gate": True}
    assert len(said) == 1 and f": {mode}, bad rows: warn" in said[0]


def test_hooks_are_registered_once():
    """A second load is a no-op, not a second layer."""
    code = "load_plugins(); sglang_plugin.load(); HookRegistry.apply_hooks()\n"
    code += "assert [len(h) for h in HookRegistry._hooks.values()] == [1, 1]\n"
    code += "assert type(HookRegistry.__dict__['apply_hooks'].__func__).__name__ == 'function'\n"
    code += "assert HookRegistry.apply_hooks.__func__.__name__ == 'apply_hooks'\n"
    assert run(code, DRAFTGATHER_SGLANG="on")[0]["mode"] == "on"


@pytest.mark.parametrize(
    ("variable", "value"), [("", "yes"), ("_FUSED", "true"), ("_BAD_ROWS", "drop"), ("_SAMPLE", "0"), ("_SAMPLE", "x")]
)
def test_a_value_that_it_does_not_know_keeps_it_off(variable, value):
    environment = {"DRAFTGATHER_SGLANG": "on", f"DRAFTGATHER_SGLANG{variable}": value}
    state, said = run("load_plugins()\n", **environment)
    assert state == {"mode": None, "builder": False, "gate": False}
    assert len(said) == 1 and f"DRAFTGATHER_SGLANG{variable} is '{value}', expected" in said[0]


UNKNOWN = {
    "another field": (
        "import dataclasses\n"
        "from sglang.srt.speculative import eagle_info as m\n"
        "m.EagleDraftInput = dataclasses.make_dataclass('E', [('mystery', int, 0)], bases=(m.EagleDraftInput,))\n",
        "EagleDraftInput has the fields ['mystery']",
    ),
    "another call shape": (
        "from sglang.srt.speculative import eagle_disaggregation as m\n"
        "m.build_eagle_disagg_draft_input = lambda batch, relay: None\n",
        "build_eagle_disagg_draft_input takes (batch, relay)",
    ),
    "no gate": (
        "from sglang.srt.disaggregation import utils as m\ndel m._apply_metadata_gate\n",
        "sglang.srt.disaggregation.utils:_apply_metadata_gate is not there",
    ),
    "no builder": (
        "from sglang.srt import speculative\nsys.modules['sglang.srt.speculative.eagle_disaggregation'] = None\n",
        "eagle_disaggregation is not there",
    ),
}


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_an_sglang_that_it_does_not_know_is_left_alone(unknown):
    """O51: one line that names the version, and stock behaviour."""
    change, said = UNKNOWN[unknown]
    state, lines = run(change + "load_plugins()\n", DRAFTGATHER_SGLANG="on")
    assert state == {"mode": None, "builder": False, "gate": False}
    version = __import__("importlib.metadata").metadata.version("sglang")
    assert len(lines) == 1 and f"sglang {version} is not one that it knows" in lines[0] and said in lines[0]


def test_hooks_that_did_not_take_effect_are_noticed():
    """sglang's registry only logs a target that it cannot patch: the drop-in then says so, and stays off."""
    code = (
        "stock = HookRegistry.__dict__['_apply_target'].__func__\n"
        "def apply(cls, target, hooks):\n"
        "    if 'gate' in target: raise RuntimeError('no')\n"
        "    stock(cls, target, hooks)\n"
        "HookRegistry._apply_target = classmethod(apply)\n"
        "load_plugins()\n"
    )
    state, said = run(code, DRAFTGATHER_SGLANG="on")
    assert state["mode"] == "off" and state["builder"]
    assert any("did not take effect" in line and "_apply_metadata_gate" in line for line in said)


def test_another_plugins_hook_on_the_builder_goes_along():
    """Hooks of two plug-ins on one target are one chain, and ours is found in it."""
    code = (
        "from sglang.srt.plugins.hook_registry import HookType\n"
        "HookRegistry.register('sglang.srt.speculative.eagle_disaggregation.build_eagle_disagg_draft_input',"
        " lambda original, *given, **named: original(*given, **named), HookType.AROUND)\n"
        "load_plugins()\n"
    )
    state, _ = run(code, DRAFTGATHER_SGLANG="on")
    assert state["mode"] == "on"


def test_set_mode_without_hooks_says_so():
    code = (
        "load_plugins()\ntry: sglang_plugin.set_mode('on')\nexcept RuntimeError as e: assert 'not in place' in str(e)\n"
    )
    code += "else: raise AssertionError\n"
    assert run(code)[0]["mode"] is None


def test_doctor_knows_it():
    code = (
        "said = sglang_plugin.describe_installed(); assert 'known' in said and 'DRAFTGATHER_SGLANG=on' in said, said\n"
    )
    assert run(code, DRAFTGATHER_SGLANG="on")[0]["mode"] is None
