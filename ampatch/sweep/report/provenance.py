"""The provenance of the figures of a report.

`summary.json` has these facts, and every other file repeats them, so that a table or a picture in a
paper can be traced.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampatch.sweep.measure.run_record import Run
from ampatch.sweep.report.results import Results


def facts(results: Results) -> dict[str, str]:
    """Names and values, each on one line: command, git, versions, device, threads, load."""
    values = {  # `provenance` replaces command, git and device, if it has them
        "command": script_command(results),
        "begun": results.started,
        "runs": f"{results.done} of {results.planned}",
        "git": "unknown",
        **results.versions,
        "device": "unknown",
        **results.machine,
        **results.provenance,
    }
    return {name: " ".join(str(value).split()) for name, value in values.items()}


def script_command(results: Results) -> str:
    """The script with its arguments, quoted for a shell."""
    return shlex.join([*split_script(results.script), *results.arguments])


def split_script(script: str) -> list[str]:
    """The words of `Results.script`: a path, or `-m` and the name of a module."""
    return script.split() if script.startswith("-m ") else [script]


def title(results: Results) -> str:
    """`train` of `train.py`, `package.train` of a module."""
    words = split_script(results.script)
    return words[1] if len(words) > 1 else Path(results.script).stem


def lines(results: Results) -> list[str]:
    """A line for each fact, for comments."""
    return [f"{name}: {value}" for name, value in facts(results).items()]


def machine_state(runs: Sequence[Run]) -> dict[str, str]:
    """Native part, threads and load during the runs; empty before the first run."""
    states = [run.measured.machine for run in runs if run.measured and run.measured.machine]
    if not states:
        return {}
    cores, loads = _range(states, "cores"), _range(states, "load_at_start", "load_at_end")
    state = {"threads": f"{_range(states, 'threads')} on {cores} cores", "load average": loads}
    native = {state["native"] for state in states if state.get("native") is not None}
    if native:
        state["native part"] = "active" if native == {True} else "not active"
    if len(native) > 1:
        state["native part"] = "active in some runs only: do not compare their speeds with others"
    return state


def _range(states: Sequence[dict[str, Any]], *names: str) -> str:
    values = [state[name] for state in states for name in names if state.get(name) is not None]
    if not values:
        return "unknown"
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
