"""Stands in for torchvision, which sglang imports for images: any name, and nothing behind it."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar
from unittest.mock import MagicMock

__version__ = "0.0"
__path__: list = []


class _Anything(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "ops", "utils"):
    _module = _Anything(f"torchvision.{_name}")
    _module.__spec__ = ModuleSpec(_module.__name__, None)
    sys.modules[_module.__name__] = _module
