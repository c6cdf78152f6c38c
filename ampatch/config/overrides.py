"""`overrides={"decoder.*": "float", nn.Softmax: "float", torch.bmm: "half"}`, parsed and checked.

A key is a glob over module paths, a module class, or a function.  JSON text, or a JSON file such as
`ampatch tune` writes, has only globs: `{"decoder.*": "float"}`.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..errors import type_name
from .validation import known_word

PRECISIONS = ("float", "half")

ModuleKey = str | type[nn.Module]  # a glob over module paths, or a class


class Overrides(NamedTuple):
    """The user's overrides: of modules, in the user's order, and of functions."""

    modules: list[tuple[ModuleKey, str]]
    functions: dict[Callable, str]


def parse(overrides: Any) -> Overrides:
    """The overrides from the argument of `initialize`; for None there are none.

    Raises `TypeError` or `ValueError` for a key or a precision that is not supported.
    """
    parsed = Overrides([], {})
    if overrides is None:
        return parsed
    if isinstance(overrides, (str, os.PathLike)):
        overrides = read(f"ampatch.initialize(overrides={str(overrides)!r})", overrides)
    if not isinstance(overrides, Mapping):
        raise TypeError(
            f"ampatch.initialize(overrides={overrides!r}): expected a dict such as "
            f'{{"decoder.*": "float"}}, or a JSON file with one, got {type_name(overrides)}.'
        )
    for key, precision in overrides.items():
        known_word(
            f"ampatch.initialize(overrides={{{key!r}: {precision!r}}})", precision, PRECISIONS
        )
        if isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module)):
            parsed.modules.append((key, precision))
        elif callable(key) and not isinstance(key, (type, nn.Module)):
            parsed.functions[key] = precision
        else:
            raise TypeError(
                f"ampatch.initialize(overrides={{{key!r}: ...}}): expected a module "
                f"path (globs allowed), a Module class or a function, got "
                f"{type_name(key)}."
            )
    return parsed


def matching_paths(glob: str, paths: Collection[str]) -> set[str]:
    """The `paths` that a glob names: the glob itself if it is a path, otherwise all that match.

    So `heads[0]` names the module of that path, though it is a glob for `heads0`.
    """
    return {glob} if glob in paths else {path for path in paths if fnmatch.fnmatchcase(path, glob)}


def read(what: str, source: str | os.PathLike[str]) -> dict[str, str]:
    """The globs and precisions in a JSON file, or in JSON text; errors begin with `what`.

    Raises `ValueError` for anything else.
    """
    text = os.fspath(source)
    try:
        text = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        globs = json.loads(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{what}: cannot be read: {reason}. Expected a JSON file such as ampatch tune writes, "
            'with {"decoder.*": "float"}.'
        ) from None
    if not isinstance(globs, dict) or not all(
        isinstance(precision, str) for precision in globs.values()
    ):
        raise ValueError(
            f"{what}: expected a JSON object of globs and precisions, such as "
            f'{{"decoder.*": "float"}}, got {text.strip()[:80]}.'
        )
    return globs
