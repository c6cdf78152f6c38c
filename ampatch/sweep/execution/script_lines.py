"""Finds the line of the script's files that led to a call, for notes that name the line."""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path
from types import FrameType

import torch

from ampatch.launch.script import PACKAGE_ROOT

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(torch.__file__)),
        os.path.join(PACKAGE_ROOT, "ampatch"),
    )
)


def script_line(frame: FrameType | None) -> str:
    """`train.py:12`: the line of the script's files at `frame` or at its callers; "" if none."""
    while frame is not None:
        file = _script_file(frame.f_code.co_filename)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _script_file(path: str) -> str:
    """The name of the file at this path; "" if the file is part of a library."""
    file = os.path.realpath(path)
    return "" if file.startswith(_LIBRARIES) or not os.path.exists(file) else Path(file).name
