"""Files that are written completely or not at all, and JSON with inf and NaN.

JSON has no NaN and no infinity, so they are written as the strings "nan", "inf" and "-inf".
`from_json` converts these strings back, and dictionaries to dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Any) -> None:
    """Write `data`; a reader finds the whole file or none."""
    text = json.dumps(to_json(data), indent=1, allow_nan=False)
    write_whole(path, text + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text`; a reader finds the whole file or none."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def to_json(value: Any) -> Any:
    """`value` with JSON types: dataclasses as dictionaries, non-finite floats and paths as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        value = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(target: Any, data: Any) -> Any:
    """The value that `to_json` converted; `target` is its type, a dataclass or a field's type."""
    convert = _converter(target)
    return data if convert is None else convert(data)


@functools.cache
def _converter(target: Any) -> Callable[[Any], Any] | None:
    """The function from JSON to a value of this type; None if both are the same."""
    if target in (float, Path):
        return target
    if dataclasses.is_dataclass(target):
        hints = typing.get_type_hints(target)
        return lambda data: target(
            **{name: from_json(hints[name], data[name]) for name in data.keys() & hints}
        )
    origin, type_arguments = typing.get_origin(target), typing.get_args(target)
    if origin in (typing.Union, types.UnionType):
        convert = _converter(
            next(option for option in type_arguments if option is not types.NoneType)
        )
        return convert and (lambda data: None if data is None else convert(data))
    if origin is tuple:  # its items all have one type, or JSON types
        convert = _converter(type_arguments[0])
        return lambda data: tuple(map(convert, data) if convert else data)
    convert = _converter(type_arguments[-1]) if origin in (list, dict) else None
    if convert is None:
        return None
    if origin is dict:
        return lambda data: {key: convert(value) for key, value in data.items()}
    return lambda data: [convert(value) for value in data]
