"""Backward passes: `torch.autograd.grad`, `torch.autograd.backward`, and with it `Tensor.backward`.

* A pass that asks for gradients of single weights (`inputs=`) runs through all layers whose weights
  share a cast node with these.  From the next forward on, each weight of that model has its own
  cast node.
* A pass in a `scale_loss` block is checked: its gradients must be scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.compiler import is_dynamo_compiling

from ..casting.patches import Replacement
from ..torch_private.probes import has_compiled_backward


def replacements(
    record_wanted_grads: Callable[[list[Tensor]], bool],
    pass_begins: Callable[[Any], Callable[[], None] | None],
) -> list[Replacement]:
    """The replacements.

    `record_wanted_grads(tensors)` is called with the inputs whose gradients a pass asks for.  It
    returns whether existing graphs may cast them in one node with other weights.  If so, the pass
    runs through the layers of these weights too.  It retains the graph, so that it frees none of
    their buffers, as under torch.autocast.
    `pass_begins(tensors)` is called before a pass from these tensors that adds to gradients.  It
    returns a check to call after the pass, or None.
    """

    def retained(outputs: Any, inputs: Any, retain_graph: bool | None) -> bool | None:
        if record_wanted_grads([t for t in map(_leaf, _items(inputs)) if isinstance(t, Tensor)]):
            return not any(map(has_compiled_backward, map(_node, _items(outputs)))) or retain_graph
        return retain_graph

    def of_grad(original: Callable) -> Callable:
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
                outputs, inputs = _materialized(outputs), _materialized(inputs)
                retain_graph = retained(outputs, inputs, retain_graph)
            return original(outputs, inputs, grad_outputs, retain_graph, *args, **kwargs)

        return grad

    def of_backward(original: Callable) -> Callable:
        @functools.wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            check_pass = None
            if not is_dynamo_compiling():
                if inputs is not None:
                    tensors, inputs = _materialized(tensors), _materialized(inputs)
                    retain_graph = retained(tensors, inputs, retain_graph)
                check_pass = pass_begins(tensors)
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            if check_pass is not None:
                check_pass()

        return backward

    return [(torch.autograd, "grad", of_grad), (torch.autograd, "backward", of_backward)]


def _materialized(tensors: Any) -> Any:
    """The tuple of an iterator, such as `model.parameters()`, which can be read only once."""
    return tuple(tensors) if isinstance(tensors, Iterator) else tensors


def _items(tensors: Any) -> Iterable[Any]:
    """The outputs or inputs of a pass, one by one; torch refuses wrong ones."""
    if isinstance(tensors, (Tensor, GradientEdge)) or not isinstance(tensors, Iterable):
        return [tensors]
    return tensors.values() if isinstance(tensors, Mapping) else tensors


def _leaf(item: Any) -> Any:
    """The tensor whose gradient is asked for; for an edge to a leaf's accumulator, the leaf."""
    return getattr(item.node, "variable", None) if isinstance(item, GradientEdge) else item


def _node(item: Any) -> Any:
    return item.node if isinstance(item, GradientEdge) else getattr(item, "grad_fn", None)
