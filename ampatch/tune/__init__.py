"""Which modules need FP32 at an opt level: `ampatch tune`.

    ampatch tune train.py --opt-level O3 -- --epochs 2 --seed {seed}

A run at O0 also computes each module in the half dtype, on the same inputs, and measures the
errors.  Then trials find the smallest set of remedies with which the level trains as O0 does.  A
remedy is a module in FP32, or a setting: loss scale, the optimizer's eps, master weights.  Trials
are judged as a sweep judges its rows.

* `tuning.py`: all steps in order.  `candidate_sweep.py`, `probe_run.py`: the sweeps.  `answer.py`:
  the result and its files.  `report.py`: the result on the terminal.
* `probe.py` chooses the modules to measure in each step.  `module_call.py` computes one call again.
  `sensitivity.py`: the measurements.
* `remedies.py`: the possible remedies in order.  `search.py`: the search for the smallest set.
  `verdict.py`: whether a candidate passes.
"""

from __future__ import annotations

from ampatch.tune.answer import Answer, read_answer
from ampatch.tune.tuning import Tuning
from ampatch.tune.verdict import TuneError

__all__ = ["Answer", "TuneError", "Tuning", "read_answer"]
