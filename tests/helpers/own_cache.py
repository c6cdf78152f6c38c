"""A cache of the tests' own: builds in the user's home have nothing to do with them.

Nothing is built into it, or `ampatch run` and `ampatch sweep` in tests would compile: tests of
builds ask for them.  Imported before ampatch.  Processes that a test starts, and workers of `-n`,
get the variables.
"""

import os
import shutil
import tempfile

_OURS = None
if not os.environ.get("AMPATCH_CACHE"):
    _OURS = os.environ["AMPATCH_CACHE"] = tempfile.mkdtemp(prefix="ampatch-tests-")
    os.environ["AMPATCH_NATIVE"] = os.environ.get("AMPATCH_NATIVE") or "0"


def remove() -> None:
    if _OURS is not None:
        shutil.rmtree(_OURS)
