"""What the sweep tells a child beside the script and its environment."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """Written by `runner.py` on the child's command line, read by `child.py`."""

    seed: int = 0
    steps: int | None = None  # to end the script after
    tf32: bool = False
    autocast: str = ""  # the half type of the peer's row
    auto: bool = False  # the script has no AMP code
    mark_output: bool = False
    guard: int | None = None  # a pipe that closes when the sweep has ended

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Order:
        return cls(**json.loads(text))
