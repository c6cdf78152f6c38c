"""Keep torch.compile from compiling ampatch's hooks as frames of their own.

When Dynamo compiles a module it runs the module's hooks outside the graph, and then compiles each
hook function that it meets.  One code object serves the hooks of all managed models, so its
recompile limit would soon be reached, an error under `fullgraph=True`.  Functions that are marked
to be skipped run eagerly there.  They are still traced where a compiled function calls the model.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from itertools import chain
from types import CodeType, ModuleType

from ..torch_private import dynamo

_BEHIND_HOOKS = {  # and behind `tensor.data`, whose compiled frame would call itself
    "casting": "batched_casts cast_state contexts handlers policy stack "
    "torch_autocast weight_cache",
    "interop": "tensor_methods",
    "models": "conversion hooks io_casting lent_copies lent_places lent_weights lent_writes "
    "managed_model module_overrides sharded_weights submodule_calls values",
    "torch_private": "devices dtensors foreach modules nodes probes sharding tensors "
    "torch_functions tracing_tensors",
}


def run_eagerly(*others: ModuleType) -> None:
    """Mark every function behind the hooks, as soon as Dynamo is imported.

    `others` are modules that hooks reach through what they were given to call.
    """
    package = __name__.rpartition(".interop")[0]
    behind = [
        importlib.import_module(f"{package}.{room}.{name}")
        for room, names in _BEHIND_HOOKS.items()
        for name in names.split()
    ]
    dynamo.run_eagerly(lambda: chain.from_iterable(map(_codes, (*behind, *others))))


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
