"""What starting costs: `import ampatch` beyond `import torch`, and `initialize` of 160 parameters.

    python benchmarks/startup.py [--rounds 15] [--out FILE.md]

Milliseconds of CPU time, one thread.  Every figure comes from fresh processes, in turns: the median
and the quartiles over the rounds, after one round that writes the bytecode.  `initialize` is the
first of its process, so that the patching of torch counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from systems import environment, with_native
from workers import machine, table

IMPORT = """
import time, torch
begin = time.process_time()
import ampatch
print(time.process_time() - begin)
"""
INITIALIZE = """
import time, torch, ampatch
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(80)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
begin = time.process_time()
ampatch.initialize(model, optimizer, opt_level="{level}", dtype=torch.bfloat16, verbosity=0)
print(time.process_time() - begin)
"""
IMPORTS = "`import ampatch`"


def programs() -> dict[str, tuple[str, dict[str, str]]]:
    """For each row what is run, and with which variables."""
    found = {}
    for system in with_native(["O1", "O2"]):
        level, _, native = system.partition(" ")
        found[f"{IMPORTS} {native}".strip()] = (IMPORT, environment(system))
        found[f"`initialize`, {system}"] = (INITIALIZE.format(level=level), environment(system))
    return found


def milliseconds(program: str, variables: dict[str, str]) -> float:
    """What a program prints, which runs in a process of its own."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout) * 1e3


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in programs()}
    for _ in range(1 + options.rounds):
        for name, program in programs().items():
            times[name].append(milliseconds(*program))
    rows = []
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values[1:], n=4)
        rows.append([name, f"{middle:.1f} ({low:.1f} to {high:.1f})"])
    text = (
        f"# What starting costs\n\nMilliseconds of CPU time, one thread, fresh processes: median "
        f"and quartiles of {options.rounds} rounds. `initialize` has 160 parameters.\n{machine()}."
        f"\n\n{table(['', 'ms'], rows)}"
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
