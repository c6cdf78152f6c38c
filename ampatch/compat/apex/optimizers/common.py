"""Shared code of apex's optimizers: `step`, `zero_grad`, checkpoints, weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from ampatch.torch_private import foreach
from ampatch.torch_private.devices import have_fused_optimizers

REFUSED_ARGUMENTS = {
    "amsgrad": "the optimizer without amsgrad",
    "eps_inside_sqrt": "the optimizer without eps_inside_sqrt",
}
"""What to use instead of arguments that are not available."""


class ApexOptimizer:
    """apex's `step(closure)`, `zero_grad` and checkpoints for an optimizer of torch.

    A mixin, in front of a `torch.optim.Optimizer` among the bases: torch's optimizers take
    these methods from their class.  A subclass implements one step on the present gradients
    in `_update`.

    With `may_fuse` torch's fused kernels take the step if they support the parameters.  `refused`
    has the values of apex's arguments that are not available.  `options` go to torch's class.
    """

    def __init__(
        self,
        params: Any,
        set_grad_none: bool,
        *,
        may_fuse: bool = False,
        refused: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        for name, value in (refused or {}).items():
            if value:
                refuse(type(self).__name__, f"{name}={value}", REFUSED_ARGUMENTS[name])
        params = list_params(params)
        if may_fuse:
            options["fused"] = can_be_fused(params) or None
        self.set_grad_none = set_grad_none
        super().__init__(params, **options)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them with `set_grad_none=False`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's.  Takes apex's state too: options that apex did not save stay unchanged."""
        state = {key: dict(entry) for key, entry in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, current in zip(groups, self.param_groups, strict=False):
            self._from_apex(group, state)
            for name, value in current.items():
                group.setdefault(name, value)
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})

    def _from_apex(self, group: dict[str, Any], state: dict[Any, dict]) -> None:
        """Change a group of a checkpoint, and its parameters' state, to torch's layout."""

    def step(self, closure: Callable | None = None) -> Any:
        """Take one step.  Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
        return loss

    def _update(self) -> None:
        """Take one step on the present gradients."""
        raise NotImplementedError

    def _step_of_torch(self, step: Callable, decouples_decay: bool) -> None:
        """Run the `step` of torch's class.  `decouples_decay`: decay the weights, as AdamW does."""
        # torch's wrapper that runs step hooks is around the `step` of this class already.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                params = params_with_grads(group)
                if decouples_decay and decay:
                    group["weight_decay"] = 0.0
                    if params:
                        foreach.mul_(params, 1 - group["lr"] * decay)
            step(self)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay


def copy_steps_to_params(group: dict[str, Any], state: dict[Any, dict]) -> None:
    """Copy the step count of a group, where apex keeps it, to its parameters, as torch does."""
    step = group.get("step", 0)
    for key in group["params"]:
        if key in state:
            state[key].setdefault("step", torch.as_tensor(step, dtype=torch.float32))


def params_with_grads(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group that have gradients."""
    return [param for param in group["params"] if param.grad is not None]


def refuse(name: str, argument: str, instead: str) -> NoReturn:
    """Raise apex's `RuntimeError` for an argument that is not available."""
    raise RuntimeError(f"apex.optimizers.{name}({argument}): not available. Use {instead}.")


def list_params(params: Any) -> list:
    """A list of parameters or groups.  Generators become lists, as they are read twice."""
    if isinstance(params, Tensor):
        raise TypeError("params: expected an iterable of tensors or dicts, got one tensor.")
    return [
        {**entry, "params": _in_group(entry["params"])} if isinstance(entry, dict) else entry
        for entry in params
    ]


def _in_group(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def can_be_fused(params: list) -> bool:
    """Whether torch's fused kernels support all parameters in a list of `list_params`."""
    groups = (entry["params"] if isinstance(entry, dict) else [entry] for entry in params)
    return have_fused_optimizers(chain.from_iterable(groups))
