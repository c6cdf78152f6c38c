"""What is installed beside ampatch binds no function of torch's, as most tests rely on it."""

from __future__ import annotations

import gc
import inspect
import sys

from ampatch.casting import rebind


def search_no_other_packages() -> None:
    """Leave out the packages that are imported by now, at the start and the end of sessions.

    Looking for such a name in all their modules took most of the time of the tests, and in modules
    of the tests that hold no function of torch's a tenth of the rest.  What is there before the
    first test is never garbage either: collections need not look at it.  A test that searches all
    objects by `gc` first calls `gc.unfreeze()`.
    """
    for title, module in list(sys.modules.items()):
        if "site-packages" in (getattr(module, "__file__", None) or ""):  # of any environment
            rebind.NOT_SEARCHED.add(title.partition(".")[0])
        elif not any(map(_may_be_of_torch, vars(module).values())):
            rebind.NOT_SEARCHED.add(title)
    rebind.NOT_SEARCHED.update(sys.stdlib_module_names)
    rebind.NOT_SEARCHED.difference_update(("__main__", "__mp_main__"))  # pytest's
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # a collection for each 700 new objects took a twentieth of the time


def _may_be_of_torch(value: object) -> bool:
    """Torch's functions of C++ have no `__module__`."""
    home = getattr(value, "__module__", None) or "torch"
    return inspect.isroutine(value) and home.startswith("torch")
