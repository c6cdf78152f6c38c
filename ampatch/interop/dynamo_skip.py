"""Keep torch.compile from compiling our functions around calls as frames of their own.

When Dynamo compiles a module, it meets the forward of a managed model and would compile each
function that this calls.  One code object serves all managed models, so its recompile limit would
soon be reached, an error under `fullgraph=True`.  Functions that are marked to be skipped run
eagerly there.  They are still traced where a compiled function calls the model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from itertools import chain
from types import CodeType, ModuleType

from ..torch_private import dynamo

_ROOMS = ("casting", "interop", "models", "session", "torch_private")
_TRACED_MODULES = {
    "interop": "backward_passes",
    "casting": "arguments autocast_interop dynamo_tables rules special_ops user_functions wrapper",
    "models": "lookups",
}
"""Modules whose functions replace those that scripts compile, and the functions these call."""


def run_eagerly() -> None:
    """Mark every function of the rooms as soon as Dynamo is imported.

    To be called when all modules of the rooms are imported, since Dynamo may be imported already.
    """
    dynamo.run_eagerly(lambda: chain.from_iterable(map(_code_objects, _modules())))


def _modules() -> Iterator[ModuleType]:
    package = __name__.rpartition(".interop")[0]
    for room in _ROOMS:
        start = f"{package}.{room}."
        traced = [start + name for name in _TRACED_MODULES.get(room, "").split()]
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
