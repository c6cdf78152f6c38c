"""TorchScript: a warning that calls in scripted code are not cast.

TorchScript calls torch's operators itself, not the patched functions.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..casting.calls import CastState
from ..casting.patches import Patch
from ..casting.tables import BLACKLIST, WHITELIST
from ..log import logger
from ..models import own_frame
from ..models.managed_model import ManagedModel
from ..models.module_overrides import scripted_submodules

_LISTED_OPERATORS = {name.lstrip("_") for row in (*WHITELIST, *BLACKLIST) for name in row.names}
_OPERATOR_PATTERN = re.compile(r"\baten::(\w+)\(")


def patches(state: CastState) -> list[Patch]:
    """The patch of `torch.jit.script`: it warns about calls that are not cast."""
    return [(torch.jit, "script", lambda original: _make_script(original, state))]


def operators_without_casts(compiled: Any) -> list[str]:
    """Names of listed functions that a scripted or traced module or function calls itself."""
    graph = getattr(compiled, "inlined_graph", None)
    return sorted(set(_OPERATOR_PATTERN.findall(str(graph))) & _LISTED_OPERATORS)


def warn_of_scripted_submodules(managed: ManagedModel) -> None:
    """Warn about TorchScript submodules of a model at O1: nothing in them is cast."""
    model_name = type(managed.model).__name__
    if managed.policy is not None:
        for name, module in scripted_submodules(managed.model).items():
            _warn_of_uncast_calls(f"{model_name}.{name}" if name else model_name, module)


def _warn_of_uncast_calls(what: str, compiled: Any) -> None:
    names = operators_without_casts(compiled)
    if names:
        logger.warning(
            "%s is TorchScript, which calls torch's operators itself: ampatch does not cast "
            "these (%s). It computes in the dtypes of its inputs. To have the casts, leave "
            "it unscripted, use torch.compile, or trace it with torch.jit.trace after "
            "initialize.",
            what,
            ", ".join(names),
        )


def _is_of_torch(obj: Any) -> bool:
    """Whether `obj` is a function of torch, which scripts some for forward-mode derivatives."""
    return inspect.isfunction(obj) and obj.__module__.partition(".")[0] == "torch"


def _make_script(original: Callable, state: CastState) -> Callable:
    @functools.wraps(original)
    def script(
        obj: Any, optimize: None = None, _frames_up: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        with own_frame.without_frames(obj) if isinstance(obj, nn.Module) else nullcontext():
            compiled = original(obj, optimize, _frames_up + 1, *args, **kwargs)
        if state.current_policy() is not None and not _is_of_torch(obj):
            _warn_of_uncast_calls(
                f"torch.jit.script({getattr(obj, '__name__', type(obj).__name__)})", compiled
            )
        return compiled

    return script
