"""Files that a reader finds whole or not at all, and JSON with inf and NaN.

JSON has no NaN and no infinity; they are written as the strings "nan", "inf"
and "-inf".  The readers of each format make numbers of them again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that a reader finds the whole file or none."""
    text = json.dumps(_plain(data), indent=1, allow_nan=False)
    write_whole(path, text + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that a reader finds the whole file or none."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _plain(value: Any) -> Any:
    """`value` with dataclasses as dicts and non-finite floats as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
