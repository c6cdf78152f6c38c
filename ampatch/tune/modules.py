"""Which modules of a model are looked at: those that compute something themselves, or groups.

By default each module without children, and each other whose forward calls functions of its own
between those of its children (a residual sum, a softmax by hand).  `depth` makes groups instead:
the modules so many names deep, with all that is in them.  Lists and dicts of modules, which are
never called, count as no name: the modules in them stand for them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ampatch.torch_private.modules import has_forward


def candidates(models: Iterable[nn.Module], depth: int | None = None) -> dict[str, list[nn.Module]]:
    """The modules by path; several where models have the same path.  Models themselves have none.

    A module that stands under two paths is there once, under the first.
    """
    found: dict[str, list[nn.Module]] = {}
    for model in models:
        names = {"": 0}  # in the path of each module
        for path, module in model.named_modules():
            if path:
                names[path] = names[path.rpartition(".")[0]] + has_forward(module)
                if has_forward(module) and _counts(names[path], module, depth):
                    found.setdefault(path, []).append(module)
    return found


def _counts(names: int, module: nn.Module, depth: int | None) -> bool:
    if depth is None:
        return getattr(type(module), "forward", None) is not nn.Sequential.forward
    return names == depth or (names < depth and next(module.children(), None) is None)
