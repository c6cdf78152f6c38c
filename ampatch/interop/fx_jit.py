"""torch.fx and TorchScript on managed models.

`symbolic_trace(model)` calls the class's `forward` and no hooks.  In their place the replacement
records casts of the model's inputs and outputs.  TorchScript calls torch's operators itself: what
it compiles is not cast, and a warning says so.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import nn

from ..casting.cast_state import CastState
from ..casting.patches import Replacement
from ..casting.tables import BLACKLIST, WHITELIST
from ..log import logger
from ..models.lent_weights import lent_as
from ..models.managed_model import ManagedModel
from ..models.module_overrides import any_float, scripted_parts
from ..models.values import cast_tensors, caster

_LISTED = {name.lstrip("_") for row in (*WHITELIST, *BLACKLIST) for name in row.names}
_OPERATOR = re.compile(r"\baten::(\w+)\(")


def replacements(
    managed_of: Callable[[Any], ManagedModel | None], state: CastState
) -> list[Replacement]:
    """What to replace; `managed_of(module)` gives a managed model or None."""
    return [
        (
            torch.fx.Tracer,
            "create_args_for_root",  # and not `trace`, which Dynamo replaces at its first use
            lambda original: _arguments(original, managed_of, state),
        ),
        (torch.fx.Tracer, "getattr", _attribute),
        (torch.fx.Tracer, "call_module", _step),
        (torch.jit, "script", lambda original: _script(original, state)),
    ]


def uncast_operators(compiled: Any) -> list[str]:
    """Names of listed functions that a scripted or traced module or function calls itself."""
    graph = getattr(compiled, "inlined_graph", None)
    return sorted(set(_OPERATOR.findall(str(graph))) & _LISTED)


def note_scripted_parts(managed: ManagedModel) -> None:
    """Warn of TorchScript modules inside a managed model: they are not cast."""
    model, policy, own = managed.model, managed.policy, type(managed.model).__name__
    for name, module in scripted_parts(model).items():
        what = f"{own}.{name}" if name else own
        if policy is not None and policy.follows_tables:
            _warn(what, module)
        elif managed.properties.lends_weights and any_float(module):
            logger.warning(
                "%s is TorchScript, which keeps its weights where no half copies can stand in for "
                "them: it runs in FP32, its inputs and outputs are cast. To have it in half, "
                "leave it unscripted, use torch.compile, or record the model with "
                "torch.jit.trace after initialize.",
                what,
            )


def _warn(what: str, compiled: Any) -> None:
    names = uncast_operators(compiled)
    if names:
        logger.warning(
            "%s is TorchScript, which calls torch's operators itself: ampatch casts none of "
            "those in it (%s). It computes in the dtypes it is given. To have the casts, leave "
            "it unscripted, use torch.compile, or record them with torch.jit.trace after "
            "initialize.",
            what,
            ", ".join(names),
        )


def _is_torch_s_own(obj: Any) -> bool:
    """Whether torch scripts a function of its own: it does so to differentiate in forward mode."""
    return inspect.isfunction(obj) and obj.__module__.partition(".")[0] == "torch"


def _script(original: Callable, state: CastState) -> Callable:
    @functools.wraps(original)
    def script(
        obj: Any, optimize: None = None, _frames_up: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        compiled = original(obj, optimize, _frames_up + 1, *args, **kwargs)
        if state.table_policy() is not None and not _is_torch_s_own(obj):
            _warn(f"torch.jit.script({getattr(obj, '__name__', type(obj).__name__)})", compiled)
        return compiled

    return script


def _arguments(
    original: Callable, managed_of: Callable[[Any], ManagedModel | None], state: CastState
) -> Callable:
    """What fx is about to record a module with: its `forward`, as a function, and proxies."""

    @functools.wraps(original)
    def create_args_for_root(self: torch.fx.Tracer, *args: Any, **kwargs: Any) -> Any:
        forward, proxies = original(self, *args, **kwargs)
        managed = managed_of(self.root)
        if managed is None:
            return forward, proxies
        _note_lost_policies(self, managed, state)
        return functools.partial(_with_casts, managed, forward), proxies

    return create_args_for_root


def _with_casts(managed: ManagedModel, forward: Callable, *args: Any) -> Any:
    """As the model's hooks do it."""
    if managed.in_dtype is not None:
        args = cast_tensors(args, managed.in_dtype)
    output = forward(*args)
    return output if managed.out_dtype is None else cast_tensors(output, managed.out_dtype)


def _attribute(original: Callable) -> Callable:
    """What fx records where a module that it looks into reads an attribute: a lent weight is half.

    Layers that are steps of the graph lend their weights themselves when it runs.
    """

    @functools.wraps(original)
    def getattr(self: torch.fx.Tracer, attr: str, attr_val: Any, *args: Any, **kw: Any) -> Any:
        found = original(self, attr, attr_val, *args, **kw)
        dtype = lent_as(attr_val) if isinstance(found, torch.fx.Proxy) else None
        return found if dtype is None else found.to(dtype)

    return getattr


def _step(original: Callable) -> Callable:
    """What fx records where a layer is a step of its graph: the layer gives FP32 to code around it,
    but the graph goes on in half, as the model does.
    """

    @functools.wraps(original)
    def call_module(self: torch.fx.Tracer, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = original(self, m, *args, **kwargs)
        dtype = next(filter(None, map(lent_as, m.parameters())), None)
        if dtype is None or not isinstance(found, torch.fx.Proxy):
            return found
        is_step = self.is_leaf_module(m, self.path_of_module(m))
        cast: Callable[[Any], Any] = caster(dtype)
        return cast(found) if is_step else found

    return call_module


def _note_lost_policies(tracer: torch.fx.Tracer, managed: ManagedModel, state: CastState) -> None:
    """A graph runs outside the model: what the model's hooks decide of casting is not in it."""
    model = managed.model
    lost = [
        name
        for name, module in model.named_modules()
        if module in managed.overridden() and not tracer.is_leaf_module(module, name)
    ]
    if managed.policy is not state.of_forward():
        lost.append(f"{type(model).__name__} itself")
    if lost:
        logger.warning(
            "torch.fx traced %s: its graph runs under the casting that is in force around it, "
            "not under that of %s.",
            type(model).__name__,
            ", ".join(lost),
        )
