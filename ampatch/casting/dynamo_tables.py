"""Dynamo's tables of torch's functions, true while the patches are in.

torch.compile knows what to do with a function of torch's from tables that it
fills at their first use, by name.  Filled while the patches are in they would
have a replacement in each patched place, to be recorded unopened, cast and all,
and know nothing of the original that the replacement calls: a graph break.
So here each name leads Dynamo to the original.

All of it is private to torch: what a version lacks is left as it is.  Dynamo is
never imported here, which takes seconds; what arrives later is met as it comes.
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

from .patches import PatchSet
from .recording import is_by_itself

Original = Callable[[Any], Any]
Correction = Callable[[ModuleType, PatchSet, Original], None]


class CompilerTables:
    """Keeps Dynamo's tables true, from the first patch to `patches.undo`.

    `original` gives what a replacement stands for, and anything else back.  `others` are
    corrections by the module's name, beside those of the tables.
    """

    def __init__(
        self, patches: PatchSet, original: Original, others: dict[str, Correction]
    ) -> None:
        self._patches = patches
        self._original = original
        self._corrections = {**_CORRECTIONS, **others}
        self._awaited: set[str] = set()
        self._is_kept = False

    def keep(self) -> None:
        """To be called with each patch; more than once changes nothing."""
        if self._is_kept:
            return
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
        self._corrections[module.__name__](module, self._patches, self._torch_s_own)

    def _torch_s_own(self, function: Any) -> Any:
        """What `function` stands for; torch's tools, too, have replacements of ours."""
        function = self._original(function)
        while _is_ours(function) and hasattr(function, "__wrapped__"):
            function = self._original(function.__wrapped__)
        return function


def _is_ours(function: Any) -> bool:
    home = function.__globals__.get("__name__", "") if inspect.isfunction(function) else ""
    return home.partition(".")[0] == __name__.partition(".")[0]


def trace_call(tx: Any, function: Callable) -> Any:
    """Have Dynamo trace a call of `function` where the translator `tx` is; its result's variable."""
    from torch._dynamo.variables import UserFunctionVariable  # Dynamo runs, so it is there

    return UserFunctionVariable(function).call_function(tx, [], {})


def _correct_rules(rules: ModuleType, patches: PatchSet, original: Original) -> None:
    if hasattr(rules, "load_object"):
        patches.replace(rules, "load_object", lambda found: lambda name: original(found(name)))
    if hasattr(rules, "is_callable_allowed"):
        patches.replace(rules, "is_callable_allowed", _or_by_itself)
    _correct_table(
        rules,
        "get_tensor_method",
        patches,
        lambda found: frozenset(map(original, found)) | _methods(original),
    )


def _or_by_itself(is_callable_allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda obj: is_by_itself(obj) or is_callable_allowed(obj)


def _methods(original: Original) -> frozenset:
    """The methods of tensors, in C, that replacements stand for."""
    found = [original(getattr(torch.Tensor, name)) for name in dir(torch.Tensor)]
    return frozenset(method for method in found if inspect.ismethoddescriptor(method))


def _correct_functions(variables: ModuleType, patches: PatchSet, original: Original) -> None:
    def by_original(found: dict) -> dict:
        return {original(function): handler for function, handler in found.items()}

    kind = getattr(variables, "TorchInGraphFunctionVariable", None)
    _correct_table(kind, "_get_handlers", patches, by_original)
    scalars = getattr(variables, "ops_consuming_unbacked_scalars", None)
    if isinstance(scalars, frozenset):
        corrected = frozenset(map(original, scalars))
        if corrected != scalars:  # filled at an import meanwhile: right once, right for good
            variables.ops_consuming_unbacked_scalars = corrected


def _correct_table(owner: Any, name: str, patches: PatchSet, correct: Callable[[Any], Any]) -> None:
    """Have the cached function `owner.name` return `correct` of what it returns."""
    found = getattr(owner, name, None)
    if not hasattr(found, "cache_clear"):
        return
    corrected = functools.cache(lambda: correct(found()))
    is_static = inspect.isclass(owner)
    patches.replace(owner, name, lambda raw: staticmethod(corrected) if is_static else corrected)
    patches.on_undo(found.cache_clear)  # what it remembers may be of the time between


CONTEXT_MANAGERS = "torch._dynamo.variables.ctx_manager"
"""Dynamo's module of the context managers that it knows by itself."""

_CORRECTIONS: dict[str, Correction] = {
    "torch._dynamo.trace_rules": _correct_rules,
    "torch._dynamo.variables.torch": _correct_functions,
}
