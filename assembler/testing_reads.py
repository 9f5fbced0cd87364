"""Finds reads of tensors by the host, on a CPU, where they would not wait: on a device each one does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result's value or size the host must know.
_READING_OPS = frozenset(
    {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
)
# On a CPU these call no operator, or one that draftgather's own code calls as well.
_READING_METHODS = ("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")


class DeviceReads(TorchDispatchMode):
    """`found`: the reads in this block by code that is not draftgather's, whose own looks at host memory only.

    The nearest caller outside of torch counts, so a `post_gather` is its author's. `.to("cpu")` cannot be told from a
    move to the batch's device here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self._patched: dict[str, Any] = {}

    def __enter__(self) -> DeviceReads:
        for name in _READING_METHODS:
            self._patched[name] = vars(torch.Tensor).get(name)
            setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]
        for name, before in self._patched.items():
            if before is None:
                delattr(torch.Tensor, name)  # the base class's shows again
            else:
                setattr(torch.Tensor, name, before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READING_OPS or _is_masked(name, args):
            self._note(f"aten.{name}")
        return func(*args, **(kwargs or {}))

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._note(f"Tensor.{name}")
            return method(*args, **kwargs)

        return noting

    def _note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module != __name__ and module.split(".")[0] != "torch":
                if module.split(".")[0] != "draftgather":
                    self.found.append(f"{what} in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
                return
            frame = frame.f_back


def _is_masked(name: str, args: Any) -> bool:
    """Indexing with a mask counts its rows. One number put there is a fill, which does not."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    is_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return is_mask and (name == "index" or args[2].numel() != 1)
