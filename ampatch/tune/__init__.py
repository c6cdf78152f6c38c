"""Which modules need FP32 at an opt level: `ampatch tune`.

    ampatch tune train.py --opt-level O3 -- --epochs 2 --seed {seed}

A run at O0 also computes each module in the half dtype, on the same inputs, and measures the
errors.  Then trials, judged as a sweep judges its rows, find the smallest set of modules in FP32
(and of settings: loss scale, the optimizer's eps, master weights) with which the level trains
within the noise of O0.

* `tuning.py`: all steps in order.  `trials.py`, `probe_run.py`: the sweeps.  `answer.py`: the
  result and its files.  `report.py`: the result on the terminal.
* `probe.py`, `shadow.py`, `sensitivity.py`: which modules are measured, and when; how one call is
  computed again; the measurements.
* `remedies.py`, `search.py`, `verdict.py`: the possible remedies in order; the search for the
  smallest set; whether a candidate passes.
"""

from __future__ import annotations

from ampatch.tune.answer import Answer, read_answer
from ampatch.tune.tuning import Tuning
from ampatch.tune.verdict import TuneError

__all__ = ["Answer", "TuneError", "Tuning", "read_answer"]
