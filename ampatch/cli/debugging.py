"""`ampatch run --debug`: runs the script under the debugger, and prints its findings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ampatch.sweep.report.numbers import pluralize

if TYPE_CHECKING:
    from ampatch.diagnose.nonfinite import Debugger
    from ampatch.types import StopAt

MAX_SHOWN = 10  # overflows to list


def run_debugged(execute: Callable[[], int], stop_at: StopAt) -> int:
    """Call `execute()` with every model watched; print the findings on the standard error.

    `execute` runs the script and returns its exit code.  The first inf or NaN that counts ends the
    script, with exit code 1.
    """
    from ampatch.diagnose.nonfinite import Debugger
    from ampatch.diagnose.run_steps import EndAtFinding

    with Debugger(None, stop_at, is_logged=False) as debugger:
        end = EndAtFinding(debugger)
        code = execute()
        end.remove()
    for line in _lines(debugger):
        print(line, file=sys.stderr)
    return code if debugger.report is None else code or 1


def _lines(debugger: Debugger) -> Iterator[str]:
    passed_over, unseen = debugger.passed_over, debugger.unseen_skips
    if passed_over:
        yield (
            f"ampatch: passed over overflows in {pluralize(len(passed_over), 'step')}, because a "
            "smaller loss scale cures them (--stop-at any stops there)."
        )
        yield from (f"  {report.in_short()}" for report in passed_over[:MAX_SHOWN])
        if len(passed_over) > MAX_SHOWN:
            yield f"  ... and {len(passed_over) - MAX_SHOWN} more"
    if unseen:
        yield (
            f"ampatch: skipped {pluralize(unseen, 'step')} because of an inf or NaN that no "
            "backward pass made: look at what the script writes to .grad."
        )
    if debugger.report is not None:
        yield f"ampatch: {debugger.report}"
        return
    if not debugger.step:
        yield "ampatch: no inf or NaN: no optimizer stepped."
        return
    yield (
        f"ampatch: {'no other' if passed_over or unseen else 'no'} inf or NaN in {debugger.step} "
        "optimizer steps. If training still fails, gradients may be too small for "
        "float16: ampatch gradients SCRIPT shows how many float16 loses."
    )
