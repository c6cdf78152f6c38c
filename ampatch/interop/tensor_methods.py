"""Methods of tensors: `parameter.data`, copies and pickles.

* `parameter.data`: a write through it does not raise the weight's version, so the weight is cast
  anew.
* Who copies or pickles a module while a forward of an O2 model runs (a momentum encoder made at the
  first forward) gets the weights, not the half copies that stand in their places.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..casting.patches import Replacement
from ..models.lent_weights import parameter_behind


def data(listener: Callable[[Tensor], None]) -> list[Replacement]:
    """What to replace: `listener(parameter)` is called when `.data` is read or set.

    `Parameter` gets a property of its own in place of the one that it inherits.
    """

    def make(original: Any) -> property:
        def get(parameter: Tensor) -> Tensor:
            found = original.__get__(parameter)
            listener(parameter)
            return found

        def set(parameter: Tensor, data: Tensor) -> None:
            original.__set__(parameter, data)
            listener(parameter)

        return property(get, set, doc=Tensor.data.__doc__)

    return [(Parameter, "data", make)]


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
