"""What is installed beside ampatch binds no function of torch's, as most tests rely on it."""

from __future__ import annotations

import gc
import sys

from ampatch.casting import rebind


def search_no_other_packages() -> None:
    """Leave out the packages that are imported by now, at the start and the end of sessions.

    Looking for such a name in all their modules took most of the time of the tests.  What is there
    before the first test is never garbage either: collections need not look at it.  A test that
    searches all objects by `gc` first calls `gc.unfreeze()`.
    """
    rebind.NOT_SEARCHED.update(
        title.partition(".")[0]
        for title, module in list(sys.modules.items())
        if "site-packages" in (getattr(module, "__file__", None) or "")  # of any environment
    )
    rebind.NOT_SEARCHED.update(sys.stdlib_module_names)
    rebind.NOT_SEARCHED.difference_update(("__main__", "__mp_main__"))  # pytest's
    gc.collect()
    gc.freeze()
