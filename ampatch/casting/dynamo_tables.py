"""What torch.compile needs while patches are installed: Dynamo's tables of torch's functions.

Dynamo fills these tables at their first use, by name.  Filled while the patches are
installed, they would have a replacement in each patched place, which Dynamo would record
without tracing the cast, and they would lack the original that the replacement calls:
a graph break.  So here each name leads Dynamo to the original.

All of it is private to torch: what a version lacks is left as it is.  This module never
imports Dynamo, which takes seconds; it corrects each module when the module is imported.
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

Original = Callable[[Any], Any]
Correction = Callable[[ModuleType, PatchSet, Original], None]


class DynamoTables:
    """Keeps Dynamo's tables true, from the first patch to `patches.undo`.

    `original` gives what a replacement stands for, and anything else back.
    """

    def __init__(
        self,
        patches: PatchSet,
        original: Original,
        ask_state: Callable[[], CastState],
    ) -> None:
        self._patches = patches
        self._original = original
        self._corrections: dict[str, Correction] = {
            "torch._dynamo.trace_rules": _correct_rules,
            "torch._dynamo.variables.torch": _correct_functions,
            "torch._dynamo.variables.ctx_manager": lambda contexts, patches, original: (
                _trace_regions(contexts, patches, ask_state)
            ),
        }
        self._awaited: set[str] = set()
        self._is_kept = False

    def keep(self) -> None:
        """To be called before the first patch."""
        self._is_kept = True
        self._patches.on_undo(self._leave)
        for title in self._corrections:
            module = sys.modules.get(title)
            if module is not None:
                self._correct(module)
            elif title not in self._awaited:
                self._awaited.add(title)
                wrapt.register_post_import_hook(self._arrived, title)

    def _leave(self) -> None:
        self._is_kept = False

    def _arrived(self, module: ModuleType) -> None:
        if self._is_kept:
            self._correct(module)

    def _correct(self, module: ModuleType) -> None:
        self._corrections[module.__name__](module, self._patches, self._original_of)

    def _original_of(self, function: Any) -> Any:
        """The original of `function`; torch's tools have replacements too."""
        function = self._original(function)
        while _is_ours(function) and hasattr(function, "__wrapped__"):
            function = self._original(function.__wrapped__)
        return function


def _is_ours(function: Any) -> bool:
    home = function.__globals__.get("__name__", "") if inspect.isfunction(function) else ""
    return home.partition(".")[0] == __name__.partition(".")[0]


def _trace_call(tx: Any, function: Any) -> Any:
    """Have Dynamo trace a call of `function` where the translator `tx` is."""
    from torch._dynamo.variables import UserFunctionVariable  # Dynamo runs, so it is there

    return UserFunctionVariable(function).call_function(tx, [], {})


def _constant(value: Any) -> Any:
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)


def _correct_rules(rules: ModuleType, patches: PatchSet, original: Original) -> None:
    if hasattr(rules, "load_object"):
        patches.replace(rules, "load_object", lambda found: lambda name: original(found(name)))
    if hasattr(rules, "is_callable_allowed"):
        patches.replace(rules, "is_callable_allowed", _or_opaque)
    _correct_table(
        rules,
        "get_tensor_method",
        patches,
        lambda found: frozenset(map(original, found)) | _methods(original),
    )


def _or_opaque(is_callable_allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda obj: is_opaque_call(obj) or is_callable_allowed(obj)


def _methods(original: Original) -> frozenset:
    """The methods of tensors, in C, that replacements stand for."""
    found = [original(getattr(torch.Tensor, name)) for name in dir(torch.Tensor)]
    return frozenset(method for method in found if inspect.ismethoddescriptor(method))


def _correct_functions(variables: ModuleType, patches: PatchSet, original: Original) -> None:
    def by_original(found: dict) -> dict:
        return {original(function): handler for function, handler in found.items()}

    kind = getattr(variables, "TorchInGraphFunctionVariable", None)
    _correct_table(kind, "_get_handlers", patches, by_original)
    scalars = getattr(variables, _SCALARS, None)
    if isinstance(scalars, frozenset):
        corrected = frozenset(map(original, scalars))
        if corrected != scalars:  # filled while patches were installed, and never again
            setattr(variables, _SCALARS, corrected)


_SCALARS = "ops_consuming_unbacked_scalars"


def _correct_table(owner: Any, name: str, patches: PatchSet, correct: Callable[[Any], Any]) -> None:
    """Have the cached function `owner.name` return `correct` of what it returns."""
    found = getattr(owner, name, None)
    if found is None or not hasattr(found, "cache_clear"):
        return
    corrected = functools.cache(lambda: correct(found()))
    is_static = inspect.isclass(owner)
    patches.replace(owner, name, lambda raw: staticmethod(corrected) if is_static else corrected)
    patches.on_undo(found.cache_clear)  # what it remembers may be of the time between


def _trace_regions(
    contexts: ModuleType,
    patches: PatchSet,
    ask_state: Callable[[], CastState],
) -> None:
    """Dynamo traces regions of torch.autocast by a class of its own, which also enters them.

    Have its `enter` and `exit` trace a push and a pop of the cast state too.
    """
    variable = getattr(contexts, "AutocastModeVariable", None)
    if variable is None or not hasattr(variable, "enter") or not hasattr(variable, "exit"):
        return

    def traced(tx: Any, method: str, *values: Any) -> None:
        constants = [_constant(value) for value in values]
        _trace_call(tx, ask_state).call_method(tx, method, constants, {})

    def enter(original: Callable) -> Callable:
        def entered(region: Any, tx: Any) -> Any:
            found = original(region, tx)
            _, half, is_on, *_ = region.target_values
            traced(tx, "enter_region", half if is_on else None)
            return found

        return entered

    def leave(original: Callable) -> Callable:
        def left(region: Any, tx: Any, *args: Any) -> Any:
            traced(tx, "leave_region")
            return original(region, tx, *args)

        return left

    patches.replace(variable, "enter", enter)
    patches.replace(variable, "exit", leave)


def opaque_call(function: Callable) -> Callable:
    """`function` as an object that a graph of Dynamo's holds.

    A graph's code names torch's functions.  Run under another policy than the one it was
    recorded under, it would find a replacement under the name, and cast by the new policy.
    """

    def recorded(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return recorded


_OPAQUE_CALL = opaque_call(len).__code__


def is_opaque_call(function: Any) -> bool:
    """Whether it comes from `opaque_call`."""
    return getattr(function, "__code__", None) is _OPAQUE_CALL
