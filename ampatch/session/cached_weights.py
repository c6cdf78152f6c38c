"""The block behind `ampatch.cached_weights`: half copies that are made once."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

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
                    _keep(kept, found)
        except BaseException as error:  # Ctrl-C: weights may change again
            self.__exit__(type(error))
            raise

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with contextlib.ExitStack() as stack:  # all end, whichever raises
            with _changing:
                block = self._entered[-1]
                for kept in block:
                    if block in kept.blocks:
                        kept.blocks.remove(block)
                    if not kept.blocks:
                        stack.callback(kept.end, is_checked=kind is None)
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


def _keep(kept: KeptCopies, block: object) -> None:
    if not kept.blocks:

        def refuse(optimizer: Any, *rest: object) -> None:
            kept.refuse_step(optimizer)

        # It is asked before a managed optimizer has done anything.
        observer = SimpleNamespace(on_step_begin=refuse)
        kept.at_end.callback(registry.observers.remove, observer)
        registry.observers.add(observer)
        kept.at_end.callback(register_optimizer_step_pre_hook(refuse).remove)
    kept.begin(block)
