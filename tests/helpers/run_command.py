"""`ampatch run` in a process of its own, for the tests of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from repository import ROOT


def environment(**variables: str) -> dict[str, str]:
    """Ours, with ampatch found from any directory and nothing of ampatch set but `variables`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("AMPATCH_")}
    return {**ours, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "160", **variables}


def ampatch_run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """`python -m ampatch run ARGUMENTS` in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "ampatch", "run", *arguments],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
    )


def write(path: Path, text: str) -> Path:
    """A file with dedented text, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
