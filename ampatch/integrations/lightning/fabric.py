"""The precision plugin of Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt
from torch import Tensor, nn
from torch.optim import Optimizer

from .packages import PACKAGES, Plugin


class AmpatchFabricPrecision(Plugin, *(package.fabric.plugins.Precision for package in PACKAGES)):  # type: ignore[misc]
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

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Manage a module.  `set_up` adds its optimizers."""
        self._ampatch.open(module)
        return module

    def teardown(self) -> None:
        """Release the modules and the optimizers."""
        self._ampatch.close()

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run `backward` of the scaled loss, then unscale the gradients."""
        with self._ampatch.scaled(tensor) as scaled:
            scaled.backward(*args, **kwargs)

    def set_up(self, results: Any) -> None:
        """Manage the optimizers among the results of Fabric's `setup`."""
        listed: tuple[Any, ...] = results if isinstance(results, tuple) else (results,)
        wrapped: list[Any] = [result for result in listed if isinstance(result, Optimizer)]
        self._ampatch.add([result.optimizer for result in wrapped])


def _setup(original: Callable, fabric: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    results = original(*args, **kwargs)
    plugin = fabric.strategy.precision
    if isinstance(plugin, AmpatchFabricPrecision):
        plugin.set_up(results)
    return results


for _package in PACKAGES:  # Fabric does not call its plugin for optimizers
    for _name in ("setup", "setup_optimizers"):
        wrapt.wrap_function_wrapper(_package.fabric.Fabric, _name, _setup)
