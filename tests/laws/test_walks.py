"""The two walks in docs/design.md name every file of ampatch that a training step enters."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from repository import DOCS
from torch import nn

import ampatch
from ampatch import native

PACKAGE = Path(ampatch.__file__).parent
DESIGN = (DOCS / "design.md").read_text(encoding="utf-8")
STEPS = re.compile(r"^(\d+)\. `([\w/]+\.py)`", re.MULTILINE)
FILES = re.compile(r"`([\w/]+\.py)`")


def section(title: str) -> str:
    """The text under a heading of the page."""
    return DESIGN.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def entered(call: Callable[[], object]) -> set[str]:
    """The files of ampatch that `call` enters, relative to the package."""
    found: set[str] = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            found.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


class Training:
    """A model in training with a dynamic loss scale, two steps behind it."""

    def __init__(self, opt_level: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        ampatch.initialize(self.model, self.optimizer, opt_level=opt_level, verbosity=0)
        self.inputs = torch.randn(4, 8)
        for _ in range(2):
            self.forward()
            self.block_and_step()
            self.optimizer.zero_grad()
        self.forward()

    def forward(self) -> None:
        self.loss = self.model(self.inputs).float().pow(2).mean()

    def block_and_step(self) -> None:
        with ampatch.scale_loss(self.loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()


def walk_of_a_block() -> set[str]:
    """From the public `scale_loss` to the optimizer's own step, at O2."""
    return entered(Training("O2").block_and_step)


def walk_of_a_weight() -> set[str]:
    """From the model's forward to the half copies of its weights and their gradients, at O1."""
    training = Training("O1")
    return entered(lambda: (training.forward(), training.loss.backward()))


def walk_of_a_lent_weight() -> set[str]:
    """The same at O2."""
    training = Training("O2")
    return entered(lambda: (training.forward(), training.loss.backward()))


WALKS = {
    "The walk of a block": (walk_of_a_block, 7),
    "The walk of a weight": (walk_of_a_weight, 7),
    "The walk of a lent weight": (walk_of_a_lent_weight, 4),
}


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_names_every_file_that_is_entered(title):
    walk, longest = WALKS[title]
    text = section(title)
    numbers, files = zip(*STEPS.findall(text), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(files) + 1))
    assert len(set(files)) == len(files) <= longest

    found = walk()
    ampatch.deactivate()

    named = set(FILES.findall(text))
    assert found <= named
    if native.part is None:  # it does in C++ what some of the files say in Python
        assert found == named and set(files) <= named
