"""Methods of tensors: `parameter.data`, copies and pickles.

* `tensor.data`: a write through it raises no version.  A weight is cast anew, and values of a half
  copy that stands in a weight's place are compared as its forward ends.
* A copy or pickle of a module that is made while a forward of an O2 model runs (as a momentum
  encoder at the first forward) has the weights, not the half copies that stand in their places.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..casting.patches import Replacement
from ..models.lent_weights import parameter_behind


def data(listener: Callable[[Tensor], None]) -> list[Replacement]:
    """What to replace: `listener(tensor)` is called before `.data` is read or set.

    `Tensor` gets a property of its own in place of the one that it inherits.
    """

    def make(original: Any) -> property:
        def get(tensor: Tensor) -> Tensor:
            listener(tensor)
            return original.__get__(tensor)

        def set(tensor: Tensor, data: Tensor) -> None:
            listener(tensor)
            original.__set__(tensor, data)

        def delete(tensor: Tensor) -> None:
            original.__delete__(tensor)  # torch's error

        return property(get, set, delete, doc=Tensor.data.__doc__)

    return [(Tensor, "data", make)]


def copies() -> list[Replacement]:
    """What to replace: copies and pickles of half copies are of the weights behind them."""

    def deepcopy(original: Callable) -> Callable:
        @functools.wraps(original)
        def __deepcopy__(self: Tensor, memo: dict) -> Any:
            parameter = parameter_behind(self)
            return original(self, memo) if parameter is None else copy.deepcopy(parameter, memo)

        return __deepcopy__

    def reduce(original: Callable) -> Callable:
        @functools.wraps(original)
        def __reduce_ex__(self: Tensor, protocol: Any) -> Any:
            parameter = parameter_behind(self)
            if parameter is None:
                return original(self, protocol)
            return parameter.__reduce_ex__(protocol)

        return __reduce_ex__

    return [(Tensor, "__deepcopy__", deepcopy), (Tensor, "__reduce_ex__", reduce)]
