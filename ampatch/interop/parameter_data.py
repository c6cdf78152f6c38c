"""Who touches `parameter.data`, the way to write into a weight that raises no version.

While it is wanted `torch.nn.Parameter` has a property `data` of its own, in place of the one it
inherits: it does what torch's does, and tells of it.  Other tensors are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Listener = Callable[[Tensor, "Tensor | None"], None]


def replacement(listener: Listener) -> tuple[Any, str, Callable[[Any], Any]]:
    """`(owner, name, make)`: `listener(parameter, data)` is called with each `data` that was given
    out, and with None when the parameter has been given other data.
    """
    return Parameter, "data", lambda original: _telling(original, listener)


def _telling(original: Any, listener: Listener) -> property:
    def get(parameter: Tensor) -> Tensor:
        data = original.__get__(parameter)
        listener(parameter, data)
        return data

    def set(parameter: Tensor, data: Tensor) -> None:
        original.__set__(parameter, data)
        listener(parameter, None)

    return property(get, set, doc=torch.Tensor.data.__doc__)
