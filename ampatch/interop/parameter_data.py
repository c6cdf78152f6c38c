"""Notes each access to `parameter.data`: a write through it does not raise the weight's version.

While this is replaced, `torch.nn.Parameter` has a property `data` of its own in place of the one
that it inherits.  It does what torch's does, and calls a listener.  Other tensors are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..casting.patches import Replacement

Listener = Callable[[Tensor], None]


def replacements(listener: Listener) -> list[Replacement]:
    """What to replace.  `listener(parameter)` is called when `.data` is read or set."""
    return [(Parameter, "data", lambda original: _listening(original, listener))]


def _listening(original: Any, listener: Listener) -> property:
    def get(parameter: Tensor) -> Tensor:
        data = original.__get__(parameter)
        listener(parameter)
        return data

    def set(parameter: Tensor, data: Tensor) -> None:
        original.__set__(parameter, data)
        listener(parameter)

    return property(get, set, doc=torch.Tensor.data.__doc__)
