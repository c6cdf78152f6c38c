"""Keep torch.compile from compiling ampatch's functions separately.

When Dynamo compiles a managed model, it would compile each function of ampatch that the model's
forward calls.  All managed models share the code objects of these functions, which would soon reach
the recompile limit: an error under `fullgraph=True`.  So Dynamo is told to skip these functions,
and they run eagerly.  They are still traced if a compiled function calls the model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from itertools import chain
from types import CodeType, ModuleType

from ..torch_private import dynamo

_SKIPPED_FOLDERS = ("casting", "interop", "models", "session", "torch_private")
_TRACED_MODULES = {
    "interop": "backward_passes",
    "casting": "arguments autocast_interop dynamo_patches rules special_ops user_functions wrapper",
    "models": "embeddings",
}
"""Modules that are not skipped: compiled code calls their functions in place of torch's."""


def run_eagerly() -> None:
    """Have Dynamo skip every function of these folders, as soon as Dynamo is imported.

    Call it after all modules of the folders are imported, because Dynamo may be imported already.
    """
    dynamo.run_eagerly(lambda: chain.from_iterable(map(_code_objects, _modules())))


def _modules() -> Iterator[ModuleType]:
    package = __name__.rpartition(".interop")[0]
    for folder in _SKIPPED_FOLDERS:
        start = f"{package}.{folder}."
        traced = [start + name for name in _TRACED_MODULES.get(folder, "").split()]
        for name, module in list(sys.modules.items()):
            if name.startswith(start) and name not in traced:
                yield module


def _code_objects(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for member in vars(value).values() if inspect.isclass(value) else (value,):
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            functions = (member.fget, member.fset) if isinstance(member, property) else (member,)
            for function in filter(inspect.isfunction, functions):
                yield from _with_nested(function.__code__)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
