"""The autocast baseline: the same script under torch.autocast and torch.amp.GradScaler.

`install` replaces `initialize` and `scale_loss` in the package `ampatch`.  A script that uses
ampatch or `from apex import amp` then runs, unedited, like one for PyTorch's own mixed precision:

* Each model's forward runs under `torch.autocast`, and its floating outputs are FP32 afterwards.
  Weights stay FP32.  Code outside a model's forward does not run in half.
* One `GradScaler` with its defaults scales all losses.  It is off in bfloat16, unless the script
  sets `loss_scale="dynamic"`.  A static loss scale of the script is ignored.
* `scale_loss` scales, and on its exit calls `unscale_`, so that gradients can be clipped.
  `optimizer.step()` calls `GradScaler.step`, and `update` follows when every optimizer whose loss
  was scaled has stepped.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import ampatch
from ampatch.errors import AmpatchError
from ampatch.session.facade import map_tensors
from ampatch.sweep.execution.plain_training import PlainTraining
from ampatch.sweep.measure.recorder import Recorder
from ampatch.torch_private.optimizers import forget_unscaling

_SCALER_SETTINGS = ("init_scale", "growth_interval", "growth_factor", "backoff_factor")
_HALVES = (torch.float16, torch.bfloat16)
_PUBLIC = ("init", "initialize", "scale_loss", "step_was_skipped")


class AutocastBaseline:
    """Implements `ampatch.initialize` and `ampatch.scale_loss` in one process."""

    def __init__(self, dtype: torch.dtype, recorder: Recorder) -> None:
        self._dtype = dtype
        self._recorder = recorder
        self._device = "cpu"
        self._scaler = torch.amp.GradScaler("cpu", enabled=False)
        self._enabled = False
        self._scaled: dict[int, Any] = {}  # optimizers by id, from scale_loss to their step
        self._unscaled: set[int] = set()  # ids in `_scaled` whose gradients are unscaled
        self._stepped: set[int] = set()  # ids of optimizers stepped since the scaler's last update
        self._last_skipped: dict[int, Any] = {}  # whether the last step was skipped, by id
        self._initialize = ampatch.initialize
        self._unscaled_losses = PlainTraining(recorder, "")

    def install(self) -> None:
        """Replace the public functions, for the rest of the process."""
        self._unscaled_losses.watch_losses()  # up to the first `scale_loss`
        for name in _PUBLIC:
            original = getattr(ampatch, name)
            for module in (ampatch, sys.modules.get("ampatch.compat.apex.amp")):
                if getattr(module, name, None) is original:
                    setattr(module, name, getattr(self, name))

    # Replacements of public functions

    def initialize(self, *args: Any, **kwargs: Any) -> Any:
        """Like `ampatch.initialize`, which opens a disabled session here."""
        bound = inspect.signature(self._initialize).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {**bound.arguments, "enabled": False}
        result = self._initialize(**arguments)
        if bound.arguments["enabled"]:
            models, optimizers = arguments["models"], arguments["optimizers"]
            self._start(_as_list(models), _as_list(optimizers), bound.arguments)
        return result

    def init(self, *args: Any, **kwargs: Any) -> Any:
        raise AmpatchError("init(): the row autocast needs initialize. Give --no-autocast.")

    @contextlib.contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Any, loss_id: int = 0, *args: Any, **kwargs: Any
    ) -> Iterator[Tensor]:
        """Like `ampatch.scale_loss`, with the GradScaler."""
        if not self._enabled:
            yield loss
            return
        self._update_after_step()
        optimizers = _as_list(optimizers)
        self._unscaled_losses.mute()
        self._recorder.on_loss(loss, loss_id)
        for optimizer in optimizers:
            self._scale_again(optimizer)
        scaled = self._scaler.scale(loss)
        unit = torch.ones((), device=loss.device)  # reading the scale would wait for the device
        self._recorder.on_scale(self._scaler.scale(unit), loss_id)
        yield scaled
        for optimizer in optimizers:
            self._scaled[id(optimizer)] = optimizer
            if not kwargs.get("delay_unscale", args[1] if len(args) > 1 else False):
                self._unscale(optimizer)

    def step_was_skipped(self, optimizer: Any) -> bool:
        return bool(self._last_skipped.get(id(optimizer), False))

    def _start(self, models: list[Any], optimizers: list[Any], arguments: dict[str, Any]) -> None:
        self._enabled = True
        self._device = next(
            (param.device.type for model in models for param in model.parameters()), "cpu"
        )
        has_scaler = self._dtype is torch.float16 or arguments["loss_scale"] == "dynamic"
        settings = {name: arguments[name] for name in _SCALER_SETTINGS}
        self._scaler = torch.amp.GradScaler(self._device, enabled=has_scaler, **settings)
        for model in models:
            put_under_autocast(model, self._device, self._dtype)
        for optimizer in optimizers:
            self._replace_step(optimizer)
        self._recorder.on_training_without_ampatch(
            "autocast", {"dtype": str(self._dtype), "grad_scaler": str(has_scaler), **settings}
        )

    def _replace_step(self, optimizer: Any) -> None:
        original = optimizer.step
        is_inside = False

        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # called by GradScaler.step: no overflow, or a fused kernel decides
                found_inf = getattr(optimizer, "found_inf", None)
                self._last_skipped[id(optimizer)] = found_inf is not None and found_inf.clone()
                return original(*args, **kwargs)
            self._last_skipped[id(optimizer)] = False
            is_inside = True
            try:
                result = self._step(optimizer, original, args, kwargs)
            finally:
                is_inside = False
            self._recorder.on_step(optimizer, self._last_skipped[id(optimizer)])
            return result

        optimizer.step = types.MethodType(step, optimizer)

    def _step(self, optimizer: Any, original: Callable, args: tuple, kwargs: dict) -> Any:
        scaled = self._scaled.pop(id(optimizer), None) is not None
        self._unscaled.discard(id(optimizer))
        has_closure = any(map(callable, [*args, *kwargs.values()]))
        if has_closure and self._scaler.is_enabled():
            raise AmpatchError("torch.amp.GradScaler takes no step(closure). Give --no-autocast.")
        if not (scaled and _has_grads(optimizer)):
            forget_unscaling(self._scaler, optimizer)
            return original(*args, **kwargs)
        if self._scaler.is_enabled():
            self._last_skipped[id(optimizer)] = True  # until GradScaler calls the step
        result = self._scaler.step(optimizer, *args, **kwargs)
        self._stepped.add(id(optimizer))
        if not self._scaled:
            self._update_after_step()
        return result

    def _update_after_step(self) -> None:
        """Update the scale when all optimizers have stepped, or at the first loss after a step."""
        if self._stepped and not self._unscaled:
            self._scaler.update()
            self._stepped.clear()

    def _unscale(self, optimizer: Any) -> None:
        if self._scaler.is_enabled() and _has_grads(optimizer):
            self._scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def _scale_again(self, optimizer: Any) -> None:
        """Multiply unscaled gradients by the scale again, for gradient accumulation.

        An earlier overflow is still visible in the gradients.  GradScaler refuses a second
        `unscale_` before the step unless it forgets the first.
        """
        if id(optimizer) not in self._unscaled:
            return
        self._unscaled.discard(id(optimizer))
        forget_unscaling(self._scaler, optimizer)
        for param in _params(optimizer):
            if param.grad is not None:
                param.grad = self._scaler.scale(param.grad)


def put_under_autocast(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Run the model's forward under autocast, by hooks; its floating outputs become FP32."""
    entered: list[Any] = []  # regions of forwards that are running

    def enter(module: nn.Module, args: Any) -> None:
        region = torch.autocast(device, dtype=dtype)
        region.__enter__()
        entered.append(region)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return map_tensors(output, lambda x: x.float() if x.dtype in _HALVES else x)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _params(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _has_grads(optimizer: Any) -> bool:
    return any(param.grad is not None for param in _params(optimizer))


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
