"""torch.compile.  Dynamo is never imported here, because its import takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import wrapt
from torch import Tensor

from .torch_attributes import torch_attribute

_context = torch_attribute("torch._guards.CompileContext", None)
_current_compile_context = getattr(_context, "try_get", lambda: None)


def is_inside_compiler() -> bool:
    """Whether this thread runs torch.compile's compiler, not compiled code.

    False if this torch cannot tell.
    """
    return _current_compile_context() is not None


def run_eagerly(codes: Callable[[], Iterable[CodeType]]) -> None:
    """Have Dynamo run these functions uncompiled, once it is imported.

    Dynamo still traces calls of them in code that it compiles.  A torch without this feature
    compiles them, which works too.
    """

    def mark(eval_frame: Any) -> None:
        skip_code = getattr(eval_frame, "skip_code", None)
        if skip_code is not None:
            for code in codes():
                skip_code(code)

    wrapt.register_post_import_hook(mark, "torch._dynamo.eval_frame")


_BUILDER_MODULE = "torch._dynamo.variables.builder"
_BUILDER_CLASS = "VariableBuilder"
_GRAD_READING_MODULES = (_BUILDER_MODULE, "torch._subclasses.meta_utils")


def when_imported(call: Callable[[], None]) -> None:
    """Call `call()` once Dynamo's module is imported."""
    wrapt.register_post_import_hook(lambda module: call(), _BUILDER_MODULE)


def gradient_reader_patches() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """The patches with which Dynamo reads `grad` only of leaves.

    Dynamo reads `grad` of every input tensor of a graph.  torch warns if the tensor, such as a half
    copy of a weight, is not a leaf.  Dynamo hides the warning, but under a filter that turns
    warnings into errors it compiles nothing.

    Empty until Dynamo's module is completely imported (a class in it binds the functions), and if
    torch has other functions.
    """
    if not hasattr(sys.modules.get(_BUILDER_MODULE), _BUILDER_CLASS):
        return []
    return [
        (module, name, make)
        for module in filter(None, map(sys.modules.get, _GRAD_READING_MODULES))
        for name, make in (("safe_grad", _make_safe_grad), ("safe_has_grad", _make_safe_has_grad))
        if hasattr(module, name)
    ]


def _make_safe_grad(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def grad_of(tensor: Any) -> Any:
        return original(tensor) if tensor.is_leaf or tensor.retains_grad else None

    return grad_of


def _make_safe_has_grad(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda thing: isinstance(thing, Tensor) or original(thing)
