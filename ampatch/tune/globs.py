"""Globs as short as they are right: `layers.*.norm` for all that it matches, and for no other.

In those of `initialize(overrides=...)` `*` stands for any text, dots too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ampatch.config.overrides import named


def shortest(chosen: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Globs that match each path in `chosen`, and of `everything` only those and what is in them.

    What is inside a chosen module runs in FP32 with it.  Paths that differ in numbers share a glob
    where it matches no other; else a module is named by its path.
    """
    left, paths, found = set(chosen), set(everything), set()
    allowed = {path for path in paths if any(f"{path}.".startswith(f"{one}.") for one in left)}
    for path in left:
        glob = re.sub(r"\d+", "*", path)
        is_right = len(left & named(glob, paths)) > 1 and named(glob, paths) <= allowed
        found.add(glob if is_right else path)
    return sorted(found)
