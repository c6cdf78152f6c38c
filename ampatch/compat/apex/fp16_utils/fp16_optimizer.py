"""FP16_Optimizer: an optimizer with FP32 copies of its half weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from ampatch import AmpatchError

from ....config.validation import positive_number
from .. import scaler
from .loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["FP16_Optimizer"]

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_IN_CHECKPOINTS = ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step")


def _attribute_of_optimizer(name: str) -> Any:
    def set_value(wrapper: FP16_Optimizer, value: Any) -> None:
        setattr(wrapper.optimizer, name, value)

    return property(lambda wrapper: getattr(wrapper.optimizer, name), set_value)


class FP16_Optimizer:  # apex's name
    """Wraps an optimizer of half and FP32 parameters.

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                   dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)        # instead of loss.backward()
        optimizer.step()

    `param_groups` hold the FP32 copies.  To accumulate gradients call
    `backward(loss, update_master_grads=False)`, and `update_master_grads()` before the step.

    `backward` and `update_master_grads` update a dynamic scale, as in apex's last version.  After
    an overflow `overflow` is set until the next check, the FP32 copies have gradients that are not
    finite, and `step` does nothing, so that a loop may call it or not.

    Args:
        init_optimizer: a `torch.optim.Optimizer`.
        static_loss_scale: the loss scale; ignored with `dynamic_loss_scale`.
        dynamic_loss_scale: start at 2**16 and check for overflow.
        dynamic_loss_args: arguments of `apex.amp.scaler.LossScaler`, such as `init_scale`.
        verbose: print skipped steps.
    """

    def __init__(
        self, init_optimizer: Any, static_loss_scale: float = 1.0, dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict | None = None, verbose: bool = True,
    ) -> None:  # fmt: skip
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        if dynamic_loss_scale:
            self.loss_scaler = scaler.LossScaler("dynamic", **(dynamic_loss_args or {}))
        else:
            call = f"FP16_Optimizer(static_loss_scale={static_loss_scale!r})"
            expected = "a positive number, or dynamic_loss_scale=True"
            scale = positive_number(call, static_loss_scale, expected, or_text=True)
            self.loss_scaler = scaler.LossScaler(scale)
        self.overflow = False
        self.first_closure_call_this_step = True  # part of checkpoints
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in self.optimizer.param_groups:
            self._split(group)

    def _split(self, group: dict) -> None:
        """Replace a group's half parameters by FP32 copies."""
        halves, masters, floats = [], [], []
        for index, param in enumerate(group["params"]):
            if param.dtype not in _HALF_DTYPES:
                floats.append(param)
                continue
            master = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
            group["params"][index] = master
            if param in self.optimizer.state:
                self.optimizer.state[master] = _to_fp32(self.optimizer.state.pop(param))
            halves.append(param)
            masters.append(master)
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(floats)

    def add_param_group(self, group: dict) -> None:
        """Like the optimizer's; the new half parameters get FP32 copies too."""
        self.optimizer.add_param_group(group)
        self._split(self.optimizer.param_groups[-1])

    # Training

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zero, or drop, the gradients of the model and of the FP32 copies."""
        for param in (*self._masters(), *self._model_params()):
            if param.grad is not None:
                param.grad = None if set_grads_to_None else torch.zeros_like(param.grad)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run backward of the scaled loss, then `update_master_grads()` if the argument is True."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the model's gradients to the FP32 copies, unscale them, and update the scale."""
        self.loss_scaler.clear_overflow_state()
        for half, master in self._pairs():
            master.grad = None if half.grad is None else half.grad.detach().float().clone()
        grads = [param.grad for param in self._masters() if param.grad is not None]
        self.loss_scaler.unscale(grads, grads, models_are_masters=True)
        self.overflow = self.loss_scaler.update_scale()

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The FP32 gradients (or None) group by group.  None after an overflow."""
        grads = [[param.grad for param in group["params"]] for group in self.param_groups]
        detached = [[None if g is None else g.detach() for g in group] for group in grads]
        return None if self.overflow else detached

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the FP32 gradients.  Returns the norm before clipping, or -1 after an overflow."""
        if self.overflow:
            return -1
        return clip_grad_norm_(self._masters(), max_norm, norm_type)

    def step(self, closure: Callable | None = None) -> None:
        """Take a step, except after an overflow.  Raises `AmpatchError` for a closure."""
        if closure is not None:
            raise AmpatchError(
                "FP16_Optimizer.step(closure): closures are not supported. Use "
                'ampatch.initialize(model, optimizer, opt_level="O2", loss_scale=128.0), and '
                "optimizer.step(closure)."
            )
        if not self.overflow:
            self.optimizer.step()
            with torch.no_grad():
                for half, master in self._pairs():
                    half.copy_(master)
        elif self.verbose:
            print(f"Overflow, step skipped. The loss scale is {self.loss_scale} now.")

    # Parameters

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        halves, masters = chain(*self.fp16_groups), chain(*self.fp32_from_fp16_groups)
        return list(zip(halves, masters, strict=True))

    def _masters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _model_params(self) -> list[Tensor]:
        return [*chain(*self.fp16_groups, *self.fp32_from_fp32_groups)]

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """apex's entries.  `fp32_from_fp16` has the FP32 copies, group by group."""
        return {
            **{name: getattr(self, name) for name in _IN_CHECKPOINTS},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`, apex's too.  Load the model first."""
        saved, masters = state_dict["fp32_from_fp16"], self.fp32_from_fp16_groups
        shapes = [[[t.shape for t in group] for group in groups] for groups in (saved, masters)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                "FP16_Optimizer.load_state_dict(state_dict): state_dict['fp32_from_fp16'] does "
                "not fit the half parameters of this optimizer. Expected the checkpoint of the "
                "same model and parameter groups."
            )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for name in _IN_CHECKPOINTS:
            setattr(self, name, state_dict[name])
        self.loss_scaler = _as_loss_scaler(self.loss_scaler)
        with torch.no_grad():
            for master, value in zip(chain(*masters), chain(*saved), strict=True):
                master.copy_(value)

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = float(value)

    cur_scale = loss_scale  # its name in apex.optimizers

    state = _attribute_of_optimizer("state")
    param_groups = _attribute_of_optimizer("param_groups")


def _as_loss_scaler(saved: Any) -> scaler.LossScaler:
    """Convert a scaler from a checkpoint, if its class is in `fp16_utils.loss_scaler`."""
    if isinstance(saved, DynamicLossScaler):
        rule = saved.cur_scale, saved.scale_factor, saved.scale_window
        new = scaler.LossScaler("dynamic", *rule, max_loss_scale=max(saved.cur_scale, 2.0**32))
        new._unskipped = max(saved.cur_iter - saved.last_overflow_iter - 1, 0) % saved.scale_window
        return new
    return scaler.LossScaler(saved.cur_scale) if isinstance(saved, LossScaler) else saved


def _to_fp32(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.float() if isinstance(value, Tensor) and value.dtype in _HALF_DTYPES else value
        for key, value in state.items()
    }
