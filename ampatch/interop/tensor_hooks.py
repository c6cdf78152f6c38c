"""`tensor.register_hook`: notes hooks on the graph that a forward builds.

A node that casts many weights would hand such a hook its gradient too late, so the weight cache
casts one weight at a time from the hook on, until the forward ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..casting.patches import Replacement


def replacements(note: Callable[[], None]) -> list[Replacement]:
    """What to replace: `note()` is called before each hook that is put on a tensor."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def register_hook(tensor: Tensor, hook: Callable) -> Any:
            if not is_dynamo_compiling():
                note()
            return original(tensor, hook)

        return register_hook

    return [(Tensor, "register_hook", make)]
