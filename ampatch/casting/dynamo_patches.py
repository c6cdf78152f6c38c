"""What torch.compile needs while patches are installed: Dynamo's own tables of torch's functions.

Dynamo fills these tables at their first use, from the names of functions.  If it does so while the
patches are installed, they contain the replacements.  Then Dynamo would put a replacement into the
graph without tracing its cast, and break the graph at the original, which no table contains.  The
corrections here give Dynamo the original for each name.

The tables are private to torch; tables that a version lacks are left out.  This module never
imports Dynamo, which takes seconds.  It corrects each module of Dynamo once that is imported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import wrapt

from .calls import CastState
from .patches import PatchSet

OriginalOf = Callable[[Any], Any]
Correction = Callable[[ModuleType, PatchSet, OriginalOf], None]


class DynamoPatches:
    """Corrects Dynamo's tables, from `correct_from_now` to `patches.undo`.

    `original_of` returns the original of a replacement, and any other object itself.
    """

    def __init__(
        self,
        patches: PatchSet,
        original_of: OriginalOf,
        get_state: Callable[[], CastState],
    ) -> None:
        self._patches = patches
        self._original_of_replacement = original_of
        self._corrections: dict[str, Correction] = {
            "torch._dynamo.trace_rules": _correct_rules,
            "torch._dynamo.variables.torch": _correct_functions,
            "torch._dynamo.variables.ctx_manager": lambda contexts, patches, original_of: (
                _trace_regions(contexts, patches, get_state)
            ),
        }
        self._awaited_imports: set[str] = set()
        self._is_active = False

    def correct_from_now(self) -> None:
        """Correct Dynamo's tables from now on.  To be called before the first patch."""
        self._is_active = True
        self._patches.on_undo(self._deactivate)
        for title in self._corrections:
            module = sys.modules.get(title)
            if module is not None:
                self._correct(module)
            elif title not in self._awaited_imports:
                self._awaited_imports.add(title)
                wrapt.register_post_import_hook(self._on_import, title)

    def _deactivate(self) -> None:
        self._is_active = False

    def _on_import(self, module: ModuleType) -> None:
        if self._is_active:
            self._correct(module)

    def _correct(self, module: ModuleType) -> None:
        self._corrections[module.__name__](module, self._patches, self._original_of)

    def _original_of(self, function: Any) -> Any:
        """The original of `function`, which may be a replacement of one of torch's tools."""
        function = self._original_of_replacement(function)
        while _is_ours(function) and hasattr(function, "__wrapped__"):
            function = self._original_of_replacement(function.__wrapped__)
        return function


def _is_ours(function: Any) -> bool:
    home = function.__globals__.get("__name__", "") if inspect.isfunction(function) else ""
    return home.partition(".")[0] == __name__.partition(".")[0]


def _trace_call(tx: Any, function: Any) -> Any:
    """Have Dynamo trace a call of `function` at the position of its translator `tx`."""
    from torch._dynamo.variables import UserFunctionVariable  # already imported: Dynamo is running

    return UserFunctionVariable(function).call_function(tx, [], {})


def _constant_variable(value: Any) -> Any:
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)


def _correct_rules(rules: ModuleType, patches: PatchSet, original_of: OriginalOf) -> None:
    if hasattr(rules, "load_object"):
        patches.replace(rules, "load_object", lambda load: lambda name: original_of(load(name)))
    if hasattr(rules, "is_callable_allowed"):
        patches.replace(rules, "is_callable_allowed", _allowing_opaque_calls)
    _correct_table(
        rules,
        "get_tensor_method",
        patches,
        lambda methods: frozenset(map(original_of, methods)) | _c_methods(original_of),
    )


def _allowing_opaque_calls(is_callable_allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda obj: is_opaque_call(obj) or is_callable_allowed(obj)


def _c_methods(original_of: OriginalOf) -> frozenset:
    """The tensor methods that are written in C, with originals in place of replacements."""
    methods = [original_of(getattr(torch.Tensor, name)) for name in dir(torch.Tensor)]
    return frozenset(method for method in methods if inspect.ismethoddescriptor(method))


def _correct_functions(variables: ModuleType, patches: PatchSet, original_of: OriginalOf) -> None:
    def by_original(handlers: dict) -> dict:
        return {original_of(function): handler for function, handler in handlers.items()}

    variable_class = getattr(variables, "TorchInGraphFunctionVariable", None)
    _correct_table(variable_class, "_get_handlers", patches, by_original)
    scalars = getattr(variables, _SCALAR_OPS_NAME, None)
    if isinstance(scalars, frozenset):
        corrected = frozenset(map(original_of, scalars))
        if corrected != scalars:  # torch filled it while patches were installed, and only once
            setattr(variables, _SCALAR_OPS_NAME, corrected)


_SCALAR_OPS_NAME = "ops_consuming_unbacked_scalars"


def _correct_table(owner: Any, name: str, patches: PatchSet, correct: Callable[[Any], Any]) -> None:
    """Have the cached function `owner.name` return its corrected result."""
    function = getattr(owner, name, None)
    if function is None or not hasattr(function, "cache_clear"):
        return
    corrected = functools.cache(lambda: correct(function()))
    is_static = inspect.isclass(owner)
    patches.replace(owner, name, lambda raw: staticmethod(corrected) if is_static else corrected)
    patches.on_undo(function.cache_clear)  # torch may have filled it while patches were installed


def _trace_regions(
    contexts: ModuleType,
    patches: PatchSet,
    get_state: Callable[[], CastState],
) -> None:
    """Have Dynamo trace `CastState.enter_region` and `exit_region` with regions of torch.autocast.

    Dynamo represents a region as a variable class, whose `enter` and `exit` are replaced.
    """
    variable = getattr(contexts, "AutocastModeVariable", None)
    if variable is None or not hasattr(variable, "enter") or not hasattr(variable, "exit"):
        return

    def trace(tx: Any, method: str, *values: Any) -> None:
        constants = [_constant_variable(value) for value in values]
        _trace_call(tx, get_state).call_method(tx, method, constants, {})

    def enter(original: Callable) -> Callable:
        def entered(region: Any, tx: Any) -> Any:
            result = original(region, tx)
            _, dtype, is_enabled, *_ = region.target_values
            trace(tx, "enter_region", dtype if is_enabled else None)
            return result

        return entered

    def exit(original: Callable) -> Callable:
        def exited(region: Any, tx: Any, *args: Any) -> Any:
            trace(tx, "exit_region")
            return original(region, tx, *args)

        return exited

    patches.replace(variable, "enter", enter)
    patches.replace(variable, "exit", exit)


def opaque_call(function: Callable) -> Callable:
    """Wrap `function` so that Dynamo's graph has the wrapper as one call, and does not trace it.

    A graph's code calls torch's functions by name.  If it later ran under another policy than the
    one of its trace, it would call a replacement, which casts under the new policy.
    """

    def opaque(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return opaque


_OPAQUE_CALL = opaque_call(len).__code__


def is_opaque_call(function: Any) -> bool:
    """Whether `function` comes from `opaque_call`."""
    return getattr(function, "__code__", None) is _OPAQUE_CALL
