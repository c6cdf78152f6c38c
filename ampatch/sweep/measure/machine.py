"""Provenance of figures: software, machine, command line, the script's repository."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ampatch import native
from ampatch._version import __version__
from ampatch.device_figures import toolkit_versions
from ampatch.sweep.measure.run_record import Run

_CPUINFO = Path("/proc/cpuinfo")
_GIT_TIMEOUT = 20  # seconds
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


def versions() -> dict[str, str]:
    """Software and machine, without GPUs, because a query would occupy one; the runs name them."""
    present = {
        "ampatch": __version__,
        "torch": torch.__version__,
        **toolkit_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
    }
    return {name: value for name, value in present.items() if value}


def machine_conditions() -> dict[str, Any]:
    """What the times of a run depend on: native part, load, threads; and when it began."""
    has_affinity = hasattr(os, "sched_getaffinity")  # the cores that this process may run on
    return {
        "began": time.time(),  # seconds
        "native": native.status().active,
        **load_average("load_at_start"),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
    }


def load_average(name: str) -> dict[str, float]:
    """The load average over a minute under this name; empty if there is none (Windows)."""
    return {name: round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}


def _cpu() -> str:
    """The name of the CPU, or its architecture if the name is unknown."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def provenance(script: Path) -> dict[str, str]:
    """The command of this process and the commit of the script."""
    return {"command": command_line(sys.orig_argv), "git": commit_of(script)}


def resumed_provenance(script: Path, earlier: dict[str, str]) -> dict[str, str]:
    """The provenance of a resumed sweep: the earlier one, with differences as `NAME, resumed`."""
    now = provenance(script)
    new = {f"{name}, resumed": now[name] for name in now if earlier.get(name) != now[name]}
    return {**earlier, **new}


def devices(runs: Iterable[Run]) -> dict[str, str]:
    """The devices of the runs; empty before the first run."""
    names = dict.fromkeys(run.measured.device for run in runs if run.measured)
    text = ", ".join(filter(None, names))
    return {"device": text} if text else {}


def command_line(words: Sequence[str]) -> str:
    """The command as one would type it, without the folders of programs."""
    program, *rest = words
    if rest and Path(rest[0]).name == "ampatch":  # an installed command: python path/ampatch
        program, *rest = rest
    return shlex.join([Path(program).name, *rest])


def commit_of(script: Path) -> str:
    """The commit of the script's repository, with `-dirty` if files differ from the commit."""
    folder = script.resolve().parent
    commit = _git(folder, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
    if commit is None:
        return "no commit: the script is in no git repository, or git cannot read it"
    if _git(folder, "ls-files", "--error-unmatch", "--", script.name) is None:
        return f"{commit}, without {script.name}, which is in no commit"
    return commit


def _git(folder: Path, *words: str) -> str | None:
    """The output of git; None if git fails or is missing."""
    environment = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), *words],
            env=environment, capture_output=True, text=True, timeout=_GIT_TIMEOUT, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
