"""Under `ampatch run --auto`, outermost modules that have parameters are run with casts.

Such a script never says which module is its model.  Outside of modules, it computes data, labels
and metrics, which are not cast, and losses, which are: `OutermostForwards.condition` decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..config.opt_levels import HALF_DTYPES
from ..torch_private.tensors import base_of
from ..torch_private.torch_functions import no_torch_function
from .arguments import tensors_in
from .calls import Call, CastState
from .handlers import has_handler
from .policy import Policy
from .rules import PLAIN_TENSOR_TYPES, dtype_of

_MAX_NODES = 1000
"""The autograd nodes that are searched for a parameter, for each call outside of modules."""


class OutermostForwards:
    """Runs outermost forwards under `policy`.  `has_cast`: whether it has decided to cast."""

    def __init__(self, policy: Policy, state: CastState) -> None:
        self._policy = policy
        self._state = state
        self.has_cast = False

    def around(self, original: Callable) -> Callable:
        """The replacement of `nn.Module.__call__`."""

        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            state = self._state
            if is_dynamo_compiling():
                return original(module, *args, **kwargs)
            policy = state.current_policy()  # without a condition inside an outer forward
            is_outside = policy is not None and policy.condition is not None
            if not is_outside or next(module.parameters(), None) is None:
                return original(module, *args, **kwargs)
            self.has_cast = True
            return state.run_in_call(self._enter, original, module, *args, **kwargs)

        return __call__

    def _enter(self, call: Call) -> None:
        self._state.enter(call, None)
        self._state.set_policy(call, self._policy)
        self._policy.cache.open(call)

    def condition(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call outside of modules is cast.

        It is if it has a half tensor, or a tensor that was computed from a parameter.
        """
        for tensor in tensors_in((*args, *kwargs.values())):
            if dtype_of(tensor) in HALF_DTYPES or _leads_to_parameter(tensor):
                self.has_cast = True
                return True
        return False


def _leads_to_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter, a view of one, or computed from one."""
    if isinstance(tensor, nn.Parameter):
        return True
    if is_dynamo_compiling():
        return False
    if type(tensor) not in PLAIN_TENSOR_TYPES and has_handler(tensor):
        with no_torch_function():
            return _has_parameter_in_graph(tensor)
    return _has_parameter_in_graph(tensor)


def _has_parameter_in_graph(tensor: Tensor) -> bool:
    if isinstance(base_of(tensor), nn.Parameter):
        return True
    todo = [tensor.grad_fn]
    for _ in range(_MAX_NODES):
        if not todo:
            break
        node = todo.pop()
        if node is None:
            continue
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        todo += [next_node for next_node, _ in node.next_functions]
    return False
