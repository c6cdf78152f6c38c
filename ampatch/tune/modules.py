"""Which modules of a model are looked at: those that compute something themselves, or groups.

By default each module without children, and each other whose forward calls functions of its own
between those of its children (a residual sum, a softmax by hand).  `depth` makes groups instead:
the modules so many names deep, with all that is in them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential)


def candidates(models: Iterable[nn.Module], depth: int | None = None) -> dict[str, list[nn.Module]]:
    """The modules by path; several where models have the same path.  Models themselves have none.

    A module that stands under two paths is there once, under the first.
    """
    found: dict[str, list[nn.Module]] = {}
    for model in models:
        for path, module in model.named_modules():
            if path and _counts(path, module, depth):
                found.setdefault(path, []).append(module)
    return found


def _counts(path: str, module: nn.Module, depth: int | None) -> bool:
    if depth is None:
        return not isinstance(module, CONTAINERS)
    names = path.count(".") + 1
    is_leaf = next(module.children(), None) is None
    return names == depth or (names < depth and is_leaf)
