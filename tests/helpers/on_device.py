"""Situations on another device: what their files make with `torch` and `nn` is made there.

No mode of torch does this, because a mode would see, and move, what ampatch makes as well.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

FACTORIES = frozenset(
    ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm")
    + ("tensor", "zeros")
)


class _Torch:
    """`torch`, whose factory functions and regions of autocast are for `device`."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name in FACTORIES:
            return functools.partial(self._made, getattr(torch, name))
        if name == "autocast":
            return self._autocast
        return getattr(torch, name)

    def _made(self, factory: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "generator" in kwargs:  # one of the host, whose numbers CUDA does not take
            return factory(*args, **kwargs).to(self._device)
        return factory(*args, **{"device": self._device, **kwargs})

    def _autocast(self, device: str, *args: Any, **kwargs: Any) -> torch.autocast:
        return torch.autocast(self._device if device == "cpu" else device, *args, **kwargs)


class _NN:
    """`torch.nn`, whose modules come to be on `device`."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        results = getattr(nn, name)
        is_kind = isinstance(results, type) and issubclass(results, nn.Module)
        return _Kind(results, self._device) if is_kind else results


class _Kind:
    """A class of modules: it can be called, derived from and asked about as such."""

    def __init__(self, kind: type, device: str) -> None:
        self._kind = kind
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        if issubclass(self._kind, LazyModuleMixin):  # torch cannot move what has no shape yet
            return self._kind(*args, device=self._device, **kwargs)
        return self._kind(*args, **kwargs).to(self._device)

    def __instancecheck__(self, results: object) -> bool:
        return isinstance(results, self._kind)

    def __mro_entries__(self, bases: tuple) -> tuple[type]:
        return (self._kind,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)


def move(patch: Any, modules: list[ModuleType], device: str) -> None:
    """Have these modules make tensors and layers on `device`, until `patch` is undone."""
    for module in modules:
        for name, proxy in (("torch", _Torch(device)), ("nn", _NN(device))):
            patch.setattr(module, name, proxy, raising=False)
