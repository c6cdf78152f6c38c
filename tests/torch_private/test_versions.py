"""A torch that lacks what the tables name: left out, said, and never fatal."""

from __future__ import annotations

import textwrap

import pytest
from warm_python import python

from ampatch.diagnose.tables import content

LACKS = {
    "a function": ("del torch.trapz", ["torch.trapz"]),
    "a leaf": ("del torch._C._nn.huber_loss", ["torch._C._nn.huber_loss"]),
    "torch.linalg": ("del torch.linalg", ["torch.linalg.multi_dot", "torch.linalg.norm"]),
    "torch.special": ("del torch.special", ["torch.special.softmax", "torch.special.expm1"]),
    "a part of a module": (
        "del torch.backends.mha.get_fastpath_enabled, torch.nn.RNNBase.check_input",
        ["torch.backends.mha.get_fastpath_enabled", "torch.nn.RNNBase.check_input"],
    ),
}


def in_a_process(code: str) -> str:
    done = python("-W", "error", "-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("what", LACKS)
def test_what_torch_lacks_is_left_out_and_said(what):
    removal, names = LACKS[what]
    out = in_a_process(f"""
        import logging, sys
        import torch, torch.nn.functional as F
        logging.basicConfig(level="INFO", stream=sys.stdout)
        import ampatch, ampatch.cli.main
        from ampatch.diagnose import doctor
        {removal}
        net, mm = torch.nn.Linear(2, 2), torch.mm
        ampatch.initialize(net, dtype="bfloat16", overrides={{torch.relu: "float"}})
        print("cast to", net(torch.ones(2, 2)).dtype, torch.mm(torch.eye(2), net.weight).dtype)
        ampatch.deactivate()
        assert torch.mm is mm and net(torch.ones(2, 2)).dtype is torch.float32
        ampatch.init()  # the rows of apex's flavour, too
        ampatch.deactivate()
        print("doctor:", dict(doctor.facts())["not in this torch"])
        print("TABLES")
        assert ampatch.cli.main.main(["tables"]) == 0
    """)
    head, _, shown = out.partition("TABLES")
    assert "cast to torch.bfloat16 torch.bfloat16" in head
    logged = next(line for line in head.splitlines() if "lacks, and ampatch leaves out" in line)
    found = next(line for line in head.splitlines() if line.startswith("doctor:"))
    report = " ".join(shown.rpartition("This torch")[2].split())
    for name in names:
        assert name in logged and name in found and name in report


def test_nothing_else_is_reported():
    """What this torch lacks is what a newer one brought: never a name that is misspelt."""
    assert set(content.missing()) <= {"torch.linalg.matrix_sqrth"}
