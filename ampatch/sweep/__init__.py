"""Run a training script at several opt levels and compare them.

    ampatch sweep train.py --levels O0,O1,O2 --seeds 3 --out DIR -- --epochs 2 --seed {seed}

or, from Python, `sweep("train.py", ["--epochs", "2"], seeds=3)`.  Each trial is a
fresh process, and the script is not edited: its `ampatch.initialize` reads opt
level, dtype and settings from the environment.

The seed reaches the script in three ways: as `{seed}` in its arguments, as the
variable `AMPATCH_SEED`, and by seeding torch, `random` and numpy before the script
starts, for scripts that seed nothing themselves.  Where a script seeds itself with a
constant, the first run says so, and `override_seeds` gives it the trial's seed instead.
Files that a script would find again go to the trial's own directory, `{trial_dir}`.

torch is imported before the script starts.  Variables such as `OMP_NUM_THREADS`
that the script itself sets come too late; set them in the shell.

What is where:

* `config/sweep_options.py`: the options, one table for the command and for Python.
* `plan.py`, `trial.py`, `kinds.py`: what is run, and why in whole and in short runs.
* `execution/`: `sweep.py` puts together which trials there are (`planning.py`), how many of them
  fit a budget (`budget.py`, `half_types.py`), what follows from their news (`running.py`,
  `early_stops.py`, `short_runs.py`), what they have shown (`outcome.py`, `notes.py`) and the
  directory to go on in (`directory.py`).  Of a trial there is the parent's part (`runner.py`) and
  the child's (`child.py`, `autocast_baseline.py`, `autocast_off.py`, `recognition.py`,
  `plain_training.py`, `seeding.py`).  `progress.py` is the display.
* `execution/engines/`: what starts the trials, on this machine or on Ray, and in which
  order; `ranks.py`: trials of several processes.
* `measure/`: what is measured in the child (`recorder.py`, `probes.py`, `step_times.py`,
  `written_files.py`), what is read from the script's output, the machine, and the record of a
  trial (`record.py`).
* `report/`: figures and verdicts (`judge.py`, `margin.py`, `pace.py`, `recommendation.py`) made of
  the records, and the format of the results (`results.py`). `start_check.py` says whether rows
  start alike, `paired.py` has the tests of accuracy. How results are shown: `table.py` has the
  columns for `terminal.py`, `render.py` (the page) and `summary_files.py`; `templates/` the
  documents, which `documents.py` fills; `pictures.py` draws what `curves.py` has; `trackers.py`
  TensorBoard and Weights & Biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampatch.sweep.execution.progress import Progress
from ampatch.sweep.execution.sweep import Sweep, SweepError
from ampatch.sweep.measure.record import Run
from ampatch.sweep.plan import DTYPES, LEVELS, cases
from ampatch.sweep.report.render import write_report
from ampatch.sweep.report.results import Results, Row, read_results, read_runs, read_sweep
from ampatch.sweep.trial import Case, Trial

__all__ = [
    "DTYPES",
    "LEVELS",
    "Case",
    "Results",
    "Row",
    "Run",
    "Sweep",
    "SweepError",
    "Trial",
    "cases",
    "read_results",
    "read_runs",
    "read_sweep",
    "sweep",
    "write_report",
]


def sweep(
    script: str, arguments: Sequence[str] = (), *, progress: Progress | None = None, **options: Any
) -> list[Row]:
    """Run `script` with `arguments` at each opt level and dtype; returns the rows.

    `options` are those of `Sweep`.  O0 runs once per seed, since no half type plays
    a part in it.  A run that crashes, diverges or takes longer than `timeout`
    seconds does not end the sweep; its row's `status` says so.
    """
    return Sweep(script, arguments, **options).run(progress).rows
