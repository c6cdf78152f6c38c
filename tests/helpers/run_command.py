"""`ampatch run` in a process of its own, for the tests of it."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

from warm_python import environment, python


def ampatch_run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """`python -m ampatch run ARGUMENTS` in `folder`."""
    return python("-m", "ampatch", "run", *arguments, cwd=folder, env=environment(**variables))


def write(path: Path, text: str) -> Path:
    """A file with dedented text, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
