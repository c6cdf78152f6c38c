"""`torch.distributed.checkpoint.state_dict` on managed models and optimizers.

Its functions find an optimizer's parameters in the model by identity.  At O2 the optimizer has
the masters, so for the time of a call the masters stand in the model, and the optimizer has none of
ampatch's methods: a step that these functions make to create state is not training.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import wrapt
from torch import Tensor, nn

from ..casting.patches import Replacement

MODULE = "torch.distributed.checkpoint.state_dict"
_FUNCTIONS = (
    "get_state_dict",
    "set_state_dict",
    "get_optimizer_state_dict",
    "set_optimizer_state_dict",
)


def is_imported() -> bool:
    """Whether there is anything to replace yet."""
    return MODULE in sys.modules


def when_imported(call: Callable[[], None]) -> None:
    """Have `call()` run once the module is imported."""
    wrapt.register_post_import_hook(lambda module: call(), MODULE)


def replacements(
    current_master_of: Callable[[Tensor], Tensor | None],
    without_methods: Callable[[Any], contextlib.AbstractContextManager],
) -> list[Replacement]:
    """What to replace.

    Inside `without_methods(optimizer)` the optimizer has none of ampatch's methods.
    """

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def with_masters(model: nn.Module, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
            listed = optimizers if isinstance(optimizers, (list, tuple, set)) else (optimizers,)
            with contextlib.ExitStack() as stack:
                stack.enter_context(_masters_in(model, current_master_of))
                for optimizer in listed:
                    stack.enter_context(without_methods(optimizer))
                return original(model, optimizers, *args, **kwargs)

        return with_masters

    owner = sys.modules[MODULE]
    return [(owner, name, make) for name in _FUNCTIONS if hasattr(owner, name)]


@contextlib.contextmanager
def _masters_in(
    model: nn.Module, current_master_of: Callable[[Tensor], Tensor | None]
) -> Iterator[None]:
    """Masters stand in the model for their half weights, and are rounded into these at the end."""
    found: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
    for module in model.modules():
        for name, half in module._parameters.items():
            master = None if half is None else current_master_of(half)
            if half is not None and master is not None:
                found.append((module._parameters, name, half, master))
    for parameters, name, _, stands_in in found:
        parameters[name] = stands_in
    try:
        yield
    finally:
        for parameters, name, weight, stood_in in found:
            parameters[name] = weight
            with torch.no_grad():
                weight.copy_(stood_in)
