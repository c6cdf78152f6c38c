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


try:
    from torch._C import _are_functorch_transforms_active, _len_torch_function_stack

    def _is_undisturbed() -> bool:
        """Whether no transform and no `TorchFunctionMode` wants to know of a backward pass."""
        return not (_are_functorch_transforms_active() or _len_torch_function_stack())

except ImportError:
    _is_undisturbed = None

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
    may_shorten = _is_torchs_own(original)

    @functools.wraps(original)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        if is_dynamo_compiling() or _current_graph_task_id() != -1:  # a pass around this collects
            return original(
                tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
            )
        with _one_at_a_time:
            try:
                if (
                    may_shorten
                    and type(tensors) is Tensor
                    and grad_tensors is None
                    and not create_graph
                    and grad_variables is None
                    and inputs is None
                    and tensors.dim() == 0
                    and tensors.dtype is torch.float32
                    and tensors.requires_grad
                    and _is_undisturbed()
                ):
                    torch.autograd._engine_run_backward(
                        (tensors,),
                        (_ones_like(tensors),),
                        bool(retain_graph),
                        False,
                        (),
                        allow_unreachable=True,
                        accumulate_grad=True,
                    )
                    return None
                return original(
                    tensors,
                    grad_tensors,
                    retain_graph,
                    create_graph,
                    grad_variables,
                    _with_halves(inputs, halves_of),
                )
            finally:
                collect()

    return backward


def _is_torchs_own(original: Callable) -> bool:
    """Whether this is the `backward` that we know what it does with a single FP32 loss.

    It looks at its arguments for longer than it takes to start the pass.
    """
    code = getattr(original, "__code__", None)
    return (
        code is not None
        and code.co_filename == torch.autograd.__file__
        and code.co_varnames[: code.co_argcount] == _PARAMETERS
        and hasattr(torch.autograd, "_engine_run_backward")
        and _is_undisturbed is not None
    )


_ones_like = torch.ones_like
_PARAMETERS = (
    "tensors",
    "grad_tensors",
    "retain_graph",
    "create_graph",
    "grad_variables",
    "inputs",
)


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
