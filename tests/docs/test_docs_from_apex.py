"""Every snippet of docs/from_apex.md runs, before and after, and trains in half."""

import argparse
import contextlib
import copy
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from apex_optimizers import as_apex_saves
from pages import snippets
from repository import DOCS
from torch import nn

import ampatch
from ampatch.compat import apex as compat

PAGE = snippets(DOCS / "from_apex.md")
INSTALL, *PAIRS, CONVERT = [part.text for part in PAGE if part.language == "python"]
PATTERNS = dict(enumerate(zip(PAIRS[::2], PAIRS[1::2], strict=True), 1))


@pytest.fixture(autouse=True)
def clean():
    yield
    with contextlib.suppress(ValueError):
        ampatch.unregister_function(torch, "einsum")  # of a pattern
    compat.uninstall()
    ampatch.deactivate()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(60, 16, 4, generator=torch.Generator().manual_seed(0))
    return [(x, x.sum(1, keepdim=True).tanh()) for x in inputs]


def train(model, optimizer, amp, criterion=nn.functional.mse_loss) -> None:
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def error_of(model: nn.Module) -> float:
    with torch.no_grad():
        return sum((model(x).float() - y).pow(2).mean().item() for x, y in batches())


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("which", ["before", "after"])
@pytest.mark.parametrize("number", PATTERNS)
def test_a_pattern_trains(number, which, tmp_path, one_process_group):
    if which == "before":
        compat.install()
    dtypes: set[torch.dtype] = set()
    net = network()
    net[0].register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    scope = {
        "torch": torch,
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5),
        "loader": batches(),
        "criterion": nn.functional.mse_loss,
        "train": train,
        "path": tmp_path / "checkpoint.pt",
    }
    before = error_of(network())
    code = PATTERNS[number][which == "after"]
    exec(compile(code, f"from_apex.md, pattern {number}, {which}", "exec"), scope)

    assert torch.float16 in dtypes
    assert error_of(scope["model"]) < 0.3 * before
    if number == 4:
        half = torch.ones(1, 2, 2).half()
        assert torch.bmm(half, half).dtype is torch.float32
        assert torch.einsum("bij,bjk->bik", half, half.float()).dtype is torch.float16


# What old scripts hit


def table_of_changes() -> dict[str, list[str]]:
    """Messages and mends by what the script says: the code spans of the table's columns."""
    text = (DOCS / "old_scripts.md").read_text()
    [table] = re.findall(r"^\| the script has \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.M)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    spans = [[re.findall(r"``(.+?)``|`(.+?)`", cell) for cell in row] for row in rows]
    firsts = [[max(cell[0], key=len) for cell in row if cell] for row in spans]
    return {script: rest for script, *rest in firsts}


CHANGES = table_of_changes()
NOT_HERE = ("librosa", "scipy.misc", "tensorboardX", "parser")
"""What this test does not run: packages that are not there, and launchers."""
LATER = {"torch.load": (2, 6), "ReduceLROnPlateau": (2, 13)}
"""Messages that older versions of torch have not."""
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
TRIED = [
    script
    for script in CHANGES
    if not any(name in script for name in NOT_HERE)
    and all(version <= TORCH for name, version in LATER.items() if name in script)
]


class Checkpointed:
    """What is in a checkpoint beside tensors."""


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def names_of_an_old_script(folder: Path) -> dict[str, Any]:
    path = folder / "checkpoint.pt"
    torch.save({"args": Checkpointed()}, path)
    x = torch.ones(3)
    return {
        "np": np,
        "torch": torch,
        "yaml": yaml,
        "Variable": torch.autograd.Variable,
        "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
        "Own": Own,
        "path": path,
        **{"x": x, "y": x, "mask": x > 0, "loss": torch.tensor(1.0), "index": torch.tensor(2)},
        **{"correct": torch.ones(4, 3, dtype=torch.bool).t(), "k": 2, "n": 2, "file": "a: 1"},
        "b": nn.Parameter(torch.ones(18)),
        "loader": torch.utils.data.DataLoader([1]),
        "optimizer": torch.optim.SGD([nn.Parameter(x)]),
    }


def said(code: str, names: dict[str, Any]) -> str:
    """The error and the warnings of a line, those too that torch gives once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(code, dict(names))
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        finally:
            torch.set_warn_always(before)
    return "\n".join([error, *(f"{told.category.__name__}: {told.message}" for told in caught)])


@pytest.mark.parametrize("script", TRIED)
def test_an_old_script_sees_the_message_of_the_guide_and_not_after_the_mend(script, tmp_path):
    names = names_of_an_old_script(tmp_path)
    message, mend = CHANGES[script]
    assert message in said(script, names)
    if mend.endswith(":"):
        mend += " pass"
    if "cuda" not in mend:
        assert said(mend, names).strip() == ""


def test_a_script_reads_its_local_rank_from_either_launcher(monkeypatch, capsys):
    [(_, under_torchrun), (message, under_launch)] = [
        rest for script, rest in CHANGES.items() if script.startswith("parser")
    ]
    old = argparse.ArgumentParser()
    old.add_argument("--local_rank", type=int, default=0)
    with pytest.raises(SystemExit):
        old.parse_args(["--local-rank=0"])
    assert message in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    parser = argparse.ArgumentParser()
    exec(under_launch.replace("default=0", under_torchrun), {"parser": parser, "os": os})
    assert parser.parse_args([]).local_rank == 1
    assert parser.parse_args(["--local-rank=2"]).local_rank == 2


def test_the_other_snippets():
    exec(INSTALL, {})
    import apex

    assert apex.__name__ == "apex"

    model = network()
    old = apex.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    for inputs, targets in batches()[:3]:
        old.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        old.step()
    state = as_apex_saves(old.state_dict(), steps=3)
    again = copy.deepcopy(model)
    scope = {"model": again, "old_optimizer_state": state, "torch": torch}
    exec(CONVERT, scope)
    for net, optimizer in ((model, old), (again, scope["optimizer"])):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), again.parameters()))
