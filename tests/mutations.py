"""Guards taken out on purpose: a test that passes without its guard tests nothing."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Mutation(NamedTuple):
    """One guard: `old` is in the source of `function` exactly once, and `new` is what remains without the guard."""

    function: Callable[..., Any]
    old: str
    new: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the mutated function in the place of the real one, wherever the package knows it by name."""
        mutated = self._mutated()
        places = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "draftgather"]
        if "." in self.function.__qualname__:
            module = sys.modules[self.function.__module__]
            places = [getattr(module, self.function.__qualname__.split(".")[0])]
        hits = 0
        for place in places:
            for name, value in list(vars(place).items()):
                if value is self.function:
                    monkeypatch.setattr(place, name, mutated)
                    hits += 1
        assert hits, f"{self.function.__qualname__} is nowhere"

    def _mutated(self) -> Callable[..., Any]:
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, f"{self.old!r} is {source.count(self.old)} times in {self.function}"
        code = compile("from __future__ import annotations\n" + source.replace(self.old, self.new), "<mutated>", "exec")
        made: dict[str, Any] = {}
        exec(code, self.function.__globals__, made)
        return made[self.function.__name__]  # type: ignore[no-any-return]
