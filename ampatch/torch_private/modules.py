"""What torch keeps in `nn.Module`: tables, base classes, weights as a list."""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch.backends.mha
import torch.nn.utils.parametrize
from torch import Tensor, nn

from .torch_attributes import torch_attribute

TORCH_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TORCH_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _base(name: str, torchs_own: tuple[type[Any], ...]) -> tuple[type[Any], ...]:
    """The private base class, from which users derive too; without it, torch's public classes."""
    base = torch_attribute(name, None)
    return torchs_own if base is None else (base,)


BATCH_NORMS = _base("torch.nn.modules.batchnorm._BatchNorm", TORCH_BATCH_NORMS)
INSTANCE_NORMS = _base("torch.nn.modules.instancenorm._InstanceNorm", TORCH_INSTANCE_NORMS)
ORTHOGONAL_MAPS = _base("torch.nn.utils.parametrizations._Orthogonal", ())

SYNC_BATCH_NORM_CHECKS: dict[str, Callable] = {
    name: vars(nn.SyncBatchNorm)[name]
    for name in ("_check_input_dim", "_check_non_zero_input_channels")
    if name in vars(nn.SyncBatchNorm)
}
"""Methods that `nn.SyncBatchNorm.forward` calls, for a class that uses this forward."""

APPLY = "_apply"
"""The method behind `.to`, `.half` and `.cuda`.  Where torch has none, conversions go unseen."""

PARAMETERS = "_parameters"
"""The attribute in which a module has its table of parameters."""

FLAT_WEIGHTS = "_flat_weights"
"""The attribute in which an `nn.RNNBase` has its weights as a list."""


def rebuild_flat_weights(rnn: nn.RNNBase) -> None:
    """Rebuild an RNN's list of weights from its attributes, and its references to them.

    With stale references its next forward would lay the weights out in memory anew.
    """
    attributes = vars(rnn)
    names = getattr(rnn, "_flat_weights_names", None)
    if names is None or FLAT_WEIGHTS not in attributes:
        return
    table = attributes.get(PARAMETERS, {})  # `getattr` goes there too, by a call of Python's
    weights = [table[name] if name in table else getattr(rnn, name, None) for name in names]
    attributes[FLAT_WEIGHTS] = weights
    if "_flat_weight_refs" in attributes:
        attributes["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]


def flat_weights(rnn: nn.RNNBase) -> list[nn.Parameter]:
    """The weights of an RNN that lie in one memory buffer, as cuDNN wants them; else none."""
    weights = getattr(rnn, FLAT_WEIGHTS, [])
    return list(weights) if are_flat_weights(weights) else []


def are_flat_weights(weights: Sequence) -> bool:
    """Whether these are several parameters that fill one memory buffer, or a range of it."""
    if len(weights) < 2 or any(type(weight) is not nn.Parameter for weight in weights):
        return False
    alike = {(weight.dtype, weight.device, weight.layout) for weight in weights}
    if len(alike) > 1 or not share_storage(weights) or not all(map(Tensor.is_contiguous, weights)):
        return False
    first, last = span_of(weights)
    return last - first <= 2 * sum(map(Tensor.numel, weights))


def span_of(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """The range (start, end) of elements that contiguous tensors take up in their buffer."""
    starts = [int(tensor.storage_offset()) for tensor in tensors]
    return min(starts), max(map(operator.add, starts, map(Tensor.numel, tensors)))


def share_storage(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie in one memory buffer."""
    buffers = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(buffers) == 1 and 0 not in buffers


_parametrize: Any = torch.nn.utils.parametrize
_CACHE_CAN_BE_SEEN = hasattr(_parametrize, "_cache") and hasattr(_parametrize, "_cache_enabled")


def swap_parametrize_cache(cache: dict) -> dict | None:
    """Replace the cache of `parametrize.cached()`; returns the previous one, None outside of it."""
    if not _CACHE_CAN_BE_SEEN or not _parametrize._cache_enabled:
        return None
    previous, _parametrize._cache = _parametrize._cache, cache
    return previous


def submodule_dict(module: nn.Module) -> dict[str, Any]:
    """A module's submodules by name; empty where torch or TorchScript keeps them elsewhere."""
    submodules = vars(module).get("_modules", {})
    return submodules if isinstance(submodules, dict) else {}


REPLICA = "_is_replica"
"""In `vars` of a module that `nn.DataParallel` made for one forward: its weights are plain
attributes.
"""

REPLICATE = "_replicate_for_data_parallel"
"""The method of a module by which `nn.DataParallel` makes it: all attributes are copied."""


def forward_hook_dicts(module: nn.Module) -> tuple[OrderedDict, OrderedDict] | None:
    """A module's tables of forward pre-hooks and forward hooks; None where torch has others."""
    before = getattr(module, "_forward_pre_hooks", None)
    after = getattr(module, "_forward_hooks", None)
    return None if before is None or after is None else (before, after)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; lists and dicts of modules cannot."""
    forward = getattr(type(module), "forward", None)  # scripted modules have it elsewhere
    return forward is not nn.Module.forward or "forward" in vars(module)


def _global_hook_dicts(*names: str) -> list[dict]:
    return [table for name in names if (table := torch_attribute(name, None)) is not None]


GLOBAL_BACKWARD_HOOK_DICTS = _global_hook_dicts(
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
)
"""Hooks of all modules."""


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The module inside a module of `torch.compile`; None for others."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


_BACKWARD_HOOK_DICTS = ("_backward_hooks", "_backward_pre_hooks")

BACKWARD_HOOKS_CAN_BE_SEEN = all(hasattr(nn.Module(), name) for name in _BACKWARD_HOOK_DICTS)


def backward_hook_dicts(module: nn.Module) -> list[dict]:
    """A module's tables of backward hooks; empty where they cannot be seen."""
    return [getattr(module, name, {}) for name in _BACKWARD_HOOK_DICTS]


def is_fast_path_enabled() -> bool:
    """`torch.backends.mha.get_fastpath_enabled()` for code that Dynamo traces.

    Where torch keeps the switch elsewhere, it counts as on, its default.
    """
    return getattr(torch.backends.mha, "_is_fastpath_enabled", True)
