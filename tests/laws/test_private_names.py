"""A private name of torch stands where the law says, and its loss breaks nothing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import private_names
import pytest
from private_names import ALLOWED, ROOT, is_home, own_names, tree_of

FILES = sorted(ROOT.rglob("*.py"))


@pytest.fixture(scope="module")
def torchs():
    return private_names.attributes_of_torch()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_torch_stand_in_one_place(path, torchs):
    found = set(private_names.private_names(tree_of(path), own_names(), torchs))
    assert is_home(path) or found - ALLOWED.keys() == set()


def test_every_exception_is_used(torchs):
    used = {
        name
        for path in FILES
        for name in private_names.private_names(tree_of(path), own_names(), torchs)
    }
    assert ALLOWED.keys() <= used


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import functions",
        "from torch.jit import _builtins",
        "import torch._dynamo",
        "torch._C",
        'getattr(torch, "_foreach_add")',
        'register("torch._dynamo.eval_frame")',
        "optimizer._optimizer_step_pre_hooks",
        "module._apply(fn)",  # we have a function of that name
        "self._flat_weights",  # in a method that torch will call
    ],
)
def test_the_check_can_see_a_private_name(line, torchs):
    assert list(private_names.private_names(ast.parse(line), own_names(), torchs))


@pytest.mark.parametrize("line", ["self._policy", "other._policy", "__all__", '"_ampatch_seat"'])
def test_names_of_our_own_are_not_torchs(line, torchs):
    assert not list(private_names.private_names(ast.parse(line), own_names(), torchs))


def _losable() -> list[str]:
    """All that stands in the homes, but for what only looks like a name of torch."""
    own = own_names()
    found = {
        name
        for path in FILES
        if is_home(path)
        for name in private_names.private_names(tree_of(path), own, frozenset())
    }
    return sorted(found - ALLOWED.keys())


@pytest.fixture(scope="module")
def train_without():
    """`train_without(name)`: training in a process whose torch lacks the name."""
    helpers = Path(private_names.__file__).parent
    paths = [str(ROOT.parent), str(helpers), os.environ.get("PYTHONPATH", "")]
    server = subprocess.Popen(
        [sys.executable, "-W", "error", str(helpers / "train_without.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )

    def ask(name: str) -> dict:
        server.stdin.write(f"{name}\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield ask
    server.stdin.close()
    server.stdout.close()
    server.wait(timeout=60)


@pytest.fixture(scope="module")
def unbroken(train_without):
    found = {how: train_without(how) for how in ("", "plain ")}
    assert all("error" not in one for one in found.values()), found
    return found


@pytest.mark.parametrize("name", _losable())
def test_the_loss_of_a_private_name_breaks_no_training(name, train_without, unbroken):
    # torch's recurrent layers call their kernels by this name: without it they have another way.
    how = "plain " if name == "_VF" else ""
    found = train_without(f"{how}{name}")
    assert "error" not in found, found["error"]
    assert found == unbroken[how]
