"""What the sweep passes to a child process, besides the script and the environment."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class ChildOptions:
    """Written on the child's command line by `runner.py`, read by `child.py`."""

    seed: int = 0
    override_seeds: bool = False  # the script's own seeds become those of the trial
    steps: int | None = None  # end the script after so many optimizer steps
    tf32: bool = False
    autocast: str = ""  # the half type of the autocast baseline; "" for other trials
    kind: str = ""  # of the script; "": not recognized yet
    framework: str = ""  # that runs its training loop
    as_it_is: bool = False  # the script's own mixed precision stays
    module: bool = False  # the script is the name of a module
    mark_output: bool = False
    guard: int | None = None  # a pipe that closes when the sweep has ended
    ranked: bool = False  # started by torchrun, as one of several ranks

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ChildOptions:
        return cls(**json.loads(text))
