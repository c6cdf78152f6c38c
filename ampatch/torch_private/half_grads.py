"""Half weights whose `.grad` is the FP32 gradient of their master.

torch refuses a gradient of another dtype than its tensor's, and where it can be allowed, DDP
refuses it.  So autograd leaves half gradients where it always does, and Python sees another
attribute: a half weight that has a master becomes an instance of a subclass of its class, which
asks a `Keeper` for `.grad`.  Nothing else about the weight changes; a copy of it is a plain
one.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from .dtensors import is_dtensor
from .probes import current_backward_pass

_descriptor: Any = torch.Tensor.grad

raw_grad = _descriptor.__get__
"""The gradient where autograd leaves it: of any tensor, in the tensor's own dtype."""
set_raw_grad = _descriptor.__set__

_KEEPERS = "_ampatch_keepers"


class BlockState(Protocol):
    """Tells whether a `scale_loss` block runs."""

    @property
    def in_block(self) -> bool:
        """Inside it, `.grad` is what autograd has left."""


class Keeper(Protocol):
    """Keeps the FP32 gradients of half weights."""

    @property
    def state(self) -> BlockState:
        """The state of these gradients."""

    def grad_of_half(self, half: Tensor) -> Tensor | None:
        """The FP32 gradient; what autograd has left is added to it first."""

    def set_grad_of_half(self, half: Tensor, grad: Tensor | None) -> None:
        """Take a gradient, of any dtype, in the place of what there is."""


def is_in_backward() -> bool:
    """Whether this thread runs code inside a backward pass."""
    return current_backward_pass() != -1


def redirect_grad(half: Tensor, keeper: Keeper) -> None:
    """Have `half.grad` be what `keeper` gives; of several keepers the first alive is asked."""
    keepers = vars(half).setdefault(_KEEPERS, [])
    if not any(known() is keeper for known in keepers):
        keepers.append(weakref.ref(keeper))
    if not isinstance(half, _RedirectsGrad):
        half.__class__ = _redirecting(type(half))


def restore_grad(half: Tensor, keeper: Keeper | None = None) -> bool:
    """No longer ask `keeper`, or any keeper for None; whether the weight is a plain one again."""
    keepers = vars(half).get(_KEEPERS, [])
    keepers[:] = [] if keeper is None else [k for k in keepers if k() not in (None, keeper)]
    if keepers:
        return False
    vars(half).pop(_KEEPERS, None)
    if isinstance(half, _RedirectsGrad):
        kind: Any = type(half)
        half.__class__ = kind.__base_kind__
    return True


def is_redirected(half: Tensor) -> bool:
    """Whether a keeper is asked for its gradient."""
    return isinstance(half, _RedirectsGrad)


class _RedirectsGrad:
    """What the subclass of a half weight's class adds."""

    __slots__ = ()

    @property
    def grad(self: Any) -> Tensor | None:
        """The FP32 gradient of the master; inside a `scale_loss` block, what autograd left.

        To assign to it, or None, replaces all that there is, as in FP32 training.
        """
        keeper = _keeper(self)
        return raw_grad(self) if keeper is None else keeper.grad_of_half(self)

    @grad.setter
    def grad(self: Any, grad: Tensor | None) -> None:
        keeper = _keeper(self)
        if keeper is not None:
            keeper.set_grad_of_half(self, grad)
            return
        for ref in vars(self).get(_KEEPERS, ()):  # what was there before this pass goes, too
            if (known := ref()) is not None:
                known.set_grad_of_half(self, None)
        set_raw_grad(self, None if grad is None else grad.to(self.dtype))

    @grad.deleter
    def grad(self: Any) -> None:
        self.grad = None

    def __deepcopy__(self: Any, memo: dict) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _plain(self, self.detach().clone())
        return memo[id(self)]

    def __reduce_ex__(self: Any, protocol: Any) -> tuple:
        plain = _plain(self, self.detach())
        vars(plain).update({key: value for key, value in vars(self).items() if key != _KEEPERS})
        return plain.__reduce_ex__(protocol)

    def __repr__(self: Any) -> str:
        return repr(_plain(self, self.detach()))


def _plain(half: Any, data: Tensor) -> Tensor:
    kind = Parameter if is_dtensor(half) else type(half).__base_kind__  # no DTensor is made of data
    return kind(data, half.requires_grad)


def _keeper(half: Any) -> Keeper | None:
    """The keeper to ask now; None: autograd's own gradient is meant."""
    first = None
    for ref in vars(half).get(_KEEPERS, ()):
        keeper = ref()
        if keeper is not None:
            if keeper.state.in_block:
                return None
            first = first or keeper
    if first is not None and is_in_backward() and raw_grad(half) is not None:
        return None  # DDP is going to reduce it
    return first


@functools.cache
def _redirecting(kind: type) -> type:
    made: Any = type(kind)(kind.__name__, (_RedirectsGrad, kind), {"__module__": kind.__module__})
    made.__qualname__, made.__base_kind__ = kind.__qualname__, kind
    return made
