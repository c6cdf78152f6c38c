"""Backward passes: `torch.autograd.grad`, `torch.autograd.backward`, and with it `Tensor.backward`.

* A pass that is asked for gradients of single weights goes through all layers whose weights are
  cast by one node with these.  So each weight of that model is cast by a node of its own from the
  next forward on.
* A pass in a `scale_loss` block is looked at: gradients that it brings must be scaled.
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
from ..torch_private.probes import leads_to_compiled


def replacements(
    note_request: Callable[[list[Tensor]], bool],
    pass_begins: Callable[[Any], Callable[[], None] | None],
) -> list[Replacement]:
    """What to replace.

    `note_request(tensors)`: gradients of these are asked for; whether graphs that are there may
    have nodes in common for them and others.  Then the pass retains the graph: under torch.autocast
    it would not free the buffers of those others.
    `pass_begins(tensors)`: a pass from these begins that adds to gradients; what it returns is
    called when the pass has ended.
    """

    def retained(outputs: Any, inputs: Any, retain_graph: bool | None) -> bool | None:
        if note_request([one for one in map(_leaf, _listed(inputs)) if isinstance(one, Tensor)]):
            return not any(map(leads_to_compiled, map(_node, _listed(outputs)))) or retain_graph
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
                outputs, inputs = _kept(outputs), _kept(inputs)
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
            ended = None
            if not is_dynamo_compiling():
                if inputs is not None:
                    tensors, inputs = _kept(tensors), _kept(inputs)
                    retain_graph = retained(tensors, inputs, retain_graph)
                ended = pass_begins(tensors)
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            if ended is not None:
                ended()

        return backward

    return [(torch.autograd, "grad", of_grad), (torch.autograd, "backward", of_backward)]


def _kept(given: Any) -> Any:
    """An iterator, such as `model.parameters()`, can be read once."""
    return tuple(given) if isinstance(given, Iterator) else given


def _listed(given: Any) -> Iterable[Any]:
    """What a script passes as outputs or inputs, one by one; what is wrong torch refuses."""
    if isinstance(given, (Tensor, GradientEdge)) or not isinstance(given, Iterable):
        return [given]
    return given.values() if isinstance(given, Mapping) else given


def _leaf(given: Any) -> Any:
    """The tensor whose gradient is asked for: of an edge to a leaf's accumulator, that leaf."""
    return getattr(given.node, "variable", None) if isinstance(given, GradientEdge) else given


def _node(given: Any) -> Any:
    return given.node if isinstance(given, GradientEdge) else getattr(given, "grad_fn", None)
