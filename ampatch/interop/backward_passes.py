"""Backward passes: `torch.autograd.grad`, `torch.autograd.backward`, and with it `Tensor.backward`.

* A pass that computes gradients of some weights only (`inputs=`) also runs through other layers
  whose weights share a cast node with these weights.  From the next forward on, each weight of that
  model has a cast node of its own.
* A pass in a `scale_loss` block is checked, because the gradients must be scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.compiler import is_dynamo_compiling

from ..casting.patches import Patch
from ..torch_private.probes import has_compiled_backward


def patches(
    record_wanted_grads: Callable[[list[Tensor]], bool],
    start_pass_check: Callable[[Any], Callable[[], None] | None],
) -> list[Patch]:
    """The patches of `torch.autograd.grad` and `torch.autograd.backward`.

    `record_wanted_grads(tensors)` is called with the inputs whose gradients a pass computes.  It
    returns whether existing graphs may cast these inputs in one node with other weights.  If so,
    the pass also runs through the layers of the other weights.  Under torch.autocast the pass would
    not free the saved tensors of these layers, so the patched function retains the graph.
    `start_pass_check(tensors)` is called before a pass from these tensors that adds to gradients.
    It returns a function to call after the pass, or None.
    """

    def retain_for(outputs: Any, inputs: Any, retain_graph: bool | None) -> bool | None:
        tensors = map(_differentiated_tensor, _items(inputs))
        if record_wanted_grads([tensor for tensor in tensors if isinstance(tensor, Tensor)]):
            return not any(map(has_compiled_backward, map(_node, _items(outputs)))) or retain_graph
        return retain_graph

    def make_grad(original: Callable) -> Callable:
        @functools.wraps(original)
        def grad(
            outputs: Any,
            inputs: Any,
            grad_outputs: Any = None,
            retain_graph: bool | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if not is_dynamo_compiling():
                outputs, inputs = _as_tuple(outputs), _as_tuple(inputs)
                retain_graph = retain_for(outputs, inputs, retain_graph)
            return original(outputs, inputs, grad_outputs, retain_graph, *args, **kwargs)

        return grad

    def make_backward(original: Callable) -> Callable:
        @functools.wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            after_pass = None
            if not is_dynamo_compiling():
                if inputs is not None:
                    tensors, inputs = _as_tuple(tensors), _as_tuple(inputs)
                    retain_graph = retain_for(tensors, inputs, retain_graph)
                after_pass = start_pass_check(tensors)
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            if after_pass is not None:
                after_pass()

        return backward

    return [(torch.autograd, "grad", make_grad), (torch.autograd, "backward", make_backward)]


def _as_tuple(tensors: Any) -> Any:
    """A tuple for an iterator such as `model.parameters()`, which can be read only once."""
    return tuple(tensors) if isinstance(tensors, Iterator) else tensors


def _items(tensors: Any) -> Iterable[Any]:
    """The outputs or inputs of a pass, one by one; torch raises errors for invalid ones."""
    if isinstance(tensors, (Tensor, GradientEdge)) or not isinstance(tensors, Iterable):
        return [tensors]
    return tensors.values() if isinstance(tensors, Mapping) else tensors


def _differentiated_tensor(item: Any) -> Any:
    """The tensor whose gradient is computed; for a gradient edge of a leaf, the leaf."""
    return getattr(item.node, "variable", None) if isinstance(item, GradientEdge) else item


def _node(item: Any) -> Any:
    return item.node if isinstance(item, GradientEdge) else getattr(item, "grad_fn", None)
