"""Reasons to end a sweep after a few runs, because further runs would fail as well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampatch.sweep.kinds import FRAMEWORK, FRAMEWORKS, LATE, UNKNOWN_KIND, Kind
from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.report.numbers import pluralize
from ampatch.sweep.report.run_figures import DIVERGED, NO_STEP, NO_TRAINING, OK, status, status_name
from ampatch.sweep.trial import BASE

WRONG_ARGUMENTS = 2  # the exit status of argparse
LAST_LINES = 12  # output lines shown with a crash
_WITHOUT_ENOUGH_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate")
_RESUME_HINT = (
    " The script may resume from a file that was there before, such as a checkpoint of an earlier "
    "trial. Give each trial its own folder, which is empty when it begins: -- --checkpoints "
    "{trial_dir}, or the variable AMPATCH_TRIAL_DIR in the script."
)
_HOW_TO_FIND_OUT = (
    " With O0 among --levels its first run shows what the script has. An option of the script that "
    "switches AMP on stands after --."
)


def reason_to_stop(script: str, earlier: Sequence[Run], run: Run, log: Path) -> str:
    """Why no other trial should run after `run`; "" if other trials may succeed.

    `earlier` are the runs before `run`, `log` is the file of its output.
    """
    run_status = status(run)
    if run.case == BASE and LATE in run_status:
        return f"{script}: {run_status}"
    some_trained = any(earlier_run.steps and status(earlier_run) == OK for earlier_run in earlier)
    if run_status.startswith(NO_STEP) and run.case != BASE and some_trained:
        return ""
    if run_status.startswith((NO_TRAINING, NO_STEP)) and not run.steps:
        measured = (earlier_run.measured for earlier_run in earlier)
        kind = next((m.kind for m in measured if m), UNKNOWN_KIND)
        if kind.name == FRAMEWORK and run.measured and run.measured.opt_level is None:
            return (
                f"{script} trains by {FRAMEWORKS[kind.framework].title}, and the sweep could not "
                "put ampatch into it: the script does not make it in one place. Write these lines "
                "into it; opt level and dtype come from the sweep in each trial:\n"
                f"{kind.setup_lines(())}"
            )
        return f"{script}: {run_status} ({run.trial.label}).{_hint(run, kind)}"
    goes_on = run_status == OK or run_status.startswith(DIVERGED) or lacks_memory(run_status)
    if run.case != BASE or goes_on:
        return ""
    remedy = " Give it more time: --resume --timeout SECONDS." if run.ended_by else ""
    if run.exit_code == WRONG_ARGUMENTS and not run.steps:
        remedy = " Arguments of the script stand after --: ampatch sweep SCRIPT -- ARGUMENTS."
    steps = f"after {pluralize(run.steps, 'step')}" if run.steps else "before its first step"
    return (
        f"{script}: {run_status} at {run.trial.label}, {steps}. The other rows are compared with "
        f"O0, so none of them is run.{remedy}\n{last_lines(log)}"
    )


def _hint(run: Run, kind: Kind) -> str:
    """Why a run of a script of this kind may have taken no step; "" if that is clear."""
    if run.measured is None or run.measured.properties.get("enabled") == "False":
        return ""
    is_unknown = run.measured.opt_level is None and not (run.case == BASE or kind.lacks_initialize)
    return f" {kind.needs}.{_HOW_TO_FIND_OUT}" if is_unknown else _RESUME_HINT


def lacks_memory(message: str) -> bool:
    """Whether an error message is about too little memory, of a device or of the machine."""
    return any(word in message for word in _WITHOUT_ENOUGH_MEMORY)


def failure_text(run: Run, log: Path) -> str:
    """How a run failed, and the end of its output.  An error in the output is not repeated."""
    run_status, output = status(run), last_lines(log)
    is_stepless = run_status.startswith(NO_STEP)
    hint = f" The script may catch its errors.{_RESUME_HINT}" if is_stepless else ""
    if not output:
        return f"{run.trial.label} {run_status}.{hint} It printed nothing."
    if run_status.partition(": ")[2] in output:
        run_status = status_name(run_status)
    return f"{run.trial.label} {run_status}.{hint} Its last lines:\n{output}"


def last_lines(log: Path) -> str:
    """The end of a run's output, and the path of the whole output; "" if it printed nothing."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = "\n".join(f"  {line}" for line in text.splitlines()[-LAST_LINES:] if line.strip())
    return lines and f"{lines}\nAll of its output: {log}"
