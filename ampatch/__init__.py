"""Apex-style automatic mixed precision for today's PyTorch, by monkey-patching.

    import ampatch as amp

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # or "O0", "O2", "O3"

    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

Documents: https://github.com/ampatch/ampatch/blob/main/docs/index.md
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

try:
    # first: it loads device backends, which may import parts of us
    import torch as _torch  # noqa: F401
except (ImportError, OSError) as _error:  # `ampatch doctor` and `--version` run without torch
    _no_torch: Exception = _error
else:
    from . import native as native  # loads a build of the native part that matches
    from .api.casting import (
        disable_casts,
        float_function,
        half_function,
        precision,
        promote_function,
        register_float_function,
        register_half_function,
        register_promote_function,
        unregister_function,
    )
    from .api.initialize import (
        add_models,
        add_optimizers,
        cache_info,
        deactivate,
        initialize,
        log_metrics,
        observe,
        unwrap,
    )
    from .api.legacy_init import init
    from .api.training import (
        load_state_dict,
        loss_scale,
        loss_scale_settings,
        master_params,
        scale_loss,
        set_loss_scale,
        set_loss_scale_settings,
        state_dict,
        step_counts,
        step_was_skipped,
    )
    from .compat import apex_checkpoints as _apex_checkpoints  # noqa: F401  # optimizers load them
    from .errors import AmpatchError, BannedFunctionError
    from .types import OptLevel as OptLevel

if TYPE_CHECKING:
    from .diagnose import debug, report
    from .diagnose.gradient_range import gradient_range

__all__ = [
    "AmpatchError",
    "BannedFunctionError",
    "__version__",
    "add_models",
    "add_optimizers",
    "cache_info",
    "deactivate",
    "debug",
    "disable_casts",
    "float_function",
    "gradient_range",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "log_metrics",
    "loss_scale",
    "loss_scale_settings",
    "master_params",
    "observe",
    "precision",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "report",
    "scale_loss",
    "set_loss_scale",
    "set_loss_scale_settings",
    "state_dict",
    "step_counts",
    "step_was_skipped",
    "unregister_function",
    "unwrap",
]

_DIAGNOSTICS = frozenset(("debug", "gradient_range", "report"))
"""Loaded at their first use: a script that trains does not need them."""


if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in __all__ and name not in _DIAGNOSTICS:
            raise ImportError(
                f"ampatch.{name} needs torch, which cannot be imported: {_no_torch}. Expected a "
                "torch that works: pip install torch"
            ) from _no_torch
        if name == "cached_weights":
            raise AttributeError(
                "ampatch.cached_weights was removed in 0.2.0: each forward casts its weights. To "
                "evaluate or decode with weights that do not change, call a half copy: "
                "half = ampatch.unwrap(model).half() (or .bfloat16()), on inputs of that dtype."
            )
        if name not in _DIAGNOSTICS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.diagnose"), name)
        return value


def __dir__() -> list[str]:
    return list(__all__)
