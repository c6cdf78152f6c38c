"""The exit codes of the commands, as `--help` says them."""

from __future__ import annotations

OF_ALL = "2 for a wrong command line; 130 after Ctrl-C; 141 where the reader of its output ended"
_ON_SIGTERM = "143 after SIGTERM"

OF_SCRIPTS = "0; the script's own if it failed; 1 if it never stepped an optimizer"

OWN = {
    "sweep": f"0; 1 where no run went well or the sweep could not go on; {_ON_SIGTERM}",
    "tune": f"0; 1 where nothing brings the level back, or that cannot be told; {_ON_SIGTERM}",
    "report": "0; 1 where something cannot be written",
    "run": "the script's own; 1 if an exception or --debug ends it",
    "tables": "0; 1 where no row names NAME, or --check finds a function out of reach; 2 also for "
    "a MODULE that cannot be imported",
    "gradients": OF_SCRIPTS,
    "explain": OF_SCRIPTS,
    "doctor": "0; 1 where torch cannot be imported",
    "build": "0 where there is a build that loads, or after --clean; 1 where it cannot be made or "
    "does not load",
}
"""By the name of the command."""


def exit_status(command: str) -> str:
    """The sentence for the help of a command."""
    return f"Exit status: {OWN.get(command, '0; 1 if it fails')}; {OF_ALL}."
