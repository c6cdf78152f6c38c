"""`torch.autograd.grad` and `backward(inputs=...)`: gradients of single weights are asked for.

Such a pass goes through all layers whose weights are cast by one node with a weight that it asks
for.  So each weight of that model is cast by a node of its own from the next forward on.
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

_ONE = (Tensor, GradientEdge)


def replacements(is_new: Callable[[list[Tensor]], bool]) -> list[Replacement]:
    """What to replace.

    `is_new(tensors)`: gradients of these are asked for; whether the graph that is there has nodes
    which they share with others.  It then outlives the pass, which would free the buffers of layers
    that torch's own graph does not reach.
    """

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
                inputs = tuple(inputs) if isinstance(inputs, Iterator) else inputs
                retain_graph = is_new(_tensors(inputs)) or retain_graph
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
            if inputs is not None and not is_dynamo_compiling():
                inputs = tuple(inputs) if isinstance(inputs, Iterator) else inputs
                retain_graph = is_new(_tensors(inputs)) or retain_graph
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

        return backward

    return [(torch.autograd, "grad", of_grad), (torch.autograd, "backward", of_backward)]


def _tensors(inputs: Any) -> list[Tensor]:
    """The tensors among what gradients are asked of; what is none torch refuses by itself."""
    if isinstance(inputs, Mapping):
        inputs = inputs.values()
    listed = inputs if isinstance(inputs, Iterable) and not isinstance(inputs, _ONE) else [inputs]
    leaves = (getattr(one.node, "variable", one) if isinstance(one, GradientEdge) else one for one in listed)
    return [one for one in leaves if isinstance(one, Tensor)]
