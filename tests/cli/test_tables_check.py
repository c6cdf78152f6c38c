"""`ampatch tables --check`: what a module holds from before the patches, and is it rebound?"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from warm_python import python

from ampatch.cli import main


def check(name: str, cwd: Path) -> subprocess.CompletedProcess:
    return python("-m", "ampatch", "tables", "--check", name, cwd=cwd)


MODULE = """
import functools
import torch
from torch import mm as product
from torch.nn.functional import linear, softmax

ACTS = {"exp": [torch.exp]}
half = functools.partial(torch.softmax, dim=-1)
mapped = functools.partial(map, torch.exp, default=torch.log)

def apply(x, act=torch.exp, *, other=torch.log):
    return act(x)

def outer(function):
    def inner(x):
        return function(x)
    return inner

closed = outer(torch.mm)

class Net(torch.nn.Module):
    act = staticmethod(torch.exp)

    def __init__(self):
        super().__init__()
        self.times = torch.matmul

    @property
    def scaled(self, by=torch.prod):
        return by(self.weight)

    def forward(self, x, how=linear):
        return how(x, x)

class Slotted:
    __slots__ = ("function", "empty")

    def __init__(self):
        self.function = torch.bmm

net = torch.nn.Sequential(Net())
layer = torch.nn.TransformerEncoderLayer(8, 2, activation=torch.nn.functional.softplus)
slotted = Slotted()
itself = [slotted]
itself.append(itself)
"""
REBOUND = {"product": "torch.mm", "linear": "torch.nn.functional.linear"}
OUT_OF_REACH = {
    "ACTS['exp'][0]": ("torch.exp", "container"),
    "half.func": ("torch.softmax", "partial"),
    "mapped[0]": ("torch.exp", "partial"),
    "mapped['default']": ("torch.log", "partial"),
    "apply(act=)": ("torch.exp", "default argument"),
    "apply(other=)": ("torch.log", "default argument"),
    "closed -> function": ("torch.mm", "closure"),
    "Net.act": ("torch.exp", "class attribute"),
    "Net.scaled(by=)": ("torch.prod", "default argument"),
    "Net.forward(how=)": ("torch.nn.functional.linear", "default argument"),
    "net._modules['0'].times": ("torch.matmul", "instance attribute"),
    "layer.activation": ("torch.nn.functional.softplus", "instance attribute"),
    "slotted.function": ("torch.bmm", "instance attribute"),
}


@pytest.mark.parametrize("as_file", [True, False])
def test_check_names_what_a_module_holds(as_file, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__init__.py").write_text("from . import layers\n")
    (tmp_path / "project" / "layers.py").write_text(MODULE)
    name = "layers" if as_file else "project.layers"
    done = check("project/layers.py" if as_file else "project", tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    *lines, total = done.stdout.splitlines()
    assert total.startswith(f"{len(REBOUND)} found and rebound, {len(OUT_OF_REACH)} out of reach")
    expected = [f"{name}: {path} holds {f}: found and rebound" for path, f in REBOUND.items()]
    assert lines[: len(REBOUND)] == expected
    starts = [
        f"{name}: {path} holds {function}: not reachable, {kind}; "
        for path, (function, kind) in OUT_OF_REACH.items()
    ]
    assert len(lines) == len(expected) + len(starts)
    for line, start in zip(lines[len(REBOUND) :], starts):
        assert line.startswith(start) and len(line) > len(start) + 20  # and what to do


def test_check_is_content_with_what_can_be_rebound(tmp_path):
    """Also where the script initializes, which binds replacements."""
    (tmp_path / "fine.py").write_text(
        textwrap.dedent("""
        import ampatch
        from torch import mm
        net = ampatch.initialize([], patch_scope="process", verbosity=0)
        from torch import exp
    """)
    )
    done = check("fine.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "fine: mm holds torch.mm: found and rebound",
        "fine: exp holds torch.exp: found and rebound",
        "2 found and rebound, 0 out of reach, of the functions that ampatch patches.",
    ]


def test_check_takes_scripts_written_for_apex(tmp_path):
    (tmp_path / "legacy.py").write_text("from apex import amp\nfrom torch import mm\n")
    done = check("legacy.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "legacy: mm holds torch.mm: found and rebound"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("gone", None, "gone cannot be imported: ModuleNotFoundError: No module named 'gone'"),
        ("gone.py", None, "gone.py cannot be imported: FileNotFoundError"),
        ("broken.py", "1 / 0", "broken.py cannot be imported: ZeroDivisionError"),
        ("script.py", "raise SystemExit(0)", "script.py cannot be imported: SystemExit: 0"),
    ],
)
def test_what_cannot_be_checked_is_refused(name, text, message, tmp_path, monkeypatch, capsys):
    if text:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("ampatch.launch.script.install_apex", lambda: None)
    with pytest.raises(SystemExit) as stop:
        main.main(["tables", "--check", name])
    assert stop.value.code == 2 and message in capsys.readouterr().err
    sys.modules.pop(name.removesuffix(".py"), None)


def test_check_takes_no_other_option(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["tables", "--check", "torch", "--rule", "half"])
    assert stop.value.code == 2 and "goes with no other option" in capsys.readouterr().err
