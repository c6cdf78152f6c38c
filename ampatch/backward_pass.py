"""torch's ways to run a backward pass, taught about leaf half shadows.

With shadows in a graph the leaves are not the parameters.  With these
replacements `loss.backward()` still fills `parameter.grad`, and
`torch.autograd.grad(loss, parameters)` still finds the parameters.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.compiler import is_dynamo_compiling

try:
    from torch._C import _current_graph_task_id
except ImportError:

    def _current_graph_task_id() -> int:
        """Without a way to ask, no backward pass counts as nested: each collects for itself."""
        return -1


HalvesOf = Callable[[Tensor], "list[Tensor]"]

_one_at_a_time = threading.RLock()
"""Passes of several threads may meet in a shadow, whose gradient each would take away."""


def replacements(
    halves_of: HalvesOf, collect: Callable[[], None]
) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """`(owner, name, make)` for each function to replace.

    `halves_of` lists the shadows of a weight; `collect` takes all shadows'
    gradients to their weights.
    """
    return [
        (torch.autograd, "backward", lambda original: _backward(original, halves_of, collect)),
        (torch.autograd, "grad", lambda original: _grad(original, halves_of)),
    ]


def _backward(original: Callable, halves_of: HalvesOf, collect: Callable[[], None]) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        if is_dynamo_compiling() or _current_graph_task_id() != -1:
            return original(*args, **kwargs)  # the pass around this one collects
        if len(args) > 5 or kwargs.get("inputs") is not None:
            bound = signature.bind(*args, **kwargs)
            inputs = bound.arguments["inputs"]
            bound.arguments["inputs"] = _with_halves(inputs, halves_of)
            args, kwargs = bound.args, bound.kwargs
        with _one_at_a_time:
            try:
                return original(*args, **kwargs)
            finally:
                collect()

    return backward


def _listed(inputs: Any) -> list[Any]:
    """What torch takes for `inputs`: a tensor, an edge of the graph, or any iterable of these."""
    return [inputs] if isinstance(inputs, (Tensor, GradientEdge)) else list(inputs)


def _with_halves(inputs: Any, halves_of: HalvesOf) -> Any:
    if inputs is None:
        return None
    listed = _listed(inputs)
    return [*listed, *(half for one in listed for half in _halves(one, halves_of))]


def _halves(value: Any, halves_of: HalvesOf) -> list[Tensor]:
    return halves_of(value) if isinstance(value, Tensor) else []


def _grad(original: Callable, halves_of: HalvesOf) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        listed = bound.arguments["inputs"] = _listed(bound.arguments["inputs"])
        halves = [_halves(one, halves_of) for one in listed]
        if not any(halves):
            return original(*bound.args, **bound.kwargs)
        allow_unused = bound.arguments.get("allow_unused")
        materialize = bound.arguments.get("materialize_grads", False)
        bound.arguments["inputs"] = [*listed, *(half for several in halves for half in several)]
        bound.arguments.update(allow_unused=True, materialize_grads=False)
        found = original(*bound.args, **bound.kwargs)
        grads = _added_up(listed, halves, found)
        if materialize:
            grads = [torch.zeros_like(one) if g is None else g for one, g in zip(listed, grads)]
        elif not allow_unused and any(one is None for one in grads):
            raise RuntimeError(
                f"torch.autograd.grad(inputs=...): the outputs do not depend on inputs "
                f"{[index for index, one in enumerate(grads) if one is None]}. Leave them out, "
                "or pass allow_unused=True to get None for them."
            )
        return tuple(grads)

    return grad


def _added_up(
    inputs: list[Any], halves: list[list[Tensor]], found: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradient of each input: its own, and those of its shadows."""
    rest = iter(found[len(inputs) :])
    grads = []
    for own, several, value in zip(found, halves, inputs, strict=False):
        parts = [] if own is None else [own]
        parts += [part.to(value.dtype) for _ in several if (part := next(rest)) is not None]
        grads.append(sum(parts[1:], parts[0]) if parts else None)
    return grads
