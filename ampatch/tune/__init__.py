"""Which modules need FP32 at an opt level: `ampatch tune`.

    ampatch tune train.py --opt-level O3 -- --epochs 2 --seed {seed}

A run at O0 computes each module in the half dtype as well, on the same inputs, and says how far off
that is.  Then trials, judged as a sweep judges its rows, find the smallest set of modules (and of
settings that are no module's: loss scale, the optimizer's eps, master weights) with which the level
trains within the noise of O0.

What is where:

* `tuning.py`: the course of it.  `trials.py`, `probe_run.py`: its sweeps but for the timing.
  `answer.py`: what is found, and its files.  `report.py`: the same on the terminal.
* `probe.py`, `shadow.py`, `sensitivity.py`: which modules are looked at, and when; how one call is
  computed a second time; what was found.
* `remedies.py`, `search.py`, `verdict.py`: what can be put in place, in which order, the search for
  the smallest set, and whether a candidate passes.
"""

from __future__ import annotations

from ampatch.tune.answer import Answer, read_answer
from ampatch.tune.tuning import Tuning
from ampatch.tune.verdict import TuneError

__all__ = ["Answer", "TuneError", "Tuning", "read_answer"]
