"""`ZeroRedundancyOptimizer` made of the weights of a half model.

It takes parameters of one dtype, and a half model may have FP32 norm layers.  Its masters will all
be FP32, so the model's weights are no reason to refuse it; buckets, which it fills at once, are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import wrapt
from torch import Tensor

from ..casting.patches import Replacement
from ..torch_private import zero_redundancy


def is_imported() -> bool:
    """Whether there is anything to replace yet."""
    return zero_redundancy.kind() is not None


def when_imported(call: Callable[[], None]) -> None:
    """Have `call()` run once the class is there."""
    wrapt.register_post_import_hook(lambda module: call(), zero_redundancy.MODULE)


def replacements(gets_master: Callable[[], set[int]]) -> list[Replacement]:
    """What to replace.  `gets_master()` has the ids of half weights that get FP32 masters."""
    kind = zero_redundancy.kind()
    return [(kind, "__init__", lambda original: _of_half_weights(original, gets_master))]


def _of_half_weights(original: Callable, gets_master: Callable[[], set[int]]) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        params = given.arguments["params"]
        if not isinstance(params, Tensor):
            given.arguments["params"] = params = list(params)
        check_again = None
        if not given.arguments.get("parameters_as_bucket_view") and _become_float(
            params, gets_master()
        ):
            check_again = zero_redundancy.allow_types(self)
        try:
            original(*given.args, **given.kwargs)
        finally:
            if check_again is not None:
                check_again()

    return __init__


def _become_float(params: Any, gets_master: set[int]) -> bool:
    """Whether all these are FP32 once half weights have their masters."""
    tensors: list[Any] = []
    for one in params:
        inside = one.get("params", ()) if isinstance(one, dict) else one
        tensors.extend([inside] if isinstance(inside, Tensor) else inside)
    return all(
        isinstance(one, Tensor) and (one.dtype is torch.float32 or id(one) in gets_master)
        for one in tensors
    )
