"""What torch holds, attribute by attribute, and what has changed since."""

import sys
from collections.abc import Iterator
from operator import attrgetter, is_not

import torch
import torch.backends.mha
import torch.fx
import torch.linalg
import torch.nn.utils.clip_grad
import torch.special
import torch.utils.checkpoint

_NAMES = (
    "Tensor nn.functional _C._nn _VF autograd linalg special nn.RNNBase nn.Module nn.utils"
    " nn.utils.clip_grad utils.checkpoint backends.mha optim.Optimizer fx.Tracer jit nn.Parameter"
    " autograd.function.BackwardCFunction"
)
_OWNERS = {"torch": torch, **{f"torch.{name}": attrgetter(name)(torch) for name in _NAMES.split()}}

_REWRAPPED = "trace trace_module _get_trace_graph"  # by Dynamo, at its first use
_IMPORTED = "_dynamo _inductor _higher_order_ops export compiler _functorch fx"
_VOLATILE = {*_REWRAPPED.split(), *_IMPORTED.split()}


def snapshot() -> dict[str, dict[str, object]]:
    """Each owner's own attributes (not the inherited: a left-over copy must show)."""
    return {title: dict(vars(owner)) for title, owner in _OWNERS.items()}


def changes(before: dict, after: dict) -> list[str]:
    """What differs, leaving out submodules that were merely imported meanwhile."""
    return sorted(
        f"{title}.{change}"
        for title in _OWNERS
        if _differ(before[title], after[title])
        for change in _changes_of_one(before[title], after[title])
    )


def _differ(before: dict[str, object], after: dict[str, object]) -> bool:
    """Whether any attribute does: most often none does, and each test asks."""
    return list(before) != list(after) or any(map(is_not, before.values(), after.values()))


def _changes_of_one(before: dict[str, object], after: dict[str, object]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        old, new = before.get(name, "absent"), after.get(name, "absent")
        imported = old == "absent" and isinstance(new, type(sys))
        watched = not name.startswith("__") and name not in _VOLATILE
        if watched and old is not new and not imported and (old == "absent" or callable(old)):
            yield f"{name}: {old!r} -> {new!r}"
