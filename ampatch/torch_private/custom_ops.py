"""Operators as torch's dispatcher and `torch.library` know them."""

from __future__ import annotations

from typing import Any

import torch.library

from .lookup import of_torch

OPERATOR_CLASSES: tuple[type, ...] = tuple(
    filter(
        None, (of_torch(f"torch._ops.{name}", None) for name in ("OpOverload", "OpOverloadPacket"))
    )
)
"""Without them custom operators run as they do without casts."""


def registered_kernels() -> set[str]:
    """`namespace/name/key` of every kernel registered from Python; none where it is not known."""
    return getattr(torch.library, "_impls", set())


def qualified_name(operator: Any) -> str:
    """`namespace::name` of an operator or of one of its overloads; "" where it is not known."""
    schema = getattr(operator, "_schema", None)
    if schema is not None:
        return schema.name
    return getattr(operator, "_qualified_op_name", "")


def base_name(operator: Any) -> str:
    """The name of an overload's operator without its namespace, such as `copy_`."""
    return getattr(operator, "_opname", None) or str(operator).split(".")[-2]


def is_mutable(operator: Any) -> bool:
    """Whether an overload writes into its arguments; by its name where torch does not say."""
    schema = getattr(operator, "_schema", None)
    return base_name(operator).endswith("_") if schema is None else schema.is_mutable


def out_arguments(operator: Any) -> set[str]:
    """The names of the arguments that an overload only writes."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return {"out"}
    return {argument.name for argument in schema.arguments if argument.is_out}
