"""Speculative algorithms: the built-in ones, and those that plug-ins register.

All hand over from prefill to decode through one polymorphic call, `build_disagg_draft_input`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, ClassVar

import torch

from draftgather.builder import build_bonus_disagg_draft_input, build_eagle_disagg_draft_input
from draftgather.draft_input import EagleDraftInput
from draftgather.errors import AlgorithmError

Factory = Callable[[Any], Any]  # server_args -> the worker class

# Spellings beside the members' names that mean a built-in algorithm.
_ALIASES = {"NEXTN": "EAGLE"}


class SpeculativeAlgorithm(Enum):
    """The built-in algorithms. `from_string` returns one of these or a registered CustomSpecAlgo."""

    NONE = auto()
    EAGLE = auto()
    EAGLE3 = auto()
    STANDALONE = auto()
    NGRAM = auto()
    DFLASH = auto()

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeAlgorithm | CustomSpecAlgo:
        """The algorithm of that name, in any case; None is NONE; an unknown name is a ValueError."""
        if name is None:
            return cls.NONE
        upper = name.upper()
        upper = _ALIASES.get(upper, upper)
        if upper in cls.__members__:
            return cls[upper]
        if upper in _registered:
            return _registered[upper]
        known = sorted({*cls.__members__, *_ALIASES, *_registered})
        raise ValueError(f"unknown speculative algorithm {name!r}, expected one of {known}")

    @classmethod
    def register(
        cls, name: str, *, supports_overlap: bool = False, spec_class: type[CustomSpecAlgo] | None = None
    ) -> Callable[[Factory], Factory]:
        """Decorator: register a plug-in's algorithm under `name`, with the factory of its worker class.

        Built-in names are reserved. The same class again under the same name is a no-op (plug-ins are
        loaded in every process, and more than once); another class is an AlgorithmError, and so is a class
        that lacks methods of this enum, or neither builds a draft input nor says that it is stateless.
        """
        upper = name.upper()
        if upper in cls.__members__ or upper in _ALIASES:
            raise AlgorithmError(f"{upper} is the name of a built-in speculative algorithm, and reserved")
        algorithm_class = CustomSpecAlgo if spec_class is None else spec_class
        _check_complete(algorithm_class)

        def register_factory(factory: Factory) -> Factory:
            existing = _registered.get(upper)
            if existing is None:
                _registered[upper] = algorithm_class(upper, factory, supports_overlap=supports_overlap)
            elif type(existing) is not algorithm_class:
                raise AlgorithmError(
                    f"speculative algorithm {upper} is registered already, with {type(existing).__name__}"
                )
            return factory

        return register_factory

    def is_none(self) -> bool:
        return self is SpeculativeAlgorithm.NONE

    def is_some(self) -> bool:
        return not self.is_none()

    def is_speculative(self) -> bool:
        return not self.is_none()

    def is_eagle(self) -> bool:
        """EAGLE or EAGLE3."""
        return self in (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3)

    def is_eagle3(self) -> bool:
        return self is SpeculativeAlgorithm.EAGLE3

    def is_standalone(self) -> bool:
        return self is SpeculativeAlgorithm.STANDALONE

    def is_ngram(self) -> bool:
        return self is SpeculativeAlgorithm.NGRAM

    def is_dflash(self) -> bool:
        return self is SpeculativeAlgorithm.DFLASH

    @property
    def stateless(self) -> bool:
        """Whether nothing but the last token is handed over."""
        return not (self.is_eagle() or self.is_dflash())

    def build_disagg_draft_input(
        self, batch: Any, server_args: Any, last_tokens_tensor: torch.Tensor, future_map: Any
    ) -> EagleDraftInput | None:
        """The draft input of a prebuilt batch; None where the last tokens are all there is.

        EAGLE and EAGLE3 (multi-layer too) hand over draft rows, DFLASH bonus tokens and sequence lengths only.
        """
        if self.is_eagle():
            return build_eagle_disagg_draft_input(batch, server_args, last_tokens_tensor, future_map)
        if self.is_dflash():
            return build_bonus_disagg_draft_input(batch, last_tokens_tensor, future_map)
        return None


class CustomSpecAlgo:
    """Base of a plug-in's algorithm: overrides what differs, above all `build_disagg_draft_input`.

    stateless: set to True in a class whose hand-off is the last token alone. A class that is not
    stateless and yields no draft input is an error that names it, before the first decode step dies of it.
    """

    stateless: ClassVar[bool] = False

    def __init__(self, name: str, factory: Factory, *, supports_overlap: bool = False) -> None:
        self.name = name
        self.factory = factory
        self.supports_overlap = supports_overlap

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def create_worker(self, server_args: Any) -> Any:
        """The worker class, from the registered factory."""
        return self.factory(server_args)

    def is_none(self) -> bool:
        return False

    def is_some(self) -> bool:
        return True

    def is_speculative(self) -> bool:
        return True

    def is_eagle(self) -> bool:
        return False

    def is_eagle3(self) -> bool:
        return False

    def is_standalone(self) -> bool:
        return False

    def is_ngram(self) -> bool:
        return False

    def is_dflash(self) -> bool:
        return False

    def build_disagg_draft_input(
        self, batch: Any, server_args: Any, last_tokens_tensor: torch.Tensor, future_map: Any
    ) -> Any:
        """The draft input of a prebuilt batch, or None: the last tokens become the decode input."""
        return None


_registered: dict[str, CustomSpecAlgo] = {}


def _check_complete(algorithm_class: type[Any]) -> None:
    """Refuse a class that would fail later, at a call site: it answers every method of the enum's."""
    wanted = {
        name
        for name, member in vars(SpeculativeAlgorithm).items()
        if callable(member) and (name.startswith(("is_", "supports_")) or name == "build_disagg_draft_input")
    }
    missing = sorted(name for name in wanted if not callable(getattr(algorithm_class, name, None)))
    if missing:
        raise AlgorithmError(f"{algorithm_class.__name__} lacks {', '.join(missing)}")
    if not issubclass(algorithm_class, CustomSpecAlgo):
        return
    builds = algorithm_class.build_disagg_draft_input is not CustomSpecAlgo.build_disagg_draft_input
    if not builds and not algorithm_class.stateless:
        raise AlgorithmError(
            f"{algorithm_class.__name__} neither overrides build_disagg_draft_input nor sets stateless = True"
        )
