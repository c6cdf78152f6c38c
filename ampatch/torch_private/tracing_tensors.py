"""Tensors with which torch's own compilers compute."""

from __future__ import annotations

from torch import Tensor

try:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    _KINDS: tuple[type, ...] = (FakeTensor, FunctionalTensor)
except ImportError:
    _KINDS = ()

try:
    from torch._C import DispatchKey, _dispatch_tls_is_dispatch_key_excluded

    def _below_autograd() -> bool:
        return _dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality)
except ImportError:

    def _below_autograd() -> bool:
        """Without a way to ask, no: such tensors are cast like others."""
        return False


def is_internal(value: Tensor) -> bool:
    """Whether torch itself is computing with this tensor, below the calls a user made.

    torch.compile's backends and decompositions run torch's Python functions on
    tracing tensors from inside a dispatch handler, where autograd is excluded.
    The dispatcher's autocast is off there too.
    """
    return isinstance(value, _KINDS) and _below_autograd()
