"""The README's examples run, one after the other, as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_examples_run(capsys) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    shown = re.search(r"print\(error\)  # (.*) \.\.\.", blocks[1])
    assert shown is not None
    assert shown[1] in capsys.readouterr().out


def test_files_it_names_are_there() -> None:
    for name in re.findall(r"\]\(((?!http)[^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).is_file(), name
