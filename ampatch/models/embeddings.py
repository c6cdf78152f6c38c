"""O2: the weight of an embedding is cast to half only if code other than the lookup reads it.

A lookup reads some vectors of the weight, but a cast would read all vectors in each forward.  So
`nn.Embedding` and `nn.EmbeddingBag` look up in their FP32 weight, and return the result in half
(`casting/special_ops`).  Other code that reads the weight while the model's forward runs, such as a
product with it, gets a half copy, as for any other weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..casting.half_copies import cast_weights
from ..torch_private.modules import PARAMS_NAME
from ..torch_private.probes import is_traced_or_transformed
from .values import cast_tensors, caster, map_tensors

_to_fp32 = caster(torch.float32)


class EmbeddingParameters(dict):
    """Replaces `_parameters` of an embedding while the model's forward runs.

    The half copy is made when the weight is read.  From then on the module has its previous dict
    (`module_params`) again, with the copy in it.  All forwards use the same object, because Dynamo
    guards on its identity.
    """

    dtype: torch.dtype
    grad_mode: bool

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module_params: dict[str, Any] = vars(module)[PARAMS_NAME]
        super().__init__(self.module_params)
        self.module = module
        self.name = name
        self.parameter: Tensor = self.module_params[name]
        self.half_copy: Tensor | None = None
        self.on_copy: Callable[[Tensor, Tensor], object] | None = None

    def swap_in(
        self, dtype: torch.dtype, copy: Tensor | None, on_copy: Callable[[Tensor, Tensor], object]
    ) -> None:
        """Replace the module's `_parameters`; `on_copy(parameter, copy)` is called with the copy.

        `copy`: the forward's copy, if a recompute swaps in again; it is put in the slot at once.
        If other code has changed the module's parameter, nothing is done.
        """
        attributes, params = vars(self.module), self.module_params
        if attributes.get(PARAMS_NAME) is not params or params.get(self.name) is not self.parameter:
            return
        self.dtype, self.half_copy, self.on_copy = dtype, copy, on_copy
        self.grad_mode = torch.is_grad_enabled()
        if copy is None:
            attributes[PARAMS_NAME] = self
        else:
            params[self.name] = copy

    def swap_out(self, on_copy: Callable[[Tensor, Tensor], object]) -> None:
        """Undo `swap_in`, if it was called with this `on_copy`.  May be called again."""
        if self.on_copy != on_copy:
            return
        if self.half_copy is not None and self.module_params.get(self.name) is self.half_copy:
            self.module_params[self.name] = self.parameter
        attributes = vars(self.module)
        if attributes.get(PARAMS_NAME) is self:
            attributes[PARAMS_NAME] = self.module_params
        self.half_copy = self.on_copy = None

    def look_up(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the class's `forward` with the FP32 weight.  Returns the result in half."""
        if kwargs or len(args) > 1:  # `per_sample_weights` may be among them
            args, kwargs = map_tensors(args, _to_fp32), map_tensors(kwargs, _to_fp32)
        output = forward(_ModuleWithWeight(self.module, self.name, self.parameter), *args, **kwargs)
        return output.to(self.dtype) if type(output) is Tensor else cast_tensors(output, self.dtype)

    def _params_with_copy(self) -> dict[str, Any]:
        """`module_params`, with the half copy in it while the module's forward may read it."""
        if is_dynamo_compiling() or is_traced_or_transformed():
            # The cast becomes a node of the traced graph.
            return {**self.module_params, self.name: self.parameter.to(self.dtype)}
        attributes = vars(self.module)
        if attributes.get(PARAMS_NAME) is self:
            if self.half_copy is None:
                own_node = not self.module.sparse  # an own node accepts no sparse gradients
                with torch.inference_mode(False), torch.set_grad_enabled(self.grad_mode):
                    [copy] = cast_weights([self.parameter], self.dtype, own_nodes=own_node)
                assert self.on_copy is not None
                # Before the next line: KeyboardInterrupt may be raised anywhere.
                self.on_copy(self.parameter, copy)
                self.half_copy = copy
            self.module_params[self.name] = self.half_copy
            attributes[PARAMS_NAME] = self.module_params
        return self.module_params

    def __iter__(self) -> Iterator[str]:  # makes `dict(self)` read the values
        return iter(self._params_with_copy())

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return dict, (dict(self._params_with_copy()),)


def _delegating_method(name: str) -> Callable:
    def method(self: EmbeddingParameters, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._params_with_copy(), name)(*args, **kwargs)

    return method


for _name in (
    "__delitem__", "__eq__", "__getitem__", "__ior__", "__or__", "__ror__", "__setitem__",
    "clear", "copy", "get", "items", "pop", "popitem", "setdefault", "update", "values",
):  # fmt: skip
    setattr(EmbeddingParameters, _name, _delegating_method(_name))


class _ModuleWithWeight:
    """Stands for `self` in a module's `forward`, with another tensor for one parameter."""

    def __init__(self, module: nn.Module, name: str, weight: Tensor) -> None:
        if not is_dynamo_compiling():  # while Dynamo traces, `__getattr__` finds each attribute
            self.__dict__.update(vars(module))
        self.__dict__[name] = weight
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
