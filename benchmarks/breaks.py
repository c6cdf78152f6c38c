"""One-line breaks of the source: does a test notice each of them?

    python benchmarks/breaks.py [--only TEXT] [--out FILE.md]

Each break is made by itself in a copy of the checkout, and the tests named beside it run there in
Python, without the native part.  A break that no test notices is a claim that no test guards.  A
break whose line the source no longer has is an error: give it the line that does the same now.

`breaks.txt` has a block for each, with an empty line between two: the file in `ampatch/`, then
after "| " the old text, the new one, and the tests (files in `tests/`) that are to notice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Break(NamedTuple):
    """The first `old` in `file` becomes `new`; `tests` are to notice."""

    file: str
    old: str
    new: str
    tests: str


def _breaks() -> list[Break]:
    text = Path(__file__).with_suffix(".txt").read_text()
    rows = (row.split("\n|") for row in text.strip().split("\n\n"))
    return [Break(file, old[1:], new[1:], tests.strip()) for file, old, new, tests in rows]


def noticed(broken: Break) -> tuple[str, float]:
    """Which test noticed, "nothing" where none did; and the seconds that it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        ignored = shutil.ignore_patterns(".git", "results", "images", "__pycache__", "*.so")
        shutil.copytree(ROOT, copy, ignore=ignored)
        path = copy / "ampatch" / broken.file
        text = path.read_text()
        if broken.old not in text:
            return "NO SUCH LINE", 0.0
        path.write_text(text.replace(broken.old, broken.new, 1))
        tests = [f"tests/{name}" for name in broken.tests.split()]
        if gone := [name for name in tests if not (copy / name).exists()]:
            return f"NO SUCH TEST {' '.join(gone)}", 0.0
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        if Path(broken.file).suffix == ".h":  # to be compiled, which the default tests do not
            command += ["-m", "not accelerator"]
        variables = {**os.environ, "PYTHONPATH": str(copy), "AMPATCH_NATIVE": "0"}
        done = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    name = lines[0].split(" - ")[0].partition(" ")[2] if lines else "at its import"
    return (name if done.returncode else "nothing"), time.monotonic() - start


def main() -> int:
    """Prints a row for each break; 1 if one was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="breaks of files with TEXT")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    rows, missed = ["| file | line | noticed by |", "|---|---|---|"], 0
    for broken in _breaks():
        if options.only not in broken.file:
            continue
        by, seconds = noticed(broken)
        missed += by == "nothing" or by.startswith("NO SUCH")
        line = broken.old.strip().splitlines()[0].replace("|", "\\|")
        rows.append(f"| {broken.file} | `{line}` | {by} |")
        print(f"{rows[-1]} {seconds:.0f} s", flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(rows) + "\n")
    print(f"{len(rows) - 2} breaks, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
