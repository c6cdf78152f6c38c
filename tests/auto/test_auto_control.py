"""`--auto` comes and goes, and refuses scripts with AMP code of their own."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from auto_loops import begin, close, grads, net

import ampatch
from ampatch import auto
from ampatch.session.facade import open_sessions


def test_nothing_is_left_behind():
    """What the fixture of every test checks, and what it does not see."""
    replaced = [
        *((torch.optim.Optimizer, name) for name in ("__init__", "__setstate__")),
        *((torch.Tensor, name) for name in ("register_hook", "numpy")),
        *((ampatch, name) for name in ("initialize", "init")),
        (torch.amp.GradScaler, "__init__"),
        (torch.nn.Module, "__call__"),
        (torch.amp.autocast_mode.autocast, "__enter__"),
        (torch.utils.data._utils.fetch._MapDatasetFetcher, "fetch"),
        (torch.autograd, "backward"),
    ]
    before = [vars(owner).get(name) for owner, name in replaced]
    begin()
    assert all(vars(o).get(n) is not b for (o, n), b in zip(replaced, before, strict=True))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = model[0].weight.register_hook(lambda grad: grad * 3)
    ampatch.deactivate()
    assert [vars(owner).get(name) for owner, name in replaced] == before
    assert "step" not in vars(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    tripled = grads(model)[0]
    hook.remove()
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    close(3 * grads(model)[0], tripled)


def test_off_means_off():
    assert auto.start({"enabled": False}) is auto.start({"opt_level": "O0"}) is None
    assert open_sessions() == []


def test_copies_of_optimizers_are_noticed():
    begin({})
    model = net()
    optimizer = copy.deepcopy(torch.optim.SGD(model.parameters(), lr=0.1))
    params = optimizer.param_groups[0]["params"]
    (params[0] * float("inf")).sum().backward()
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert ampatch.step_was_skipped(optimizer)
    assert all(map(torch.equal, params, before))


def test_optimizers_are_held_weakly():
    session = begin({})
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    alive = [weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert session.optimizers == []
    torch.optim.SGD(net().parameters(), lr=0.1)
    assert len(session.optimizer_entries) <= 1


def test_a_pass_waits_for_that_of_another_thread():
    begin()
    pairs = [(model := net(), torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)]
    other = threading.Thread(target=lambda: pairs[1][0](torch.ones(2, 4)).sum().backward())
    seen = []

    def meanwhile(grad):
        other.start()
        other.join(0.2)  # long enough to end, if it did not wait for us

    out = pairs[0][0](torch.ones(2, 4)).float()
    scaled = out * 3.0
    out.register_hook(lambda grad: seen.append(grad.clone()))
    scaled.register_hook(meanwhile)
    scaled.sum().backward()
    other.join()
    close([torch.full((2, 1), 3.0)], seen)


def test_other_amp_code_is_told():
    begin()
    for call, name in (
        (lambda: ampatch.initialize(net()), "ampatch.initialize"),
        (lambda: ampatch.initialize(net(), enabled=False), "ampatch.initialize"),
        (lambda: ampatch.init(), "ampatch.init"),
        (lambda: torch.autocast("cpu").__enter__(), "torch.autocast"),
        (lambda: torch.amp.GradScaler("cpu"), "torch.amp.GradScaler"),
    ):
        told = f"--auto is for scripts without AMP code, and this one calls {name}. "
        with pytest.raises(ampatch.AmpatchError, match=told):
            call()
