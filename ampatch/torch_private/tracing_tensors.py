"""Tensors with which torch's own compilers compute."""

from __future__ import annotations

from torch import Tensor

from .torch_attributes import torch_attribute

_CLASSES = (
    torch_attribute("torch._subclasses.fake_tensor.FakeTensor", ()),
    torch_attribute("torch._subclasses.functional_tensor.FunctionalTensor", ()),
)
_KEY = getattr(torch_attribute("torch._C.DispatchKey", None), "AutogradFunctionality", None)
_is_excluded = torch_attribute("torch._C._dispatch_tls_is_dispatch_key_excluded", lambda key: False)


def is_internal_tracing_tensor(value: Tensor) -> bool:
    """Whether torch itself computes with this tensor, inside a call that the user made.

    torch.compile's backends and decompositions call torch's Python functions on tracing tensors
    inside a dispatch handler, where autograd is excluded.  The dispatcher's autocast is off there
    too.  If torch cannot tell, such tensors are cast like others.
    """
    return _KEY is not None and isinstance(value, _CLASSES) and _is_excluded(_KEY)
