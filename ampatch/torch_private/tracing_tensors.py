"""Tensors with which torch's own compilers compute."""

from __future__ import annotations

from torch import Tensor

from .lookup import of_torch

_CLASSES = (
    of_torch("torch._subclasses.fake_tensor.FakeTensor", ()),
    of_torch("torch._subclasses.functional_tensor.FunctionalTensor", ()),
)
_KEY = getattr(of_torch("torch._C.DispatchKey", None), "AutogradFunctionality", None)
_is_excluded = of_torch("torch._C._dispatch_tls_is_dispatch_key_excluded", lambda key: False)


def is_internal(value: Tensor) -> bool:
    """Whether torch itself is computing with this tensor, below the calls a user made.

    torch.compile's backends and decompositions run torch's Python functions on
    tracing tensors from inside a dispatch handler, where autograd is excluded.
    The dispatcher's autocast is off there too.  Without a way to ask they are cast like others.
    """
    return _KEY is not None and isinstance(value, _CLASSES) and _is_excluded(_KEY)
