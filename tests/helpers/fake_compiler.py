"""A C++ compiler for tests, which compiles nothing: what it links is a library that there is."""

from pathlib import Path

SCRIPT = """#!/bin/sh
case "$*" in
    *--version* | *-v) echo "c++ (GCC) 12.2.0, Free Software Foundation"; exit ;;
    *-dumpfullversion* | *-dumpversion*) echo 12.2.0; exit ;;
    *"-c "*) echo "$*" >> "{log}" ;;
esac
while [ "$1" != -o ]; do shift; done
cp "{library}" "$2"
"""


class FakeCompiler:
    """`path` is the program, for `CXX`; `calls` the number of sources it was given."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._log = folder / "compiled"
        self.path = folder / "c++"
        self.path.write_text(SCRIPT.format(log=self._log, library=library))
        self.path.chmod(0o755)

    @property
    def calls(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0
