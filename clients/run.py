"""Run the tests with real clients, each in a fresh environment of its own.

    python clients/run.py                # all of them
    python clients/run.py timm ignite    # some
    python clients/run.py --newest       # frameworks of today, in their newest versions

Makes a virtual environment (in a temporary folder, or under --envs DIR, where it is kept and
found again), installs what clients/requirements/NAME.txt pins and ampatch from this checkout, and
runs there clients/test_NAME.py, if there is one, and the tests of tests/integrations for the
frameworks that `INTEGRATED` names. Exits with 1 if anything failed.
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
TESTS = HERE.parent / "tests" / "integrations"
NAMES = sorted(path.stem for path in (HERE / "requirements").glob("*.txt") if path.stem != "base")
INTEGRATED = {
    "accelerate": ("accelerate",),
    "ignite": ("ignite",),
    "lightning2": ("lightning", "fabric"),
    "timm": ("timm",),
    "transformers5": ("transformers",),
}
"""The frameworks of ampatch/integrations that a client's environment has."""

PIP = "pip==24.0"  # the last minor version that reads the metadata of catalyst 21.12
BROUGHT_ALONG = "# what these bring along"


def environment(folder: Path, name: str, newest: bool) -> Path:
    """The Python of a virtual environment in `folder` with the client's packages and ampatch."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, PIP], check=True)
    pinned = HERE / "requirements" / f"{name}.txt"
    wanted = [*named("base"), *map(unpinned, named(name))] if newest else ["-r", str(pinned)]
    subprocess.run([*pip, *wanted], check=True)
    subprocess.run([*pip, "--no-deps", "--force-reinstall", str(HERE.parent)], check=True)
    return python


def named(requirements: str) -> list[str]:
    """What a file asks for by itself, without what that brings along."""
    text = (HERE / "requirements" / f"{requirements}.txt").read_text(encoding="utf-8")
    lines = text.partition(BROUGHT_ALONG)[0].splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


def unpinned(requirement: str) -> str:
    """The name of the package."""
    return requirement.partition("==")[0]


def commands(name: str) -> list[list[str]]:
    """The arguments of each run of pytest for a client."""
    found = []
    if (HERE / f"test_{name}.py").exists():
        found.append([f"test_{name}.py"])
    if frameworks := INTEGRATED.get(name):
        files = [path for one in frameworks for path in sorted(TESTS.glob(f"test_{one}*.py"))]
        settings = ["-c", "../setup.cfg", "-W", "default", "-m", "not gpu and not accelerator"]
        law = [str(TESTS / "test_law_of_frameworks.py"), "-k", " or ".join(frameworks)]
        found.append([*settings, "-p", "no:cacheprovider", *map(str, files), *law])
    return found


def run(folder: Path, name: str, newest: bool) -> str:
    """Install and test one client; "passed", or what failed."""
    try:
        python = environment(folder, name, newest)
    except subprocess.CalledProcessError as error:
        return f"not installed: exit status {error.returncode}"
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for arguments in commands(name):
        command = [str(python), "-m", "pytest", "-q", *arguments]
        status = subprocess.run(command, check=False, cwd=HERE, env=variables).returncode
        if status:
            return f"FAILED: exit status {status}"
    return f"passed with {versions(python, name)}"


def versions(python: Path, name: str) -> str:
    """The versions of the client's own packages in its environment."""
    code = "import sys; from importlib.metadata import version\n"
    code += "print(*(f'{name} {version(name)}' for name in sys.argv[1:]), sep=', ')"
    command = [str(python), "-c", code, *map(unpinned, named(name))]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="clients/run.py",
        description="The tests with real clients, each in an environment of its own.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--envs", type=Path, metavar="DIR", help="keep the environments in DIR")
    parser.add_argument(
        "--newest",
        action="store_true",
        help=f"newest versions, but for torch and pytest; of {', '.join(INTEGRATED)}",
    )
    given = parser.parse_args(arguments)
    known = [*INTEGRATED] if given.newest else NAMES
    if unknown := set(given.names) - set(known):
        what = "no client with a newest version" if given.newest else "no such client"
        parser.error(f"{what}: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = {}
    for name in given.names or known:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            kept = f"{name}-newest" if given.newest else name
            folder = given.envs / kept if given.envs else Path(scratch)
            result = run(folder, name, given.newest)
        results[name] = f"{result} ({time.monotonic() - start:.0f} s)"
    for name, result in results.items():
        print(f"{name:13}  {result}")
    return int(any(not result.startswith("passed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
