"""`ampatch tables --check`: what a module holds from before the patches, and is it rebound?"""

from __future__ import annotations

import pytest
from run_command import write
from warm_python import python

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

net = torch.nn.Sequential(Net())
layer = torch.nn.TransformerEncoderLayer(8, 2, activation=torch.nn.functional.softplus)
itself = []
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
}


@pytest.mark.parametrize("as_file", [True, False])
def test_check_names_what_a_module_holds(as_file, tmp_path, here):
    write(tmp_path / "project/__init__.py", "from . import layers\n")
    write(tmp_path / "project/layers.py", MODULE)
    name = "layers" if as_file else "project.layers"
    done = here("tables", "--check", "project/layers.py" if as_file else "project")
    assert (done.returncode, done.stderr) == (1, "")
    *lines, total = done.stdout.splitlines()
    assert total.startswith(f"{len(REBOUND)} found and rebound, {len(OUT_OF_REACH)} out of reach")
    starts = [f"{name}: {path} holds {f}: found and rebound" for path, f in REBOUND.items()]
    starts += [
        f"{name}: {path} holds {function}: not reachable, {kind}; "
        for path, (function, kind) in OUT_OF_REACH.items()
    ]
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
        assert "reachable" not in line or len(line) > len(start) + 20  # and what to do


def test_check_is_content_with_what_can_be_rebound(tmp_path, here):
    """Also where the script initializes, which binds replacements."""
    write(
        tmp_path / "fine.py",
        """
        import ampatch
        from torch import mm
        net = ampatch.initialize([], patch_scope="process", verbosity=0)
        from torch import exp
        """,
    )
    done = here("tables", "--check", "fine.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "fine: mm holds torch.mm: found and rebound",
        "fine: exp holds torch.exp: found and rebound",
        "2 found and rebound, 0 out of reach, of the functions that ampatch patches.",
    ]


def test_check_takes_scripts_written_for_apex(tmp_path):
    write(tmp_path / "legacy.py", "from apex import amp\nfrom torch import mm\n")
    done = python("-m", "ampatch", "tables", "--check", "legacy.py", cwd=tmp_path)
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
def test_what_cannot_be_checked_is_refused(name, text, message, tmp_path, here):
    if text:
        write(tmp_path / name, text)
    done = here("tables", "--check", name)
    assert done.returncode == 2 and message in done.stderr
