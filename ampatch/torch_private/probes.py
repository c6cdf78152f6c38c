"""Where a call runs: traced, in a backward pass, under a profiler, beside other processes.

Every forward and step calls these functions, and torch's public functions take several Python calls
each.  If this torch lacks a private name, its public function is called.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from .torch_attributes import torch_attribute

set_grad_enabled = torch_attribute("torch._C._set_grad_enabled", torch.set_grad_enabled)

current_backward_pass = torch_attribute("torch._C._current_graph_task_id", lambda: -1)
"""Returns the number of the running backward pass, or -1 if there is none.  Fallback: -1."""

keeps_graph = torch_attribute("torch._C._autograd._get_current_graph_task_keep_graph", lambda: True)
"""Whether the running backward pass keeps its graph's buffers.  Fallback: True."""

is_batched = torch_attribute("torch._C._functorch.is_legacy_batchedtensor", lambda tensor: True)
"""Whether a tensor is one of a batch of gradients (`is_grads_batched`).  Fallback: True."""

is_profiling = torch_attribute("torch.autograd._profiler_enabled", lambda: True)
"""Whether a profiler is running.  Fallback: True."""

is_tracing = torch_attribute("torch._C.is_tracing", torch.jit.is_tracing)
_innermost_transform = torch_attribute(
    "torch._C._functorch.peek_interpreter_stack", lambda: True
)  # unknown: a transform may be active
_HAS_COMPILE_FLAG = hasattr(torch.compiler, "_is_compiling_flag")


def _get_no_mode(key: Any) -> None:
    """The fallback: no FakeTensorMode is active, and `make_fx` traces nothing."""


_mode_keys = torch_attribute("torch._C._TorchDispatchModeKey", None)
_FAKE_KEY, _PROXY_KEY = getattr(_mode_keys, "FAKE", None), getattr(_mode_keys, "PROXY", None)
_get_mode = (
    _get_no_mode
    if None in (_FAKE_KEY, _PROXY_KEY)
    else torch_attribute("torch._C._get_dispatch_mode", _get_no_mode)
)
_get_fx_mode = functools.partial(_get_mode, _PROXY_KEY)  # no Python call


def is_fake_mode_on() -> bool:
    """Whether a `FakeTensorMode` is active: new tensors have no values."""
    return _get_mode(_FAKE_KEY) is not None


def is_traced_or_transformed() -> bool:
    """Whether operations are being traced or transformed, so that a kept tensor would leak.

    Not to be called from code that Dynamo traces.

    In C++: `is_traced_or_transformed` of `call.h`.
    """
    return (
        (torch.compiler._is_compiling_flag if _HAS_COMPILE_FLAG else torch.compiler.is_compiling())
        or is_tracing()
        or _innermost_transform() is not None
        or _get_fx_mode() is not None
    )


_c10d = torch_attribute("torch.distributed.distributed_c10d", None)  # None: built without it


def is_distributed() -> bool:
    """Whether `torch.distributed` has its default process group."""
    world = getattr(_c10d, "_world", None)
    if world is not None and hasattr(world, "_default_pg"):
        return world._default_pg is not None
    distributed = torch.distributed  # the public functions take 2 us
    return distributed.is_available() and distributed.is_initialized()


def running_ddp() -> Any:
    """The DistributedDataParallel whose forward is running in this process, or None."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


_HIGH_SEQUENCE_NR = 2**62  # nodes with it run before all others that are ready


def keep_torch_methods(function: type[Function]) -> None:
    """Keep torch's own methods in the nodes of a Function, even if they are replaced later.

    If this torch keeps them elsewhere, the nodes have the replacements, like any Function's nodes.
    """
    nodes = getattr(function, "_backward_cls", None)
    for name in ("__init__", "apply") if nodes is not None else ():
        setattr(nodes, name, getattr(BackwardCFunction, name))


def prioritize_node_of(tensor: Tensor) -> None:
    """Have the node that made `tensor` run before all other nodes that are ready.

    Without `_set_sequence_nr`, it runs in the order of creation, with the same result but later.
    """
    node = tensor.grad_fn
    set_sequence_nr = getattr(node, "_set_sequence_nr", None)
    if set_sequence_nr is not None:
        set_sequence_nr(_HIGH_SEQUENCE_NR)


def has_compiled_backward(node: Any) -> bool:
    """Whether a graph has the backward of a compiled function, which may run only once.

    False if this torch names it otherwise.  Then torch itself raises if a pass retains the graph.
    """
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CompiledFunctionBackward":
            return True
        seen.add(node)
        stack += [previous for previous, _ in node.next_functions]
    return False
