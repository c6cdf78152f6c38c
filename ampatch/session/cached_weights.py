"""The block behind `ampatch.cached_weights`: half copies that are made once."""

from __future__ import annotations

import threading

from torch import nn

from ..casting.kept_copies import KeptCopies
from ..errors import AmpatchError
from ..models.managed_model import ManagedModel
from .registry import registry

_changing = threading.RLock()  # a generator that is collected may end its block at any moment


class CachedWeights:
    """Context manager; it nests, also in itself, and may be entered again."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._entered: list[list[KeptCopies]] = []

    def __enter__(self) -> None:
        found = [managed.kept for model in self._models for managed in _managed(model)]
        self._entered.append(found)
        try:
            with _changing:
                for kept in found:
                    kept.begin(found)
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        with _changing:
            block = self._entered[-1]
            for kept in block:
                if block in kept.blocks:
                    kept.blocks.remove(block)
                if not kept.blocks:
                    kept.end()
            self._entered.pop()


def _managed(model: nn.Module) -> list[ManagedModel]:
    """The managed models that a module is, has parts of, or is a part of; those that cast weights.

    Raises `AmpatchError` where there is none, unless ampatch is switched off.
    """
    parts = set(model.modules())
    found = [one for one in registry.models() if not parts.isdisjoint(one.model.modules())]
    if not found and all(session.properties.enabled for session in registry.sessions):
        raise AmpatchError(
            f"ampatch.cached_weights({type(model).__name__}): no open session manages this model, "
            "so nothing casts its weights. Call model = ampatch.initialize(model, ...) first, and "
            "pass the model, a part of it or a module around it."
        )
    return [
        managed
        for managed in found
        if managed.properties.patch_torch_functions or managed.properties.lends_weights
    ]
