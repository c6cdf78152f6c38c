"""Modules of benchmarks/, for tests of what they count."""

import importlib
import sys

import pytest
from repository import BENCHMARKS


def load(name):
    """`benchmarks/name.py`, which imports its neighbours; without them it skips the test module."""
    if not BENCHMARKS.is_dir():
        pytest.skip(
            "tests of an installed package: benchmarks/ is not here", allow_module_level=True
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)
