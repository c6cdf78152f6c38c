"""The command `ampatch build`."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "build",
        help="compile the native part, which makes small steps faster",
        description="Compiles ampatch's native part, one C++ file, for this torch and this Python. "
        "It needs a C++ compiler and about half a minute. `ampatch run` and `ampatch sweep` do it "
        "before the script starts. From then on `import ampatch` uses it. Results stay the same to "
        "the bit. The file goes to AMPATCH_CACHE, XDG_CACHE_HOME or ~/.cache. AMPATCH_NATIVE=0 "
        "switches it off.",
    )
    parser.add_argument("--verbose", action="store_true", help="show the compiler's output")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--force", action="store_true", help="build again, even if there is a build")
    group.add_argument(
        "--clean",
        action="store_true",
        help="remove all builds, also those for other versions, and build nothing",
    )


def run(options: argparse.Namespace) -> int:
    import torch

    from ampatch.cli.native_first import progress_lines
    from ampatch.errors import AmpatchError
    from ampatch.native import building, loading

    if options.clean:
        print(f"Removed from {loading.cache()}: {building.clean()} builds.")
        return 0
    path = loading.built_file()
    if path.is_file() and not options.force:
        print(f"There is a build already: {path} (--force builds again)")
        return _say_status()
    versions = f"torch {torch.__version__} and Python {platform.python_version()}"
    print(f"Compiling for {versions}: about half a minute.", flush=True)
    start = time.monotonic()
    try:
        with progress_lines():
            path = building.build(verbose=options.verbose)
    except AmpatchError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Built in {time.monotonic() - start:.0f} s: {path}")
    return _say_status()


def _say_status() -> int:
    """Print whether a new Python process uses the build.  Returns 1 if it cannot."""
    from ampatch.native import loading

    status = loading.find()[1]
    print(f"Native part: {status.reason}")
    return 1 if status.is_fault else 0
