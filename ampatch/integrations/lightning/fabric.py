"""The precision plugin of Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import wrapt
from torch import Tensor, nn
from torch.optim import Optimizer

import ampatch

from ..managed import Managed, checked
from .packages import PACKAGES

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ...types import HalfName, OptLevel, PluginSettings


class AmpatchFabricPrecision(*(each.fabric.plugins.Precision for each in PACKAGES)):  # type: ignore[misc]
    """Trains with ampatch under Fabric: `Fabric(plugins=[AmpatchFabricPrecision(opt_level="O2")])`.

    Modules that Fabric sets up share one loss scale, as with Fabric's own mixed precision.
    `fabric.save(path, {..., "precision": plugin})` saves the loss scale.

    Args:
        opt_level: as in `ampatch.initialize`.
        dtype: as in `ampatch.initialize`.
        settings: other arguments of `ampatch.initialize` except `num_losses`, by keyword.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong; the message names it.
    """

    precision = "32-true"  # Lightning's name of what model and optimizers look like from outside

    def __init__(
        self,
        opt_level: OptLevel = "O1",
        dtype: torch.dtype | HalfName = "float16",
        **settings: Unpack[PluginSettings],
    ) -> None:
        super().__init__()
        given = {"opt_level": opt_level, "dtype": dtype, **settings}
        self._run = Managed(checked(type(self).__name__, given))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._run.settings.items())
        return f"{type(self).__name__}({given})"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Manage a module; its optimizers come when Fabric has set them up."""
        self._run.open(module)
        return module

    def teardown(self) -> None:
        """Modules and optimizers are plain again."""
        self._run.close()

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """`backward` of the scaled loss; the gradients are unscaled after it."""
        with self._run.scaled(tensor) as scaled:
            scaled.backward(*args, **kwargs)

    def main_params(self, optimizer: Any) -> Any:
        """What the optimizer updates: its parameters."""
        return ampatch.master_params(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The loss scales."""
        return self._run.scales

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with these loss scales."""
        self._run.scales = state_dict

    def set_up(self, results: Any) -> None:
        """Fabric has set these up: manage the optimizers among them."""
        listed: tuple[Any, ...] = results if isinstance(results, tuple) else (results,)
        wrapped: list[Any] = [one for one in listed if isinstance(one, Optimizer)]
        self._run.add([one.optimizer for one in wrapped])


def _told(original: Callable, fabric: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    results = original(*args, **kwargs)
    plugin = fabric.strategy.precision
    if isinstance(plugin, AmpatchFabricPrecision):
        plugin.set_up(results)
    return results


for _package in PACKAGES:  # Fabric tells its plugin of modules only; it wraps optimizers silently
    for _name in ("setup", "setup_optimizers"):
        wrapt.wrap_function_wrapper(_package.fabric.Fabric, _name, _told)
