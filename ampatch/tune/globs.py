"""Globs as short as they are right: `decoder.norm*` for all that it matches, and for no other.

In those of `initialize(overrides=...)` `*` stands for any text, dots too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ampatch.config.overrides import named


def shortest(chosen: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Globs that match each path in `chosen`, and of `everything` only those and what is in them.

    What is inside a chosen module runs in FP32 with it.  The fewest globs that a greedy cover
    finds (V. Chvatal, Math. Oper. Res. 4 (1979)), and of equal ones that with fewest stars, then
    the shortest.  One module is named by its path.
    """
    left, paths = set(chosen), set(everything)
    allowed = {path for path in paths if any(_is_inside(path, one) for one in left)}
    ranked = []
    for glob in sorted(_proposals(left)):
        matched = named(glob, paths)
        if matched <= allowed and (glob in left or len(matched & left) > 1):
            ranked.append((glob, left & matched))
    found = []
    while left:
        glob, matched = max(
            ranked, key=lambda one: (len(one[1] & left), -one[0].count("*"), -len(one[0]))
        )
        found.append(glob)
        left -= matched
    return sorted(found)


def _is_inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _proposals(paths: set[str]) -> set[str]:
    """The paths themselves, and each with numbers, parts, beginnings or ends left open."""
    globs = set(paths)
    for path in paths:
        parts = path.split(".")
        numbers = [re.sub(r"\d+", "*", part) for part in parts]
        globs.add(".".join(numbers))
        globs.update(".".join([*parts[:i], numbers[i], *parts[i + 1 :]]) for i in range(len(parts)))
        globs.update(f"*.{'.'.join(parts[i:])}" for i in range(1, len(parts)))
        globs.update(f"*.{'.'.join(numbers[i:])}" for i in range(1, len(parts)))
        globs.update(".".join([*parts[:i], "*"]) for i in range(len(parts)))
        globs.update(".".join([*parts[:i], "*", *parts[i + 1 :]]) for i in range(len(parts)))
    return globs
