"""Reasons to end a sweep after few runs, because the others would go the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ampatch.sweep.kinds import FRAMEWORK, FRAMEWORKS, LATE, UNKNOWN
from ampatch.sweep.measure.record import Measured, Run
from ampatch.sweep.report.figures import brief, status
from ampatch.sweep.trial import BASE

LAST_LINES = 12  # of the output, shown with a crash
_WITHOUT_ENOUGH_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate")
_OWN_DIRECTORY = (
    " Give it the trial's own directory, by {trial_dir} among its arguments (-- --checkpoints "
    "{trial_dir}) or by the variable AMPATCH_TRIAL_DIR; it is empty when a trial begins."
)
_MAY_RESUME = (
    " It may go on from a file that was there before, such as a checkpoint." + _OWN_DIRECTORY
)
_UNKNOWN = (
    " What kind of script it is shows in a run at O0: add O0 to --levels. If an option of the "
    "script switches AMP on, give it behind --."
)


def reason_to_stop(script: str, earlier: Sequence[Run], run: Run, log: Path) -> str:
    """Why no other trial should run after `run`, or "" if the next may go better.

    `earlier` are the runs before it, `log` is the file of its output.
    """
    said = status(run)
    if run.case == BASE and LATE in said:
        return f"{script}: {said}"
    if steps_of(run) or run.ended_by:
        return ""
    if said.startswith("no training"):
        why = _no_integration(script, earlier, run) or _resumed(script, earlier, run)
        return why or f"{script}: {said} ({run.trial.label}).{_hint(run)}"
    if run.case == BASE and not any(map(steps_of, earlier)) and not lacks_memory(said):
        when = "in" if run.measured is None else "before its first step in"
        return f"{script}: {said}, {when} {run.trial.label}.\n{last_lines(log)}"
    return ""


def steps_of(run: Run) -> int:
    """How many optimizer steps a run took."""
    return len(run.measured.skipped) if run.measured else 0


def _no_integration(script: str, earlier: Sequence[Run], run: Run) -> str:
    """The reason, if ampatch's integration has not come into the framework that trains."""
    kind = next((one.measured.kind for one in earlier if one.measured), UNKNOWN)
    if kind.name != FRAMEWORK or run.measured is None or run.measured.opt_level is not None:
        return ""
    return (
        f"{script} trains by {FRAMEWORKS[kind.framework].shown}, and the sweep could not put "
        "ampatch into it: the script does not make it in one place. Write these lines into it; opt "
        f"level and dtype come from the sweep in each trial:\n{kind.line(())}"
    )


def _resumed(script: str, earlier: Sequence[Run], run: Run) -> str:
    """The reason, if the script trained in an earlier trial and called `initialize` in this."""
    trained = next((one for one in earlier if steps_of(one)), None)
    if trained is None or run.measured is None or _went_without(trained, run.measured):
        return ""
    return (
        f"{script} took no step in {run.trial.label}, though it took {steps_of(trained)} in "
        f"{trained.trial.label}: it seems to go on from a file that an earlier trial wrote, such "
        f"as a checkpoint.{_OWN_DIRECTORY}"
    )


def _went_without(trained: Run, measured: Measured) -> bool:
    """Whether `initialize` is missing, which the script called in another trial."""
    return measured.opt_level is None and not (trained.measured or measured).kind.is_foreign


def _hint(run: Run) -> str:
    if run.measured is None or run.measured.properties.get("enabled") == "False":
        return ""
    return _UNKNOWN if run.measured.opt_level is None and run.case != BASE else _MAY_RESUME


def lacks_memory(said: str) -> bool:
    """Whether an error, in words, is that of too little memory: of a device, or of the machine."""
    return any(word in said for word in _WITHOUT_ENOUGH_MEMORY)


def failure(run: Run, log: Path) -> str:
    """How a run failed, and the end of its output, which has an exception's message already."""
    said, shown = status(run), last_lines(log)
    if not shown:
        return f"{run.trial.label} {said}. It printed nothing."
    if said.partition(": ")[2] in shown:
        said = brief(said)
    return f"{run.trial.label} {said}. Its last lines:\n{shown}"


def last_lines(log: Path) -> str:
    """The end of a run's output, and where all of it is; "" if it printed nothing."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    shown = "\n".join(f"  {line}" for line in text.splitlines()[-LAST_LINES:] if line.strip())
    return shown and f"{shown}\nAll of its output: {log}"
