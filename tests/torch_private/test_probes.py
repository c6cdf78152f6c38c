"""Where a call runs: the answers are those of torch's public questions."""

import importlib
import sys

import pytest
import torch
import torch.distributed
from torch import Tensor
from warm_python import python

from ampatch.scaling.process_group import world_size
from ampatch.torch_private import devices, probes
from ampatch.torch_private.probes import is_distributed


def test_there_are_ranks_while_there_is_a_group(tmp_path):
    assert is_distributed() is torch.distributed.is_initialized() is False
    assert world_size() == 1
    for name in ("first", "second"):
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/{name}", rank=0, world_size=1
        )
        assert is_distributed() is torch.distributed.is_initialized() is True
        torch.distributed.destroy_process_group()
        assert not is_distributed()


RECORDINGS = {
    "none": (lambda call, x: call(x), False),
    "trace": (lambda call, x: torch.jit.trace(call, x, check_trace=False), True),
    "vmap": (lambda call, x: torch.func.vmap(call)(x), True),
    "grad": (lambda call, x: torch.func.grad(lambda x: call(x).sum())(x), True),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", RECORDINGS)
def test_traces_and_transforms_record_and_plain_calls_do_not(name):
    answers: list[bool] = []

    def asking(x: Tensor) -> Tensor:
        answers.append(probes.is_traced_or_transformed())
        return x + 1

    record, expected = RECORDINGS[name]
    record(asking, torch.ones(2))
    assert answers == [expected]


def test_the_flag_of_a_compiler(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert probes.is_traced_or_transformed() is torch.compiler.is_compiling() is True


def test_a_torch_that_keeps_its_group_elsewhere_is_asked_in_public(monkeypatch):
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_world")
    for is_there in (True, False):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda answer=is_there: answer)
        assert is_distributed() is is_there


def test_a_torch_that_keeps_none_of_it_where_we_look(monkeypatch):
    """The public ways answer then, and transforms are assumed: nothing is kept."""
    spec = importlib.util.find_spec("ampatch.torch_private.probes")
    bare = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as without:
        for name in ("_set_grad_enabled", "_is_tracing"):
            without.delattr(torch._C, name)
        without.setitem(sys.modules, "torch._C._functorch", None)
        spec.loader.exec_module(bare)
    assert bare.is_traced_or_transformed()
    assert bare.set_grad_enabled is torch.set_grad_enabled
    assert bare.is_tracing is torch.jit.is_tracing


@pytest.mark.parametrize("expected", ["xpu", None])
def test_kinds_of_devices(expected, monkeypatch):
    device = expected and torch.device(expected)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: expected is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    assert devices.accelerator() == expected
    assert devices.device_types() == (("cpu",) if expected is None else ("cpu", expected))
    assert devices.initial_cast_devices() == (None if expected is None else {"meta"})


def test_the_key_of_one_mode_alone_may_be_missing():
    script = (
        "import torch; del torch._C._TorchDispatchModeKey.FAKE\n"
        "from ampatch.torch_private import probes; print(probes.is_fake_mode_on())"
    )
    assert python("-c", script).stdout == "False\n"
