"""Imports ampatch's apex, or another apex with an amp, in its place: `ampatch apex-path`."""

import importlib
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[4])
if _ROOT not in sys.path:  # ampatch runs from its checkout and is not installed
    sys.path.append(_ROOT)

del sys.modules[__name__]  # Python returns the module that has this name after the import
importlib.import_module("ampatch.compat.apex").import_apex()
