"""Copies and pickles of what a forward of an O2 model sees.

While a forward runs, half copies stand in the places of the weights.  Who copies or pickles a
module there (a momentum encoder made at the first forward) gets the weights themselves.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..casting.patches import Replacement
from ..models.lent_weights import parameter_behind


def replacements() -> list[Replacement]:
    """What to replace."""
    return [(Tensor, "__deepcopy__", _deepcopy), (Tensor, "__reduce_ex__", _reduce)]


def _deepcopy(original: Callable) -> Callable:
    @functools.wraps(original)
    def __deepcopy__(self: Tensor, memo: dict) -> Any:
        parameter = parameter_behind(self)
        return original(self, memo) if parameter is None else copy.deepcopy(parameter, memo)

    return __deepcopy__


def _reduce(original: Callable) -> Callable:
    @functools.wraps(original)
    def __reduce_ex__(self: Tensor, protocol: Any) -> Any:
        parameter = parameter_behind(self)
        return original(self, protocol) if parameter is None else parameter.__reduce_ex__(protocol)

    return __reduce_ex__
