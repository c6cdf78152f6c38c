"""What surrounds a call: the answers are those of torch's public questions."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import torch.distributed
from torch import Tensor

from ampatch.scaling.process_group import world_size
from ampatch.torch_private import probes


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_no_ranks():
    assert probes.are_ranks() is torch.distributed.is_initialized() is False
    assert world_size() == 1


def test_ranks(group):
    assert probes.are_ranks() is torch.distributed.is_initialized() is True


def test_ranks_after_the_group_has_gone(tmp_path):
    for name in ("first", "second"):
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/{name}", rank=0, world_size=1
        )
        assert probes.are_ranks()
        torch.distributed.destroy_process_group()
        assert not probes.are_ranks()


class OtherWorld:
    """As the world of torch's own tests, which has a group per thread."""

    default_pg = "a group"
    _default_pg = None


def test_a_world_of_another_kind_is_asked_in_public(monkeypatch):
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", OtherWorld())
    assert probes.are_ranks() is torch.distributed.is_initialized() is True


def recorded(x: Tensor) -> Tensor:
    found.append(probes.is_recording())
    return x + 1


found: list[bool] = []


@pytest.fixture(autouse=True)
def nothing_found():
    found.clear()


def test_plain_calls_are_not_recorded():
    recorded(torch.ones(1))
    assert found == [False]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "record",
    [
        lambda x: torch.jit.trace(recorded, x, check_trace=False),
        lambda x: torch.func.vmap(recorded)(x),
        lambda x: torch.func.grad(lambda x: recorded(x).sum())(x),
    ],
)
def test_traces_and_transforms(record):
    record(torch.ones(2))
    assert found == [True]


def test_the_flag_of_a_compiler(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert probes.is_recording() is torch.compiler.is_compiling() is True


def test_a_torch_that_keeps_none_of_it_where_we_look(monkeypatch, group):
    """The public ways answer then, and transforms are assumed: nothing is kept."""
    spec = importlib.util.find_spec("ampatch.torch_private.probes")
    bare = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as without:
        for name in ("_set_grad_enabled", "_is_tracing"):
            without.delattr(torch._C, name)
        without.delattr(torch.distributed.distributed_c10d, "_World")
        without.setitem(sys.modules, "torch._C._functorch", None)
        spec.loader.exec_module(bare)
    assert bare.are_ranks() and bare.is_recording()
    assert bare.set_grad_enabled is torch.set_grad_enabled
    assert bare._is_tracing is torch.jit.is_tracing
