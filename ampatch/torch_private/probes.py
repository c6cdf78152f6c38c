"""Where a call runs: recorded, in a backward pass, under a profiler, beside other processes.

Forwards and steps ask every time, and torch's public questions are several Python calls
each.  Where this torch keeps an answer elsewhere, its public function is asked.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

try:
    from torch._C import _set_grad_enabled as set_grad_enabled
except ImportError:
    set_grad_enabled = torch.set_grad_enabled  # type: ignore[assignment]

try:
    from torch._C import _is_tracing
except ImportError:
    _is_tracing = torch.jit.is_tracing

try:
    from torch._C._functorch import peek_interpreter_stack
except ImportError:

    def peek_interpreter_stack() -> object:  # type: ignore[misc]
        """Without a way to ask, assume a transform is running: nothing is kept."""
        return True


try:
    from torch._C import _get_dispatch_mode, _TorchDispatchModeKey

    _FAKE, _PROXY = _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY

    _fx_mode = functools.partial(_get_dispatch_mode, _PROXY)  # no Python call

    def computes_with_fakes() -> bool:
        """Whether a `FakeTensorMode` is active: tensors that come to be have no values."""
        return _get_dispatch_mode(_FAKE) is not None

except (ImportError, AttributeError):

    def _fx_mode() -> Any:  # type: ignore[misc]
        """The mode of a `make_fx` that records; unknown here: it sees batched casts as they are."""

    def computes_with_fakes() -> bool:
        """Without a way to ask, tensors have values."""
        return False


try:
    from torch._C import _current_graph_task_id as current_backward_pass
except ImportError:

    def current_backward_pass() -> int:
        """The number of the backward pass that is running; -1: none.  Unknown here: none."""
        return -1


try:
    from torch._C._functorch import is_legacy_batchedtensor as is_batched
except ImportError:

    def is_batched(tensor: torch.Tensor) -> bool:
        """Whether it is one of a batch of gradients (`is_grads_batched`); it may be: unknown."""
        return True


try:
    from torch.autograd import _profiler_enabled as is_profiling
except ImportError:

    def is_profiling() -> bool:
        """Without a way to ask, a profiler may be running."""
        return True


_HAS_FLAG = hasattr(torch.compiler, "_is_compiling_flag")


try:
    from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
except ImportError:

    def keeps_graph() -> bool:
        """Whether the backward pass that runs here keeps its graph's buffers; unknown here."""
        return True


def is_recording() -> bool:
    """Whether operations are being traced or transformed, so that a kept tensor would leak.

    Not to be asked from code that Dynamo traces.
    """
    return (
        (torch.compiler._is_compiling_flag if _HAS_FLAG else torch.compiler.is_compiling())
        or _is_tracing()
        or peek_interpreter_stack() is not None
        or _fx_mode() is not None
    )


try:
    from torch.distributed import distributed_c10d as _c10d
except ImportError:  # built without, or kept elsewhere
    _c10d = None  # type: ignore[assignment]


def are_ranks() -> bool:
    """Whether `torch.distributed` has its default process group."""
    world = getattr(_c10d, "_world", None)
    if world is not None and hasattr(world, "_default_pg"):
        return world._default_pg is not None
    distributed = torch.distributed  # the public way takes 2 us
    return distributed.is_available() and distributed.is_initialized()


def running_ddp() -> Any:
    """The DistributedDataParallel whose forward is running in this process, or None."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)
