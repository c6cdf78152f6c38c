"""Lightning's callbacks that average weights: they average FP32 values, and give FP32 values back.

They read and write `module.parameters()`, which are half weights at O2.  `state_dict()` and
`load_state_dict()` of a managed module have the values of its master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...log import logger


class _Values:
    """The FP32 values of a module's parameters, in the place of the module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self) -> Iterator[Tensor]:
        values = self._module.state_dict()
        return (values[name] for name, _ in self._module.named_parameters())


def _update_parameters(callback: Any) -> Callable:
    original = callback.update_parameters

    def update_parameters(average: nn.Module, module: nn.Module, *args: Any) -> None:
        original(average, _Values(module), *args)

    return update_parameters


def _transfer_weights(callback: Any) -> Callable:
    def transfer_weights(average: nn.Module, module: nn.Module) -> None:
        module.load_state_dict(dict(average.named_parameters()), strict=False)

    return transfer_weights


def _swap_models(callback: Any) -> Callable:
    def swap_models(module: nn.Module) -> None:
        average = callback._average_model.module
        current = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(average.state_dict())
        average.load_state_dict(current)

    return swap_models


def _copy_average_to_current(callback: Any) -> Callable:
    def copy_average_to_current(module: nn.Module) -> None:
        module.load_state_dict(callback._average_model.module.state_dict())

    return copy_average_to_current


_REPLACED = {
    "StochasticWeightAveraging": {
        "update_parameters": _update_parameters,
        "transfer_weights": _transfer_weights,
    },
    "WeightAveraging": {
        "_swap_models": _swap_models,
        "_copy_average_to_current": _copy_average_to_current,
    },
}
"""By class of Lightning and method, what makes the replacement for one callback."""


class _Method(NamedTuple):
    callback: Any
    name: str


class Averages:
    """The averaging callbacks of a Trainer, while their module is managed."""

    def __init__(self) -> None:
        self._replaced: list[_Method] = []

    def widen(self, callbacks: list[Any]) -> None:
        """Have these callbacks, as far as they average weights, use FP32 values."""
        for callback in callbacks:
            for kind in type(callback).__mro__:
                for name, make in _REPLACED.get(kind.__name__, {}).items():
                    self._replace(callback, name, make)

    def release(self) -> None:
        """The callbacks are as they were."""
        for callback, name in self._replaced:
            delattr(callback, name)
        self._replaced = []

    def _replace(self, callback: Any, name: str, make: Callable[[Any], Callable]) -> None:
        if not hasattr(callback, name):
            logger.warning(
                "%s of this version of Lightning has no %s, which ampatch replaces so that weights "
                "are averaged in FP32. At O2 the average is of half weights.",
                type(callback).__name__,
                name,
            )
            return
        setattr(callback, name, make(callback))
        self._replaced.append(_Method(callback, name))
