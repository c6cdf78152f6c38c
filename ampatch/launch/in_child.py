"""Run by its path in a spawned child, which does not have its parent's `sys.path` yet.

`children.py` passes the upper-case names.
"""

import sys

if PACKAGE_ROOT not in sys.path:  # noqa: F821  (`children.py` passes it)
    sys.path.append(PACKAGE_ROOT)  # noqa: F821

from ampatch.launch.children import start_child

start_child(IS_AUTO, APEX_BEHIND, SHOWS_MESSAGES)  # noqa: F821
