"""Who touches `parameter.data`, the way to write into a weight that raises no version.

While it is wanted `torch.nn.Parameter` has a property `data` of its own, in place of the one it
inherits: it tells listeners which parameter is about to be read, written or given other
data, and does what torch's does.  Other tensors are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Listener = Callable[[Tensor], None]


def replacement(listener: Listener) -> tuple[Any, str, Callable[[Any], Any]]:
    """`(owner, name, make)`: `listener(parameter)` is called before each access."""
    return Parameter, "data", lambda original: _telling(original, listener)


def _telling(original: Any, listener: Listener) -> property:
    def get(parameter: Tensor) -> Tensor:
        listener(parameter)
        return original.__get__(parameter)

    def set(parameter: Tensor, data: Tensor) -> None:
        listener(parameter)
        original.__set__(parameter, data)

    return property(get, set, doc=torch.Tensor.data.__doc__)
