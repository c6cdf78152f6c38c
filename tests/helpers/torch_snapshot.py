"""What torch holds, attribute by attribute, and what has changed since."""

from __future__ import annotations

import sys

import torch
import torch.backends.mha
import torch.fx
import torch.linalg
import torch.nn.utils.clip_grad
import torch.special
import torch.utils.checkpoint

_OWNERS = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,
    "torch._VF": torch._VF,
    "torch.autograd": torch.autograd,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.nn.RNNBase": torch.nn.RNNBase,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.utils": torch.nn.utils,
    "torch.nn.utils.clip_grad": torch.nn.utils.clip_grad,
    "torch.utils.checkpoint": torch.utils.checkpoint,
    "torch.backends.mha": torch.backends.mha,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.fx.Tracer": torch.fx.Tracer,
    "torch.jit": torch.jit,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.autograd.function.BackwardCFunction": torch.autograd.function.BackwardCFunction,
}

# Dynamo rewraps these at its first use.
_REWRAPPED = {"trace", "trace_module", "_get_trace_graph"}
_VOLATILE = _REWRAPPED | {
    "_dynamo",
    "_inductor",
    "_higher_order_ops",
    "export",
    "compiler",
    "_functorch",
    "fx",
}


def snapshot() -> dict[tuple[str, str], object]:
    """Each owner's own attributes (not the inherited: a left-over copy must show)."""
    return {
        (title, name): value
        for title, owner in _OWNERS.items()
        for name, value in vars(owner).items()
        if not name.startswith("__") and name not in _VOLATILE
    }


def changes(before: dict, after: dict) -> list[str]:
    """What differs, leaving out submodules that were merely imported meanwhile."""
    found = []
    for key in before.keys() | after.keys():
        old, new = before.get(key, "absent"), after.get(key, "absent")
        imported = old == "absent" and isinstance(new, type(sys))
        if old is not new and not imported and (old == "absent" or callable(old)):
            found.append(f"{'.'.join(key)}: {old!r} -> {new!r}")
    return sorted(found)
