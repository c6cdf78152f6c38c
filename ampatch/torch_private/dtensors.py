"""DTensors: the local tensor that holds a rank's shard, its exchange in place, and their meshes.

Elementwise work that is the same for every rank is done on local tensors: no collective runs, and
no call of torch's dispatcher for DTensors.  Where torch keeps the local tensor elsewhere than
expected, its public method is asked, and the data of DTensors cannot be exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = frozenset((Tensor, Parameter))
"""Types that are no DTensors."""

_LOCAL, _SPEC = "_local_tensor", "_spec"
_data: Any = torch.Tensor.data  # torch's own: sessions replace that of parameters


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor.  Looks at its attributes: the class may not be imported."""
    return (
        type(tensor) not in PLAIN and hasattr(tensor, "placements") and hasattr(tensor, "to_local")
    )


def any_dtensor(tensors: Sequence[Tensor]) -> bool:
    """Whether one of them is a DTensor."""
    return not PLAIN.issuperset(map(type, tensors)) and any(map(is_dtensor, tensors))


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, outside of any graph; other tensors unchanged."""
    if not is_dtensor(tensor):
        return tensor
    local: Any = getattr(tensor, _LOCAL, None)
    if local is None:
        local = tensor.detach().to_local()  # type: ignore[attr-defined]
    wait = getattr(local, "wait", None)  # the result of a collective that still runs
    return local if wait is None else wait()


def are_laid_out_alike(first: Any, second: Any) -> bool:
    """Whether the local tensors of two DTensors, or of two other tensors, belong together."""
    if not (is_dtensor(first) and is_dtensor(second)):
        return is_dtensor(first) is is_dtensor(second)
    return first.placements == second.placements and first.device_mesh == second.device_mesh


def can_exchange_data(tensor: Tensor) -> bool:
    """Whether `exchange_data` knows how this DTensor keeps its local tensor."""
    return hasattr(tensor, _LOCAL) and hasattr(tensor, _SPEC)


def is_part_of_dtensor(parameter: Tensor) -> bool:
    """Whether DDP has replaced a DTensor by this local tensor (`device_mesh`, a slice)."""
    return hasattr(parameter, "_st_info")


def exchange_data(tensor: Any, data: Any) -> None:
    """Give a tensor other data, perhaps of another dtype; it stays the same object.

    Assigning to `.data` of a DTensor changes its dtype alone, not its local tensor.
    """
    _data.__set__(tensor, data)
    if is_dtensor(tensor):
        for name in (_LOCAL, _SPEC):
            setattr(tensor, name, getattr(data, name))


def meshes_of(tensors: Sequence[Tensor]) -> list[Any]:
    """The device meshes of these tensors, each once; none without DTensors."""
    if not any_dtensor(tensors):
        return []
    return list(dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)))  # type: ignore[attr-defined]
