"""`overrides={"decoder.*": "float", nn.Softmax: "float", torch.bmm: "half"}`, parsed and checked.

Modules are named by a glob over their path or by their class, functions by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ..errors import type_name
from .validation import word

PRECISIONS = ("float", "half")

ModuleKey = str | type[nn.Module]  # a glob over module paths, or a class


class Overrides(NamedTuple):
    """What the user asked for: rules for modules in the order given, functions' precisions."""

    modules: list[tuple[ModuleKey, str]]
    functions: dict[Callable, str]


def parse(overrides: Any) -> Overrides:
    """The overrides from the argument of `initialize`; None holds none.

    Raises `TypeError` or `ValueError` for a key or a precision that means nothing.
    """
    found = Overrides([], {})
    if overrides is None:
        return found
    if not isinstance(overrides, Mapping):
        raise TypeError(
            f"ampatch.initialize(overrides={overrides!r}): expected a dict such as "
            f'{{"decoder.*": "float"}}, got {type_name(overrides)}.'
        )
    for key, precision in overrides.items():
        word(f"ampatch.initialize(overrides={{{key!r}: {precision!r}}})", precision, PRECISIONS)
        if isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module)):
            found.modules.append((key, precision))
        elif callable(key) and not isinstance(key, (type, nn.Module)):
            found.functions[key] = precision
        else:
            raise TypeError(
                f"ampatch.initialize(overrides={{{key!r}: ...}}): expected a module "
                f"path (globs allowed), a Module class or a function, got "
                f"{type_name(key)}."
            )
    return found
