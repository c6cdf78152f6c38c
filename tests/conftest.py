"""Every test leaves torch as it found it; what is checked is identity, attribute by attribute."""

from __future__ import annotations

import os
import sys

# Tiny tensors on shared cores: threads that wait for each other cost far more than they save.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
import torch.backends.mha
import torch.fx
import torch.linalg
import torch.nn.utils.clip_grad
import torch.special
import torch.utils.checkpoint
from old_torch import lacking

import ampatch
from ampatch.log import set_verbosity
from ampatch.scaling import scale_value

_OWNERS = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,
    "torch._VF": torch._VF,
    "torch.autograd": torch.autograd,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.nn.RNNBase": torch.nn.RNNBase,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.utils": torch.nn.utils,
    "torch.nn.utils.clip_grad": torch.nn.utils.clip_grad,
    "torch.utils.checkpoint": torch.utils.checkpoint,
    "torch.backends.mha": torch.backends.mha,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.fx.Tracer": torch.fx.Tracer,
    "torch.jit": torch.jit,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.autograd.function.BackwardCFunction": torch.autograd.function.BackwardCFunction,
}

# torch rewraps these at the first instance of each optimizer class; let it, once.
for _optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS):
    _optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

# Dynamo rewraps these at its first use.
_REWRAPPED = {"trace", "trace_module", "_get_trace_graph"}
_VOLATILE = _REWRAPPED | {
    "_dynamo",
    "_inductor",
    "_higher_order_ops",
    "export",
    "compiler",
    "_functorch",
    "fx",
}


def snapshot() -> dict[tuple[str, str], object]:
    """Each owner's own attributes (not the inherited: a left-over copy must show)."""
    return {
        (title, name): value
        for title, owner in _OWNERS.items()
        for name, value in vars(owner).items()
        if not name.startswith("__") and name not in _VOLATILE
    }


def changes(before: dict, after: dict) -> list[str]:
    """What differs, leaving out submodules that were merely imported meanwhile."""
    found = []
    for key in before.keys() | after.keys():
        old, new = before.get(key, "absent"), after.get(key, "absent")
        imported = old == "absent" and isinstance(new, type(sys))
        if old is not new and not imported and (old == "absent" or callable(old)):
            found.append(f"{'.'.join(key)}: {old!r} -> {new!r}")
    return sorted(found)


@pytest.fixture(autouse=True)
def torch_is_as_we_found_it():
    """After `deactivate` nothing of ours is left in torch; without it, nothing leaks either."""
    assert not ampatch.session.session.registry.sessions, "an earlier test left a session open"
    before = snapshot()
    set_verbosity(1)  # an earlier test may have silenced the log
    hook = sys.excepthook
    yield
    sys.excepthook = hook  # init_process_group replaces it for good
    ours = set(ampatch.session.session.registry.installation._originals)
    ampatch.deactivate()
    assert changes(before, snapshot()) == []
    assert not ours & set(torch.jit._builtins._get_builtin_table()), "left in torch.jit's table"
    state = ampatch.session.session.registry.state
    assert state.process is None and not state.overridden and not state.thread.frames


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs something that the running torch lacks, and name it."""
    for item in items:
        reason = lacking(item.path.stem, item.name)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["O0", "O1", "O2", "O3"])
def opt_level(request) -> str:
    """Each of the opt levels."""
    return request.param


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def half(request) -> torch.dtype:
    """Each of the half types."""
    return request.param


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two processes with a gloo group between them; see `ranks.Ranks`."""
    from ranks import Ranks

    ranks = Ranks(str(tmp_path_factory.mktemp("ranks")))
    yield ranks
    ranks.stop()


@pytest.fixture(params=["host", "device"])
def scale_lives_on(request, monkeypatch):
    """Loss scales as numbers of the host, and as tensors, as with losses on an accelerator."""
    if request.param == "device":
        monkeypatch.setattr(scale_value, "is_owned_by_host", lambda device: False)
    return request.param
