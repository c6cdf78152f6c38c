"""Seeds in the child, which the sweep and the script set.

The sweep seeds torch, `random` and numpy before the script starts.  A script that seeds itself with
a constant overrides these seeds; `ScriptSeeds` records the first such call.  With --override-seeds
it derives each seed from the script's and the trial's, so that seeds that differ in the script (by
epoch, by rank) still differ.  Generator objects keep their seeds, because scripts use them for
fixed splits and test data.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from ampatch.device_figures import seeding_functions
from ampatch.sweep.execution.script_lines import script_line

_MAX_DRAWS = 64
_SEEDING_FUNCTIONS = {
    "torch.manual_seed": ("torch", "torch.random"),
    "random.seed": ("random",),
    "numpy.random.seed": ("numpy.random",),
}
"""The functions that seed global generators, except device functions, and their modules."""


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), `random` and, where it is installed, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy"):
        import numpy

        numpy.random.seed(seed)


def count_random_draws() -> int | None:
    """How many 32-bit words were drawn from `random` since `seed_everything(0)`, by imports.

    Importing `rich` draws one.  None if more than `_MAX_DRAWS` were drawn, or if numbers were
    drawn from another generator.
    """
    states = _states()
    seed_everything(0)
    for count in range(_MAX_DRAWS):
        if _states() == states:
            return count
        skip_random_draws(1)
    return None


def skip_random_draws(draws: int) -> None:
    """Draw this number of 32-bit words from `random`."""
    random.getrandbits(32 * draws)


def _states() -> list[str]:
    numpy: Any = sys.modules.get("numpy.random")
    numpy_states = [] if numpy is None else [str(numpy.get_state())]
    return [str(random.getstate()), str(torch.get_rng_state().tolist()), *numpy_states]


class ScriptSeeds:
    """The seeds that the script sets in this process, from `watch` on.

    `first_call` is the first call with another seed than the trial's, such as
    `torch.manual_seed(42) at train.py:8`.
    """

    def __init__(self, seed: int, override: bool) -> None:
        self.first_call = ""
        self._seed, self._override = seed, override
        self._process, self._is_seeding = os.getpid(), False

    def watch(self) -> None:
        for name, modules in {**_SEEDING_FUNCTIONS, **seeding_functions()}.items():
            for module in filter(None, map(sys.modules.get, modules)):
                attribute = name.rpartition(".")[2]
                setattr(module, attribute, self._seeding(name, getattr(module, attribute)))

    def _seeding(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            seed = next(iter([*args, *kwargs.values()]), None)  # None if the system chooses it
            if seed is None or self._is_seeding or os.getpid() != self._process:
                return original(*args, **kwargs)
            self._is_seeding = True  # calls inside are torch's, not the script's
            try:
                seed = self._seed_to_set(name, seed)
                if args:
                    return original(seed, *args[1:], **kwargs)
                return original(**{**kwargs, next(iter(kwargs)): seed})
            finally:
                self._is_seeding = False

        return seeded

    def _seed_to_set(self, name: str, seed: Any) -> Any:
        """Record the script's seed; returns the seed to set."""
        if not self.first_call and repr(seed) != repr(self._seed):
            line = script_line(sys._getframe(1)) or "a library"
            self.first_call = f"{name}({repr(seed)[:40]}) at {line}"
        return self.seed_for_trial(seed) if self._override else seed

    def seed_for_trial(self, seed: Any) -> int:
        """The seed derived from the trial's and `seed`, a number, an array or a text."""
        seed = seed.tolist() if hasattr(seed, "tolist") else seed
        digest = hashlib.sha256(f"{self._seed} {seed!r}".encode()).digest()
        return int.from_bytes(digest[:4], "big")  # numpy takes no more than 32 bits
