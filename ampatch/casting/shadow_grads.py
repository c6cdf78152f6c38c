"""Gradients on their way from shadows to the weights they stand in for.

What a weight would have met as the leaf it is: its hooks run on the FP32
gradient, what is there already is added to, and a frozen weight gets nothing.
"""

from __future__ import annotations

import itertools
import operator
import weakref

import torch
from torch import Tensor

from .. import foreach
from ..flat_grads import FlatGrads

hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
backward_hooks_of = operator.attrgetter("_backward_hooks")
late_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")
_grad_of = operator.attrgetter("grad")
wants_grad = operator.attrgetter("requires_grad")
_NONE = itertools.repeat(None)


def move(weights: list[Tensor], grads: list[Tensor], flats: FlatGrads | None = None) -> None:
    """Take half gradients, those of shadows, into the weights' `.grad`.

    `flats` has the tensors that weights without a gradient are given.
    """
    earlier = list(map(_grad_of, weights))
    is_first = not any(map(operator.is_not, earlier, _NONE))
    if (
        not all(map(wants_grad, weights))
        or any(map(backward_hooks_of, weights))
        or any(map(late_hooks_of, weights))
        or any(map(wants_grad, grads))
        or not (is_first or not any(map(operator.is_, earlier, _NONE)))
    ):
        for weight, grad in zip(weights, grads, strict=True):
            deliver(weight, grad)
    elif is_first:
        own = list(map(torch.empty_like, weights)) if flats is None else flats.take(weights)
        foreach.copy_(own, grads)
        for weight, grad in zip(weights, own, strict=True):
            weight.grad = grad
    else:
        with torch.no_grad():
            foreach.add_(earlier, grads)


def deliver(weight: Tensor, half_grad: Tensor) -> None:
    """One gradient, with all that autograd does for a leaf."""
    if not weight.requires_grad:
        return
    with torch.set_grad_enabled(half_grad.requires_grad):  # as backward(create_graph=True)
        grad = half_grad.to(weight.dtype)
        for hook in list((weight._backward_hooks or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        if weight.grad is None:
            weight.grad = grad
        elif grad.requires_grad or weight.grad.requires_grad:
            weight.grad = weight.grad + grad
        else:
            weight.grad.add_(grad)
        for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
            hook(weight)


def deliver_by_itself(weight: weakref.ref[Tensor], half: Tensor) -> None:
    """From now on a shadow hands over its gradients without anyone to collect them."""
    if not half.requires_grad:
        return

    def hand_over(half: Tensor) -> None:
        grad, half.grad = half.grad, None
        target = weight()
        if target is not None:
            deliver(target, grad)

    half.register_post_accumulate_grad_hook(hand_over)


def is_watched(weight: Tensor) -> bool:
    """Whether somebody would notice that gradients do not come to the weight itself.

    Hooks are on the weight, or (Horovod's way) on its gradient accumulator, which
    then lives on without a graph.
    """
    if any(hooks_of(weight)):
        return True
    if not weight.requires_grad:
        return False
    with torch.enable_grad():
        _accumulator(weight).metadata[_MARK] = True
        return _MARK in _accumulator(weight).metadata


_MARK = "ampatch: whoever reads this held the accumulator"


def _accumulator(weight: Tensor) -> torch.autograd.graph.Node:
    return weight.view_as(weight).grad_fn.next_functions[0][0]
