"""Keep torch.compile from compiling what is done around calls as frames of its own.

When Dynamo compiles a module it meets the frame of a managed module and what that calls, and would
compile each function.  One code object serves all managed models, so its recompile limit would soon
be reached, an error under `fullgraph=True`.  Functions that are marked to be skipped run eagerly
there.  They are still traced where a compiled function calls the model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from itertools import chain
from types import CodeType, ModuleType

from ..torch_private import dynamo

_ROOMS = ("casting", "interop", "models", "session", "torch_private")
_TRACED = {
    "interop": "backward_passes",
    "casting": "arguments autocast_interop dynamo_tables rules special_ops user_functions wrapper",
    "models": "lookups",
}
"""Modules whose functions stand in the place of those that scripts compile, and what they call."""


def run_eagerly() -> None:
    """Mark every function of the rooms as soon as Dynamo is imported.

    To be called when all modules of the rooms are imported, since Dynamo may be imported already.
    """
    dynamo.run_eagerly(lambda: chain.from_iterable(map(_codes, _modules())))


def _modules() -> Iterator[ModuleType]:
    package = __name__.rpartition(".interop")[0]
    for room in _ROOMS:
        start = f"{package}.{room}."
        traced = [start + name for name in _TRACED.get(room, "").split()]
        for name, module in list(sys.modules.items()):
            if name.startswith(start) and name not in traced:
                yield module


def _codes(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for found in vars(value).values() if inspect.isclass(value) else (value,):
            if isinstance(found, (staticmethod, classmethod)):
                found = found.__func__
            parts = (found.fget, found.fset) if isinstance(found, property) else (found,)
            for function in filter(inspect.isfunction, parts):
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
