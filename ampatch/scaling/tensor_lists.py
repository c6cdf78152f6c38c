"""Questions about whole lists of tensors, and gradients moved between them, in one call each.

Each function is here in Python; where the native part is in force, its twin of the same name is
called.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from torch import Tensor

from ..native import part
from ..torch_private import foreach
from ..torch_private.dtensors import are_laid_out_alike, local_of

_grad_of = operator.attrgetter("grad")
_nothing = itertools.repeat(None)


def _with_grads(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that have a gradient."""
    has_one = map(operator.is_not, map(_grad_of, tensors), _nothing)
    return list(itertools.compress(tensors, has_one))


def _grads_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the tensors that have one."""
    return [grad for grad in map(_grad_of, tensors) if grad is not None]


def _drop_grads(tensors: Sequence[Tensor]) -> None:
    """Set `.grad` of each to None."""
    for tensor in tensors:
        tensor.grad = None


with_grads = _with_grads if part is None else part.with_grads
grads_of = _grads_of if part is None else part.grads_of
drop_grads = _drop_grads if part is None else part.drop_grads


def put_back(aside: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors the gradients that were set aside, with those added that they have now."""
    held: list[Tensor] = []
    more: list[Tensor] = []
    for tensor, grad in aside:
        new = tensor.grad
        if new is None:
            tensor.grad = grad
        elif _takes_in_place(grad, new):
            held.append(local_of(grad))
            more.append(local_of(new))
            tensor.grad = grad
        else:
            tensor.grad = grad + new
    if held:
        foreach.add_(held, more)


def _takes_in_place(grad: Tensor, more: Tensor) -> bool:
    """Whether torch's lists can add `more` to a gradient: not to one that is conjugated lazily."""
    return are_laid_out_alike(grad, more) and not grad.is_conj()
