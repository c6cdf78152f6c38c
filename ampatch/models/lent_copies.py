"""How half copies of weights are made: in buckets, each by one node of the graph.

Gradients reach `parameter.grad` in FP32 through the parameters' own accumulators
(`casting/batched_casts`).

The nodes are made before the forward, and autograd runs ready nodes in the order in which they were
made: these would run at the very end of the pass, and all half gradients would wait for them.  So
they get a high sequence number, with which each runs as soon as its gradients are there.

A weight that cannot share a node has a cast of its own.  So has each weight where Dynamo traces the
call, and in replicas of DataParallel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ..casting.batched_casts import (
    alike,
    are_alike,
    cast_apart,
    cast_in_graph,
    cast_in_one_block,
    cast_together,
    may_use_all,
)
from ..torch_private.modules import list_weights
from ..torch_private.probes import is_recording, run_when_ready
from .lent_places import Place, StaysFloat, Tree


def copies_of(tree: Tree, dtype: torch.dtype, model: nn.Module, is_apart: bool) -> list[Tensor]:
    """Half copies of the parameters of a tree, which is `model` or a part of it, in their order.

    `is_apart`: each has a node of its own.
    """
    if torch.is_inference_mode_enabled():  # tensors of that mode have no versions
        with torch.inference_mode(False), torch.no_grad():
            return copies_of(tree, dtype, model, is_apart)
    if is_recording():
        return [parameter.to(dtype) for parameter in tree.parameters]
    in_graph = torch.is_grad_enabled()
    alone: Collection[int] = ()
    if in_graph and not (model.training and may_use_all(model)):
        alone = tree.ids
    elif in_graph and any(tree.hook_tables):
        alone = tree.below_hooks()
    made: list[Tensor] = []
    for weights, in_block in tree.groups:
        if in_block:
            copies = cast_in_one_block(weights, dtype)
            run_when_ready(copies[0])
            made += copies
        elif not in_graph or (not alone and are_alike(weights[0], weights)):
            made += _cast(weights, dtype, is_apart)
        else:
            made += _cast_in_parts(weights, dtype, alone, is_apart)
    return made


def _cast(weights: list[Tensor], dtype: torch.dtype, is_apart: bool) -> Sequence[Tensor]:
    """The copies of weights that all require a gradient, or of which none does."""
    if weights[0].requires_grad and torch.is_grad_enabled():
        if is_apart:
            return cast_apart(weights, dtype)
        made = cast_in_graph(weights, dtype)
        run_when_ready(made[0])
        return made
    return cast_together(weights, dtype, in_graph=False)


def _cast_in_parts(
    weights: list[Tensor], dtype: torch.dtype, alone: Collection[int], is_apart: bool
) -> list[Tensor]:
    """The copies of a bucket in which weights in `alone` (ids) and with hooks have a node each."""
    copies: dict[int, Tensor] = {}
    for part in alike(weights, alone):
        copies.update(zip(map(id, part), _cast(part, dtype, is_apart), strict=True))
    for one in weights:
        if id(one) not in copies:
            copies[id(one)] = made = one.to(dtype)
            run_when_ready(made)
    return [copies[id(one)] for one in weights]


def put_in_traced(places: list[Place], dtype: torch.dtype) -> None:
    """Put half copies in places while Dynamo traces, so that it records the casts."""
    copies: dict[int, Tensor] = {}
    for table, name, weight in places:
        if id(weight) not in copies:
            copies[id(weight)] = weight.to(dtype)
        table[name] = copies[id(weight)]


def put_in_replica(
    model: nn.Module, replica: nn.Module, dtype: torch.dtype, stays_float: StaysFloat
) -> None:
    """A replica of `nn.DataParallel` has its weights as plain attributes of its own."""
    for own, part in zip(model.modules(), replica.modules(), strict=True):
        if stays_float(own):
            continue
        for name, weight in list(vars(part).items()):
            if name in own._parameters and getattr(weight, "dtype", None) is torch.float32:
                vars(part)[name] = weight.to(dtype)
        if isinstance(part, nn.RNNBase):
            list_weights(part)
