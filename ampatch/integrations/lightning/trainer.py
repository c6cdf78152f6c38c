"""The precision plugin of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS

from ...session import facade
from .packages import PACKAGES, Plugin


class AmpatchPrecision(Plugin, *(package.trainer.plugins.Precision for package in PACKAGES)):  # type: ignore[misc]
    """Trains a LightningModule with ampatch: `Trainer(plugins=[AmpatchPrecision(opt_level="O2")])`.

    Args:
        opt_level: as in `ampatch.initialize`.
        dtype: as in `ampatch.initialize`.
        settings: other arguments of `ampatch.initialize` except `num_losses`, by keyword.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong; the message names it.
    """

    _precision_class = PACKAGES[0].trainer.plugins.Precision
    _module: Any = None  # the managed module
    _is_compiled = False

    # Start and end

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Manage the LightningModule.  `connect` adds its optimizers."""
        packages = [
            package for package in PACKAGES if isinstance(module, package.trainer.LightningModule)
        ]
        if not packages or not _has_trainer(module):
            raise TypeError(
                f"{self!r} was given to Fabric. It is for a Trainer. Write "
                "Fabric(plugins=[AmpatchFabricPrecision(...)])."
            )
        self._precision_class = packages[0].trainer.plugins.Precision
        self._ampatch.close()
        self._ampatch.open(module)
        self._module = module
        self._is_compiled = "training_step" in vars(module)  # set by torch.compile
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Manage the optimizers."""
        self._ampatch.add(optimizers)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Release the module and the optimizers.  The loss scale stays for another fit."""
        self._module = None
        self._ampatch.close()

    # One step

    def convert_input(self, data: Any) -> Any:
        """The batch, cast to half if an O3 module has a compiled `training_step`.

        In other cases each submodule casts its own inputs, and targets stay unchanged.
        """
        if self._is_compiled:
            return apply_to_collection(data, Tensor, self._ampatch.cast_to_weight_dtype)
        return data

    def train_step_context(self) -> AbstractContextManager[None]:
        """The context of `training_step`: its own code (the loss) is not in the half model."""
        if self._module is None:
            return nullcontext()
        return facade.in_framework_step(self._module)

    val_step_context = test_step_context = predict_step_context = train_step_context

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call the hooks `on_before_backward` with the unscaled loss."""
        return self._precision_class.pre_backward(self, tensor, module)

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run `LightningModule.backward` of the scaled loss, then unscale the gradients."""
        with self._ampatch.scaled(tensor) as scaled:
            model.backward(scaled, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Call the hooks `on_after_backward`."""
        return self._precision_class.post_backward(self, tensor, module)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run `closure` (forward, backward and clipping), and the optimizer's step.

        The closure runs first, then the step, as in Lightning's mixed precision.  LBFGS calls the
        closure itself.  So do optimizers that are not torch's, if the loss scale is static.
        """
        optimizer_calls_closure = isinstance(optimizer, LBFGS) or not (
            facade.evaluates_closure_first(optimizer) or self._ampatch.checks_for_overflow()
        )
        if optimizer_calls_closure:
            return self._precision_class.optimizer_step(self, optimizer, model, closure, **kwargs)
        result = closure()
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            return None  # `training_step` returned None: no gradients
        step = optimizer.step(**kwargs)
        return step if result is None else result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        self._precision_class._after_closure(self, model, optimizer)

    def _clip_gradients(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._precision_class._clip_gradients(self, model, optimizer, *args, **kwargs)


def _has_trainer(module: Any) -> bool:
    try:
        return module.trainer is not None
    except RuntimeError:  # which Lightning raises for a module without a trainer
        return False
