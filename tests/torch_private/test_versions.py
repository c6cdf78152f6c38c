"""A torch that lacks what the tables name: left out, said, and never fatal."""

import textwrap

import pytest
import torch
from warm_python import python

from ampatch.diagnose.tables import content
from ampatch.torch_private.custom_ops import devices_with_autocast_kernel

REMOVALS = """
    del torch.trapz
    del torch._C._nn.huber_loss
    del torch.linalg, torch.special
    del torch.backends.mha.get_fastpath_enabled, torch.nn.RNNBase.check_input
"""
LACKED = [
    *("torch.trapz", "torch._C._nn.huber_loss"),
    *("torch.linalg.multi_dot", "torch.linalg.norm"),
    *("torch.special.softmax", "torch.special.expm1"),
    *("torch.backends.mha.get_fastpath_enabled", "torch.nn.RNNBase.check_input"),
]


@pytest.fixture(scope="module")
def told():
    """What a training, `ampatch doctor` and `ampatch tables` say under a torch that lacks these."""
    code = textwrap.dedent("""
        import logging, sys
        import torch, torch.nn.functional as F
        logging.basicConfig(level="DEBUG", stream=sys.stdout)
        import ampatch, ampatch.cli.main
        from ampatch.cli import doctor
        REMOVALS
        net, mm = torch.nn.Linear(2, 2), torch.mm
        ampatch.initialize(net, dtype="bfloat16", overrides={torch.relu: "float"})
        print("cast to", net(torch.ones(2, 2)).dtype, torch.mm(torch.eye(2), net.weight).dtype)
        ampatch.deactivate()
        assert torch.mm is mm and net(torch.ones(2, 2)).dtype is torch.float32
        ampatch.init()  # the rows of apex's flavour, too
        ampatch.deactivate()
        print("doctor:", doctor.facts()["missing_in_torch"])
        print("TABLES")
        assert ampatch.cli.main.main(["tables"]) == 0
    """).replace("REMOVALS", textwrap.dedent(REMOVALS))
    done = python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("TABLES")[::2]


def test_the_rest_is_cast(told):
    assert "cast to torch.bfloat16 torch.bfloat16" in told[0]


@pytest.mark.parametrize("name", LACKED)
def test_what_torch_lacks_is_left_out_and_said(name, told):
    lines, shown = told[0].splitlines(), told[1]
    assert name in next(line for line in lines if line.startswith("doctor:"))
    assert name in " ".join(shown.rpartition("This torch")[2].split())


def test_nothing_else_is_reported():
    """What this torch lacks is what a newer one brought: never a name that is misspelt."""
    assert set(content.missing()) <= {"torch.linalg.matrix_sqrth", "torch.linalg.polar"}


def test_operators_are_asked_for_kernels_as_on_torch_2_10(monkeypatch):
    """Its packets have no `op_overloads`, and look up each unknown name among the overloads."""
    monkeypatch.delattr("torch._ops.OpOverloadPacket.op_overloads", raising=False)
    library = torch.library.Library("ampatch_versions", "DEF")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x, "AutocastCPU")
    operator = torch.ops.ampatch_versions.f
    for called in (operator, operator.default):
        assert devices_with_autocast_kernel(called, "ampatch_versions::f", ("cpu", "cuda")) == {
            "cpu"
        }
