"""How far a reader follows a training step: the walks in docs/design.md, and counts of a way."""

import json
import re
from pathlib import Path

import pytest
import torch
from frames import entered
from repository import BENCHMARKS, DOCS
from small_training import data, pass_back, start, train
from torch import nn
from warm_python import environment, python

import ampatch
from ampatch import native

# The walks name every file of ampatch that a training step enters


PACKAGE = Path(ampatch.__file__).parent
DESIGN = (DOCS / "design.md").read_text(encoding="utf-8")
STEPS = re.compile(r"^(\d+)\. `([\w/]+\.py)`", re.MULTILINE)
FILES = re.compile(r"`([\w/]+\.py)`")


def section(title: str) -> str:
    return DESIGN.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def begun(level: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A model and its optimizer with a dynamic loss scale, two steps behind them, and a loss."""
    model, optimizer = start(level)
    for _ in range(2):
        train(model, optimizer)
    optimizer.zero_grad()
    return model, optimizer, model(data()[0]).float().pow(2).mean()


def block_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """From the public `scale_loss` to the optimizer's own step."""
    pass_back(loss, optimizer)
    optimizer.step()


def forward_and_backward(model: nn.Module, *_: object) -> None:
    """From the model's forward to the half copies of its weights and their gradients."""
    model(data()[0]).float().pow(2).mean().backward()


WALKS = {
    "The walk of a block": (block_and_step, "O2", 7),
    "The walk of a weight": (forward_and_backward, "O1", 7),
    "The walk of an O2 forward": (forward_and_backward, "O2", 7),
}
"""What is walked, at which level, and in how many steps at most."""


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_names_every_file_that_is_entered(title):
    walk, level, longest = WALKS[title]
    text = section(title)
    numbers, files = zip(*STEPS.findall(text), strict=True)
    assert list(map(int, numbers)) == list(range(1, len(files) + 1))
    assert len(set(files)) == len(files) <= longest

    paths = {Path(code.co_filename) for code in entered(walk, *begun(level))}
    results = {path.relative_to(PACKAGE).as_posix() for path in paths if PACKAGE in path.parents}
    ampatch.deactivate()

    named = set(FILES.findall(text))
    assert results <= named
    if native.part is None:  # it does in C++ what some of the files say in Python
        assert results == named and set(files) <= named


# Of one call of a Linear, and one step: functions, files, changes of file.
#
# `benchmarks/run.py way` prints them.  Where the way becomes shorter, lower the numbers


MOST = {
    "O1 forward": (33, 8, 19),
    "O1 step": (124, 26, 72),
    "O2 forward": (44, 10, 26),
    "O2 step with an overflow": (130, 29, 81),
}
COUNT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import way
print(json.dumps(way.ways()))
"""


@pytest.fixture(scope="module")
def ways():
    env = environment(AMPATCH_NATIVE="0")
    done = python("-c", COUNT, str(BENCHMARKS), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MOST)
def test_the_way_is_no_longer_than_this(ways, name):
    results = tuple(ways[name])
    assert all(first <= most for first, most in zip(results, MOST[name], strict=True)), results
