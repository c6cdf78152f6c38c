"""Keeps Dynamo from reading `grad` of tensors that are no leaves, such as half copies of weights.

Dynamo reads it of every tensor that goes into a graph.  Where a tensor is no leaf, torch warns.
Dynamo hides the warning, but under a filter that makes errors of warnings nothing is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import wrapt
from torch import Tensor

MODULE = "torch._dynamo.variables.builder"
_CLASS = "VariableBuilder"
_MODULES = (MODULE, "torch._subclasses.meta_utils")


def when_imported(call: Callable[[], None]) -> None:
    """Have `call()` run once Dynamo's part is imported."""
    wrapt.register_post_import_hook(lambda module: call(), MODULE)


def replacements() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """What to replace: `(module, name, make)`.

    Nothing while Dynamo's part is not imported (to the end: a class is defined after the functions,
    which it binds), or where torch has other functions.
    """
    if not hasattr(sys.modules.get(MODULE), _CLASS):
        return []
    return [
        (module, name, make)
        for module in filter(None, map(sys.modules.get, _MODULES))
        for name, make in (("safe_grad", _of_leaf), ("safe_has_grad", _of_tensor))
        if hasattr(module, name)
    ]


def _of_leaf(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def grad_of(tensor: Any) -> Any:
        return original(tensor) if tensor.is_leaf or tensor.retains_grad else None

    return grad_of


def _of_tensor(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda thing: isinstance(thing, Tensor) or original(thing)
