"""Run a training script at several opt levels and compare them.

    ampatch sweep train.py --levels O0,O1,O2 --seeds 3 --out DIR -- --epochs 2 --seed {seed}

or, from Python, `sweep("train.py", ["--epochs", "2"], seeds=3)`.  Each trial is a fresh process,
and the script is not edited: its `ampatch.initialize` reads opt level, dtype and settings from the
environment.  Set variables such as `OMP_NUM_THREADS` in the shell, before torch is imported.
Sweeping needs the extra `sweep`; reading results does not.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampatch.sweep.cases_and_trials import DTYPES, LEVELS, cases
    from ampatch.sweep.execution.progress import Progress
    from ampatch.sweep.execution.sweep import Sweep, SweepError
    from ampatch.sweep.measure.run_record import Run
    from ampatch.sweep.report.render import write_report
    from ampatch.sweep.report.results import Results, Row, read_results, read_runs, read_sweep
    from ampatch.sweep.trial import Case, Trial

_NAMES_BY_MODULE = {
    "execution.progress": ("Progress",),
    "execution.sweep": ("Sweep", "SweepError"),
    "measure.run_record": ("Run",),
    "cases_and_trials": ("DTYPES", "LEVELS", "cases"),
    "report.render": ("write_report",),
    "report.results": ("Results", "Row", "read_results", "read_runs", "read_sweep"),
    "trial": ("Case", "Trial"),
}
_NEED_EXTRA = ("execution.sweep", "report.render")
_PACKAGES_OF_EXTRA = ("matplotlib", "pandas", "rich", "scipy")
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "DTYPES", "LEVELS", "Case", "Results", "Row", "Run", "Sweep", "SweepError", "Trial", "cases",
    "read_results", "read_runs", "read_sweep", "sweep", "write_report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name at its first use, because the command line needs only the options."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULE_OF[name] in _NEED_EXTRA:
        check_extra()
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def check_extra() -> None:
    """Raise `ImportError` if the packages of the extra `sweep` are not installed."""
    missing = [name for name in _PACKAGES_OF_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"Sweeping needs {', '.join(missing)}, which the extra sweep brings: "
            'pip install "ampatch[sweep]"'
        )


def sweep(
    script: str, arguments: Sequence[str] = (), *, progress: Progress | None = None, **options: Any
) -> list[Row]:
    """Run `script` with `arguments` at each opt level and dtype; returns the rows.

    `options` are those of `Sweep`.  O0 runs once per seed, in FP32.  A run that crashes, diverges
    or exceeds `timeout` seconds does not end the sweep; it shows in the `status` of its row.
    """
    from ampatch.sweep import Sweep

    return Sweep(script, arguments, **options).run(progress).rows
