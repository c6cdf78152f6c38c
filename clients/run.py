"""Run the tests with real clients, each in a fresh environment of its own.

    python clients/run.py                # all of them
    python clients/run.py timm ignite    # some

Makes a virtual environment (in a temporary folder, or under --envs DIR, where it is kept and
found again), installs what clients/requirements/NAME.txt pins and ampatch from this checkout,
and runs clients/test_NAME.py there. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))
PIP = "pip==24.0"  # the last minor version that reads the metadata of catalyst 21.12


def environment(folder: Path, name: str) -> Path:
    """The Python of a virtual environment in `folder` with the client's pins and ampatch."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, PIP], check=True)
    subprocess.run([*pip, "-r", str(HERE / "requirements" / f"{name}.txt")], check=True)
    subprocess.run([*pip, "--no-deps", "--force-reinstall", str(HERE.parent)], check=True)
    return python


def run(folder: Path, name: str) -> str:
    """Install and test one client; "passed", or what failed."""
    try:
        python = environment(folder, name)
    except subprocess.CalledProcessError as error:
        return f"not installed: exit status {error.returncode}"
    command = [str(python), "-m", "pytest", "-q", f"test_{name}.py"]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    status = subprocess.run(command, check=False, cwd=HERE, env=variables).returncode
    return f"FAILED: exit status {status}" if status else "passed"


def main(arguments: list[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="clients/run.py",
        description="The tests with real clients, each in an environment of its own.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--envs", type=Path, metavar="DIR", help="keep the environments in DIR")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    results = {}
    for name in given.names or NAMES:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            result = run(given.envs / name if given.envs else Path(scratch), name)
        results[name] = f"{result} ({time.monotonic() - start:.0f} s)"
    for name, result in results.items():
        print(f"{name:12}  {result}")
    return int(any(not result.startswith("passed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
