"""Which modules the tests' sessions search for names bound early: those that hold such names."""

import gc
import inspect
import sys

from ampatch.casting import places


def search_no_other_packages() -> None:
    """Leave out installed packages, and modules that hold no function of torch's by now.

    Looking for such names in all packages took most of the time of the tests, and in all of the
    tests' own modules a tenth of the rest.  A test that gives a module such a name, or a function
    for `register_half_function`, makes a module of its own.  What is there before the first test
    is never garbage either: collections need not look at it.  A test that searches all objects by
    `gc` first calls `gc.unfreeze()`.
    """
    for title, module in list(sys.modules.items()):
        if "site-packages" in (getattr(module, "__file__", None) or ""):  # of any environment
            places.SKIPPED_PACKAGES.add(title.partition(".")[0])
        elif not any(map(_may_be_of_torch, getattr(module, "__dict__", {}).values())):
            places.SKIPPED_PACKAGES.add(title)
    places.SKIPPED_PACKAGES.update(sys.stdlib_module_names)
    places.SKIPPED_PACKAGES.difference_update(("__main__", "__mp_main__"))  # pytest's
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # a collection for each 700 new objects took a twentieth of the time


def _may_be_of_torch(value: object) -> bool:
    """Methods of tensors have no `__module__`."""
    home = getattr(value, "__module__", None) or "torch"
    return inspect.isroutine(value) and home.startswith("torch")
