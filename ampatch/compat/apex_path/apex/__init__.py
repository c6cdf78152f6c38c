"""Gives way to ampatch's apex, or to an apex that has its own: `ampatch apex-path`."""

import importlib
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[4])
if _ROOT not in sys.path:  # where ampatch is not installed but run from its checkout
    sys.path.append(_ROOT)

del sys.modules[__name__]  # an importer takes what has this name at the end
importlib.import_module("ampatch.compat.apex").import_instead()
