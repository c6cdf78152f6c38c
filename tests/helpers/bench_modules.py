"""Modules of benchmarks/, for tests of what they count."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from repository import BENCHMARKS


def load(name):
    """`benchmarks/name.py`, which imports its neighbours; without them it skips the test module."""
    if not BENCHMARKS.is_dir():
        pytest.skip(
            "tests of an installed package: benchmarks/ is not here", allow_module_level=True
        )
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module
