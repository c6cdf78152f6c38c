"""Keep torch.compile from compiling our hooks as frames of their own.

Compiling a module, Dynamo runs the module's hooks outside the graph and then
compiles each hook function it meets, one code object for all our models: its
recompile limit would soon be reached, an error under `fullgraph=True`.  Marked
to be skipped, hooks run eagerly there, and are still traced where a compiled
function calls the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import wrapt

from ..casting import batched_casts, contexts, handlers, policy, weight_cache
from ..models import conversion, hooks, io_casting, managed_model, module_overrides
from ..models import submodule_calls as parts
from ..torch_private import probes

_OURS = (
    batched_casts,
    handlers,
    hooks,
    io_casting,
    managed_model,
    conversion,
    module_overrides,
    parts,
    policy,
    probes,
    contexts,
    weight_cache,
)


def run_eagerly(*others: ModuleType) -> None:
    """Mark every function behind the hooks, as soon as Dynamo is imported.

    `others` are modules that hooks reach through what they were given to call.
    """

    def mark(eval_frame: Any) -> None:
        skip_code = getattr(eval_frame, "skip_code", None)
        if skip_code is None:  # private to torch: without it hooks are compiled, and work
            return
        for module in (*_OURS, *others):
            for code in _codes(module):
                skip_code(code)

    wrapt.register_post_import_hook(mark, "torch._dynamo.eval_frame")


def _codes(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for found in vars(value).values() if inspect.isclass(value) else (value,):
            parts = (found.fget, found.fset) if isinstance(found, property) else (found,)
            for function in filter(inspect.isfunction, parts):
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
