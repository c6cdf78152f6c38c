"""The state of the machine during a sweep, from the records of its runs, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampatch.sweep.measure.record import Run


def machine_state(runs: Sequence[Run]) -> dict[str, str]:
    """Native part, threads, load and frequency scaling, by name; empty before the first run."""
    states = [run.measured.machine for run in runs if run.measured and run.measured.machine]
    if not states:
        return {}
    loads = _every(states, "load_at_start", "load_at_end")
    threads, cores = _every(states, "threads"), _every(states, "cores")
    return {
        **_native(states),
        "threads": f"{_range(threads)} on {_range(cores)} cores",
        "load average": f"{_range(loads)} over a minute, the sweep's own runs included",
        "frequency scaling": _frequency(states),
    }


def _native(states: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Whether the trials had it; on machines of a cluster this may differ."""
    found = set(_every(states, "native"))
    if not found:  # a sweep of an older ampatch
        return {}
    if len(found) > 1:
        said = "in some runs: compare no speed of theirs with one of the others"
    else:
        said = "in force" if found.pop() else "not in force"
    return {"native part": said}


def _frequency(states: Sequence[dict[str, Any]]) -> str:
    governors = sorted(set(_every(states, "governor")))
    parts = [", ".join(governors)] if governors else []
    if _every(states, "boost") or _every(states, "no_turbo"):
        on = "1" in _every(states, "boost") or "0" in _every(states, "no_turbo")
        parts.append(f"turbo {'on' if on else 'off'}")
    megahertz = [int(khz) // 1000 for khz in _every(states, "frequency_khz")]
    if megahertz:
        parts.append(f"{_range(megahertz)} MHz at the start of runs")
    return "; ".join(parts) or "not told by the system"


def _every(states: Sequence[dict[str, Any]], *names: str) -> list[Any]:
    return [state[name] for state in states for name in names if state.get(name) is not None]


def _range(values: Sequence[Any]) -> str:
    if not values:
        return "unknown"
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
