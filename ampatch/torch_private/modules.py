"""torch's private attributes of modules: dicts of hooks, base classes, lists of weights."""

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


def _private_base(name: str, torchs_own: tuple[type[Any], ...]) -> tuple[type[Any], ...]:
    """Return the private base class, from which users derive too, or torch's public classes."""
    base = torch_attribute(name, None)
    return torchs_own if base is None else (base,)


BATCH_NORMS = _private_base("torch.nn.modules.batchnorm._BatchNorm", TORCH_BATCH_NORMS)
INSTANCE_NORMS = _private_base("torch.nn.modules.instancenorm._InstanceNorm", TORCH_INSTANCE_NORMS)
ORTHOGONAL_MAPS = _private_base("torch.nn.utils.parametrizations._Orthogonal", ())

SYNC_BATCH_NORM_CHECKS: dict[str, Callable] = {
    name: vars(nn.SyncBatchNorm)[name]
    for name in ("_check_input_dim", "_check_non_zero_input_channels")
    if name in vars(nn.SyncBatchNorm)
}
"""The methods that `nn.SyncBatchNorm.forward` calls, for a class that uses this forward."""

APPLY_METHOD = "_apply"
"""The method that `.to`, `.half` and `.cuda` call.  Without it, conversions are not noticed."""

PARAMS_NAME = "_parameters"
"""The attribute of a module with the dict of its parameters."""

FLAT_WEIGHTS_NAME = "_flat_weights"
"""The attribute of an `nn.RNNBase` with the list of its weights."""


def rebuild_flat_weights(rnn: nn.RNNBase) -> None:
    """Rebuild an RNN's list of weights from its attributes, and its references to them.

    With stale references its next forward would lay the weights out in memory anew.
    """
    attributes = vars(rnn)
    names = getattr(rnn, "_flat_weights_names", None)
    if names is None or FLAT_WEIGHTS_NAME not in attributes:
        return
    params = attributes.get(PARAMS_NAME, {})  # read directly: `getattr` calls `Module.__getattr__`
    weights = [params[name] if name in params else getattr(rnn, name, None) for name in names]
    attributes[FLAT_WEIGHTS_NAME] = weights
    if "_flat_weight_refs" in attributes:
        attributes["_flat_weight_refs"] = [None if w is None else weakref.ref(w) for w in weights]


def flat_weights(rnn: nn.RNNBase) -> list[nn.Parameter]:
    """The weights of an RNN that cuDNN's flattening has put into one storage; else none."""
    weights = getattr(rnn, FLAT_WEIGHTS_NAME, [])
    return list(weights) if are_flat_weights(weights) else []


def are_flat_weights(weights: Sequence) -> bool:
    """Whether these are several parameters that fill one storage, or a range of it."""
    if len(weights) < 2 or any(type(weight) is not nn.Parameter for weight in weights):
        return False
    alike = {(weight.dtype, weight.device, weight.layout) for weight in weights}
    if len(alike) > 1 or not share_storage(weights) or not all(map(Tensor.is_contiguous, weights)):
        return False
    first, last = span_of(weights)
    return last - first <= 2 * sum(map(Tensor.numel, weights))


def span_of(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """The range (start, end) of elements that contiguous tensors take up in their storage."""
    starts = [int(tensor.storage_offset()) for tensor in tensors]
    return min(starts), max(map(operator.add, starts, map(Tensor.numel, tensors)))


def share_storage(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors share one storage."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(addresses) == 1 and 0 not in addresses


_parametrize: Any = torch.nn.utils.parametrize
_HAS_PARAMETRIZE_CACHE = hasattr(_parametrize, "_cache") and hasattr(_parametrize, "_cache_enabled")


def swap_parametrize_cache(cache: dict) -> dict | None:
    """Replace the cache of `parametrize.cached()`.  Returns the previous one, or None outside."""
    if not _HAS_PARAMETRIZE_CACHE or not _parametrize._cache_enabled:
        return None
    previous, _parametrize._cache = _parametrize._cache, cache
    return previous


def submodule_dict(module: nn.Module) -> dict[str, Any]:
    """A module's submodules by name.  Empty if torch or TorchScript keeps them elsewhere."""
    submodules = vars(module).get("_modules", {})
    return submodules if isinstance(submodules, dict) else {}


IS_REPLICA_ATTRIBUTE = "_is_replica"
"""In `vars` of a module that `nn.DataParallel` made for one forward, with weights as plain
attributes.
"""

REPLICATE_METHOD = "_replicate_for_data_parallel"
"""The method with which `nn.DataParallel` makes a module's replica.  It copies all attributes."""


def forward_hook_dicts(module: nn.Module) -> tuple[OrderedDict, OrderedDict] | None:
    """A module's dicts of forward pre-hooks and forward hooks; None if torch lacks them."""
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
"""The dicts of backward hooks that are registered for all modules."""


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return the module inside a module of `torch.compile`, or None for any other module."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


_BACKWARD_HOOK_DICTS = ("_backward_hooks", "_backward_pre_hooks")

HAS_BACKWARD_HOOK_DICTS = all(hasattr(nn.Module(), name) for name in _BACKWARD_HOOK_DICTS)


def backward_hook_dicts(module: nn.Module) -> list[dict]:
    """A module's dicts of backward hooks.  Empty if torch keeps them elsewhere."""
    return [getattr(module, name, {}) for name in _BACKWARD_HOOK_DICTS]


def is_fast_path_enabled() -> bool:
    """`torch.backends.mha.get_fastpath_enabled()` for code that Dynamo traces.

    If torch keeps the switch elsewhere, True, its default.
    """
    return getattr(torch.backends.mha, "_is_fastpath_enabled", True)
