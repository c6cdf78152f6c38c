"""Operators of torch's dispatcher: their names, schemas and autocast kernels."""

from __future__ import annotations

import operator as attributes
from collections.abc import Callable, Iterable
from typing import Any

from .torch_attributes import torch_attribute

_NAME_OF = {"torch._ops.OpOverload": "_name", "torch._ops.OpOverloadPacket": "_qualified_op_name"}

OPERATOR_CLASSES: list[tuple[type[Any], Callable[[Any], str]]] = [
    (cls, attributes.attrgetter(name))
    for path, name in _NAME_OF.items()
    if (cls := torch_attribute(path, None)) is not None
]
"""The classes of `torch.ops.torchvision.nms` and `torch.ops.torchvision.nms.default`, each with a
function that returns the full name of an object.  Without the classes, such calls are not patched.
"""

_key_name_of = torch_attribute("torch._C._dispatch_key_for_device", None)
_keys = torch_attribute("torch._C.DispatchKey", None)
_TORCH_NAMESPACES = ("aten::", "prim::")


def devices_with_autocast_kernel(
    operator: Any, name: str, devices: Iterable[str]
) -> frozenset[str]:
    """The device types, among `devices`, for which an operator has an autocast kernel of its own.

    Empty for torch's own operators, which follow the op tables, and if torch cannot tell.
    """
    if name.startswith(_TORCH_NAMESPACES) or _key_name_of is None or _keys is None:
        return frozenset()  # TorchScript's operators (`prim`) have no dispatch keys
    overloads = [operator]
    if hasattr(operator, "overloads"):  # `op_overloads` came after torch 2.10
        overloads = [getattr(operator, overload) for overload in operator.overloads()]
    return frozenset(
        device
        for device in devices
        if (key := getattr(_keys, f"Autocast{_key_name_of(device)}", None)) is not None
        and any(overload.has_kernel_for_dispatch_key(key) for overload in overloads)
    )


def base_name(operator: Any) -> str:
    """The name of an overload's operator without its namespace, such as `copy_`."""
    return getattr(operator, "_opname", None) or str(operator).split(".")[-2]


def is_mutable(operator: Any) -> bool:
    """Whether an overload writes into its arguments.  Its name decides if it has no schema."""
    schema = getattr(operator, "_schema", None)
    return base_name(operator).endswith("_") if schema is None else schema.is_mutable


def out_arguments(operator: Any) -> set[str]:
    """The names of the arguments that an overload writes and does not read."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return {"out"}
    return {argument.name for argument in schema.arguments if argument.is_out}
