"""Places of functions: a module or class, and a name in it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import wrapt

from .tables import BUILTINS

NAMESPACES = (
    *("torch", "torch.nn.functional", "torch.linalg", "torch.special", "torch.fft"),
    *("torch.sparse", "torch.Tensor"),
)
"""Where torch keeps the functions that overrides and registrations may name."""


def resolve(where: str) -> Any:
    """The module or class that a dotted place names: `torch.nn.functional`, `torch.Tensor`."""
    owner: Any = sys.modules[where.partition(".")[0]]
    for name in where.split(".")[1:]:
        owner = getattr(owner, name)
    return owner


def has(where: str, name: str = "__name__") -> bool:
    """Whether this torch has the place `where`, and `name` in it."""
    try:
        return hasattr(resolve(where), name)
    except AttributeError:
        return False


def raw_attribute(owner: Any, name: str) -> Any:
    """`owner.name` as it is stored: a static method as such, not the function inside."""
    return wrapt.resolve_path(owner, name)[2]


def places_of(functions: Iterable[Any]) -> list[tuple[Any, str]]:
    """`(owner, name)` of each place in torch's namespaces that has one of these functions."""
    found = set(map(id, functions))
    return [
        (owner, name)
        for owner in map(resolve, filter(has, NAMESPACES))
        for name in dir(owner)
        if id(getattr(owner, name, None)) in found
    ]


def public_name(where: str) -> str:
    """The name by which users know the place of a row."""
    functional = "torch.nn.functional"
    return where.replace(f"{BUILTINS[functional]}.", f"{functional}.")


def user_place(call: str, place: Any, name: str | None) -> tuple[Any, str]:
    """`(owner, name)` of a function of the user's, given as these two or as one dotted string.

    Raises `ValueError` for a module that is not imported.  Errors begin with `call`.
    """
    if isinstance(name, str) and place is not None:
        owner, attribute = place, name
    else:
        owner, _, attribute = str(place).rpartition(".")
        is_text = isinstance(place, str) and name is None
        if not is_text or not owner:
            raise (ValueError if is_text else TypeError)(
                f"{call}(module={place!r}, name={name!r}): expected a module or class and the name "
                'of a function in it, or one dotted string such as "package.module.function".'
            )
    if isinstance(owner, str):
        title, (parent, _, inner) = owner, owner.rpartition(".")
        owner = sys.modules.get(title) or getattr(sys.modules.get(parent), inner, None)
        if owner is None:
            raise ValueError(f"{call}: {title} is not imported. Import it before this call.")
    return owner, attribute
