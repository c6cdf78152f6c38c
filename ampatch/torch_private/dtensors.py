"""DTensors: the local tensor with a rank's shard, its replacement in place, and the device meshes.

Elementwise work that is the same on every rank runs on local tensors, without collectives and
without torch's dispatcher for DTensors.  If torch keeps the local tensor elsewhere, its public
method is called, and the data of DTensors cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN_TYPES = frozenset((Tensor, Parameter))
"""Types whose tensors are no DTensors."""

_LOCAL_ATTRIBUTE, _SPEC_ATTRIBUTE = "_local_tensor", "_spec"
_data: Any = torch.Tensor.data  # torch's own: sessions replace `nn.Parameter.data`


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor has a DTensor's attributes.  The class is perhaps not imported."""
    return (
        type(tensor) not in PLAIN_TYPES
        and hasattr(tensor, "placements")
        and hasattr(tensor, "to_local")
    )


def any_dtensor(tensors: Sequence[Tensor]) -> bool:
    """Whether any of these tensors is a DTensor."""
    return not PLAIN_TYPES.issuperset(map(type, tensors)) and any(map(is_dtensor, tensors))


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without a graph, and any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    local: Any = getattr(tensor, _LOCAL_ATTRIBUTE, None)
    if local is None:
        local = tensor.detach().to_local()  # type: ignore[attr-defined]
    wait = getattr(local, "wait", None)  # the result of a collective that still runs
    return local if wait is None else wait()


def are_laid_out_alike(first: Any, second: Any) -> bool:
    """Whether two tensors are DTensors with the same placements and mesh, or no DTensors."""
    if not (is_dtensor(first) and is_dtensor(second)):
        return is_dtensor(first) is is_dtensor(second)
    return first.placements == second.placements and first.device_mesh == second.device_mesh


def can_replace_data(tensor: Tensor) -> bool:
    """Whether `replace_data` knows how this DTensor keeps its local tensor."""
    return hasattr(tensor, _LOCAL_ATTRIBUTE) and hasattr(tensor, _SPEC_ATTRIBUTE)


def is_localized_by_ddp(parameter: Tensor) -> bool:
    """Whether DDP with `device_mesh` has replaced a DTensor by this local tensor."""
    return hasattr(parameter, "_st_info")


def replace_data(tensor: Any, data: Any) -> None:
    """Replace a tensor's data in place, perhaps by data of another dtype.

    Assigning to `.data` of a DTensor changes its dtype alone, not its local tensor.
    """
    _data.__set__(tensor, data)
    if is_dtensor(tensor):
        for name in (_LOCAL_ATTRIBUTE, _SPEC_ATTRIBUTE):
            setattr(tensor, name, getattr(data, name))


def meshes_of(tensors: Sequence[Tensor]) -> list[Any]:
    """The device meshes of the DTensors among these tensors, each once."""
    if not any_dtensor(tensors):
        return []
    return list(dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)))  # type: ignore[attr-defined]
