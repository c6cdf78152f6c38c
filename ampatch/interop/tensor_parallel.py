"""`parallelize_module` and `distribute_module` on a managed model: DTensors of its FP32 values.

They put new parameters, DTensors made of the old ones, in a module.  For the time of a call the
module's weights are FP32; what stands there afterwards is rounded to half again.  So master
weights, which come with the optimizers, begin with the values from before the conversion.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import wrapt
from torch import nn

from ..casting.patches import Replacement
from ..errors import AmpatchError

FUNCTIONS = {
    "torch.distributed.tensor": "distribute_module",
    "torch.distributed.tensor.parallel": "parallelize_module",
}
"""By the modules that have them."""


def has(name: str) -> bool:
    """Whether one of these modules is imported, so that there is something to replace."""
    return hasattr(sys.modules.get(name), FUNCTIONS[name])


def is_imported() -> bool:
    """Whether all of them are."""
    return all(map(has, FUNCTIONS))


def when_imported(call: Callable[[], None]) -> None:
    """Have `call()` run once each of the others is imported."""
    for name in FUNCTIONS:
        if not has(name):
            wrapt.register_post_import_hook(lambda module: call(), name)


_is_running = False  # within a call for the module around this one


def replacements(
    owner: str,
    optimizer_of: Callable[[nn.Module], Any | None],
    as_float: Callable[[nn.Module], AbstractContextManager],
) -> list[Replacement]:
    """What to replace in the module of that name.

    `optimizer_of(module)` is a managed optimizer that has a parameter of a module, or None.  Inside
    `as_float(module)` the weights of a managed module are FP32.
    """

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def distributing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            global _is_running
            if _is_running:
                return original(module, *args, **kwargs)
            optimizer = optimizer_of(module)
            if optimizer is not None:
                _refuse(original.__name__, module, optimizer)
            _is_running = True
            try:
                with as_float(module):
                    return original(module, *args, **kwargs)
            finally:
                _is_running = False

        return distributing

    return [(sys.modules[owner], FUNCTIONS[owner], make)]


def _refuse(call: str, module: nn.Module, optimizer: Any) -> None:
    raise AmpatchError(
        f"{call}({type(module).__name__}): its parameters are in {type(optimizer).__name__} "
        "already, which ampatch manages and which would go on updating the parameters from before. "
        "Nothing was changed. The order is either parallelize_module, optimizer, "
        "ampatch.initialize(model, optimizer); or ampatch.initialize(model), parallelize_module, "
        "optimizer, ampatch.add_optimizers(optimizer)."
    )
