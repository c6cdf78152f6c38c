"""Run a training script at several opt levels and compare them.

    ampatch sweep train.py --levels O0,O1,O2,O3 --dtypes float16,bfloat16 -- --epochs 2

or, from Python, `sweep("train.py", ["--epochs", "2"])`.  Each run is a fresh
process, and the script is not edited: its `ampatch.initialize` reads opt level
and dtype from the environment (`AMPATCH_OPT_LEVEL`, `AMPATCH_DTYPE`).

A script that sets variables such as `OMP_NUM_THREADS` for itself finds torch
imported already; set them in the shell instead.

`record.py` is what a run measured, `summary.py` the figures made of it,
`table.py` how they are shown; `runner.py` is the parent's side of a run,
`child.py` and `recorder.py` the child's.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ampatch._version import __version__
from ampatch.errors import did_you_mean
from ampatch.sweep.progress import Progress, Silent
from ampatch.sweep.record import FORMAT, Case, Run, write_json
from ampatch.sweep.runner import Files, run_case
from ampatch.run.script import check_script
from ampatch.sweep.summary import Summary, summarize

__all__ = ["LEVELS", "DTYPES", "Case", "Run", "Summary", "Sweep", "cases", "sweep"]

LEVELS = ("O0", "O1", "O2", "O3")
DTYPES = ("float16", "bfloat16")


class Sweep:
    """A script and the cases it is run at; `runs` grows while `run` goes on.

    Raises `FileNotFoundError` or `ValueError` for a script, level or dtype that
    cannot be run, and `OSError` for a directory that cannot be written.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        levels: Iterable[str] = LEVELS,
        dtypes: Iterable[str] = DTYPES[:1],
        out: str | Path | None = None,
        timeout: float | None = None,
    ) -> None:
        check_script(str(script))
        self.script = str(script)
        self.arguments = list(arguments)
        self.cases = cases(levels, dtypes)
        self.timeout = timeout
        self.directory = Path(out or default_directory(self.script))
        self.runs: list[Run] = []
        self._started = datetime.datetime.now(datetime.timezone.utc)
        self._prepare()

    @property
    def rows(self) -> list[Summary]:
        """One per run that has ended."""
        return summarize(self.runs)

    @property
    def table_file(self) -> Path:
        """The JSON file with all rows."""
        return self.directory / "sweep.json"

    def run(self, progress: Progress | None = None) -> Sweep:
        """Run every case, one after the other; the JSON grows with each."""
        with progress or Silent() as shown:
            for number, case in enumerate(self.cases, start=1):
                shown.started(number, len(self.cases), case)
                run = run_case(
                    case, self.script, self.arguments, self.directory, self.timeout, shown
                )
                self.runs.append(run)
                write_json(self.table_file, self.to_json())
                shown.ended(run)
        return self

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "script": self.script,
            "arguments": self.arguments,
            "started": self._started.isoformat(timespec="seconds"),
            "complete": len(self.runs) == len(self.cases),
            "versions": versions(),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def _prepare(self) -> None:
        """Make the directory, and take away the files of an earlier sweep in it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for case in cases(LEVELS, DTYPES):
            Files.of(self.directory, case).remove()
        write_json(self.table_file, self.to_json())


def sweep(
    script: str,
    arguments: Sequence[str] = (),
    *,
    levels: Iterable[str] = LEVELS,
    dtypes: Iterable[str] = DTYPES[:1],
    out: str | Path | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> list[Summary]:
    """Run `script` with `arguments` at each opt level and dtype; returns the rows.

    O0 runs once, since no half type plays a part in it.  A run that crashes,
    diverges or takes longer than `timeout` seconds is a row whose `status` says
    so.  Records, logs and `sweep.json` go to the directory `out`, by default
    `ampatch-sweep/` and the script's name; an earlier sweep there is replaced.
    """
    plan = Sweep(script, arguments, levels=levels, dtypes=dtypes, out=out, timeout=timeout)
    return plan.run(progress).rows


def cases(levels: Iterable[str], dtypes: Iterable[str]) -> list[Case]:
    """What to run: every level in every dtype, but O0 once."""
    halves = _known(dtypes, DTYPES, "dtypes")
    every = (
        Case(level, dtype)
        for level in _known(levels, LEVELS, "levels")
        for dtype in ([None] if level == "O0" else halves)
    )
    return list(dict.fromkeys(every))


def default_directory(script: str) -> Path:
    return Path("ampatch-sweep") / Path(script).stem


def versions() -> dict[str, str]:
    """What the runs ran on."""
    import torch

    return {
        "ampatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _known(names: Iterable[str], known: Sequence[str], argument: str) -> list[str]:
    """`names` as a list; a `ValueError` for one that is not in `known`, or for none."""
    given = [names] if isinstance(names, str) else list(names)
    for name in given:
        if name not in known:
            raise ValueError(
                f"sweep({argument}={given}): unknown {argument[:-1]} {name!r}.\n"
                f"Expected some of {', '.join(known)}.{did_you_mean(name, known)}"
            )
    if not given:
        raise ValueError(f"sweep({argument}=[]): nothing to run.\nExpected some of {known}.")
    return given
