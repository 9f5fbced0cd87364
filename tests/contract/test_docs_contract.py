"""The Python of docs/sglang.md, with a real sglang."""

from __future__ import annotations

import re
from pathlib import Path


def test_python_runs():
    """Guards against an example that no longer works."""
    page = (Path(__file__).parents[2] / "docs/sglang.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    names: dict[str, object] = {}
    exec(compile(found[0], "docs/sglang.md", "exec"), names)
    assert names["MyAlgo"].__mro__[2].__module__.startswith("sglang.")
