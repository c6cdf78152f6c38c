"""Operators as torch's dispatcher knows them."""

from __future__ import annotations

from typing import Any


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
