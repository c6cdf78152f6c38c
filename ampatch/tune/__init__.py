"""Which modules need FP32 at an opt level: `ampatch tune`.

    ampatch tune train.py --opt-level O3 -- --epochs 2 --seed {seed}

A run at O0 computes each module in the half type as well, on the same inputs, and says how far off
that is.  Then trials, judged as a sweep judges its rows, find the smallest set of modules (and of
settings that are no module's: loss scale, the optimizer's eps, master weights) with which the level
trains within the noise of O0.

What is where:

* `tuning.py`: the course of it.  `trials.py`, `probe_run.py`, `timing.py`: its three sweeps.
  `answer.py`: what is found, and its files.
* `probe.py`, `shadow.py`, `sensitivity.py`: which modules are looked at, and when; how one call is
  computed a second time; what was found.
* `remedies.py`, `search.py`, `verdict.py`: what can be put in place, in which order, the search for
  the smallest set, and whether a candidate passes.
* `globs.py`: overrides in few words.  `report.py`: the answer on the terminal.
"""

from __future__ import annotations

from ampatch.tune.answer import Answer, read_answer
from ampatch.tune.tuning import Tuning
from ampatch.tune.verdict import TuneError

__all__ = ["Answer", "TuneError", "Tuning", "read_answer"]
