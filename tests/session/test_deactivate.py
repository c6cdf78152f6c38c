"""`deactivate`: models and optimizers are as they were, with the FP32 values of the masters."""

import gc
import weakref

import pytest
import session_pairs
import torch
import torch.nn.functional as F
from small_training import backward, close, data, float_grads, grads, pass_back, start

import ampatch


def build():
    model = session_pairs.build()
    model[0].bias.requires_grad_(False)
    return model


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
}


def names(model, optimizer):
    hooks = [
        (name, list(table))
        for module in model.modules()
        for name, table in vars(module).items()
        if "hook" in name and hasattr(table, "__iter__")
    ]
    keys = [set(vars(module)) for module in model.modules()]
    return keys, hooks, set(vars(optimizer))


@pytest.mark.parametrize("kind, skip", [("SGD", True), ("Adam", False)])
def test_everything_is_given_back(opt_level, half, kind, skip):
    model = build()
    optimizer = OPTIMIZERS[kind](model.parameters())
    objects = [*model.parameters(), *model.buffers()]
    before = names(model, optimizer)
    ampatch.initialize(
        model, optimizer, opt_level=opt_level, dtype=half, loss_scale="dynamic", verbosity=0
    )
    assert names(model, optimizer) != before
    for number in range(3):
        session_pairs.one_step(model, optimizer, number)
    if skip:
        pass_back(model(data(0)[0]).float().sum() * torch.nan, optimizer)
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer)
    masters = [param.detach().clone() for param in ampatch.master_params(optimizer)]
    state = [dict(optimizer.state[param]) for param in ampatch.master_params(optimizer)]
    ampatch.deactivate()

    assert names(model, optimizer) == before
    assert all(
        a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True)
    )
    listed = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(listed, model.parameters(), strict=True))
    for param, master, moved in zip(listed, masters, state, strict=True):
        assert param.dtype is torch.float32 and torch.equal(param, master.float())
        results = optimizer.state.get(param, {})
        assert results.keys() == moved.keys()
        for key, value in moved.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(results[key], value.float()), key
                assert results[key].dtype is torch.float32
    assert set(map(id, optimizer.state)) <= set(map(id, listed))
    if opt_level == "O2":
        inner = [p for p in masters if not torch.equal(p, p.to(half).float())]
        assert inner, "the masters hold no more than half precision: nothing was proved"


@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_move_along(opt_level, delayed):
    model, plain = build(), build()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    ampatch.initialize(model, optimizer, opt_level=opt_level, init_scale=64.0, verbosity=0)
    session_pairs.backward(model, optimizer, 0, delay_unscale=delayed)
    ampatch.deactivate()
    inputs, targets = data(0)
    F.mse_loss(plain(inputs), targets).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            assert ours.grad.dtype is torch.float32
            assert torch.allclose(ours.grad, theirs.grad, atol=5e-3)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_gradients_that_wait_scaled_are_unscaled_where_the_model_alone_is_taken_over(level):
    model, optimizer = start(level, loss_scale=64.0)
    backward(model, optimizer, data(), delay_unscale=True)
    ampatch.initialize(model, opt_level="O1", verbosity=0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert close(grads(optimizer), float_grads(data()))


def test_twice_is_once_and_without_a_session_nothing():
    ampatch.deactivate()
    model = build()
    ampatch.initialize(model, OPTIMIZERS["SGD"](model.parameters()), opt_level="O2", verbosity=0)
    for _ in range(2):
        ampatch.deactivate()
        assert session_pairs.hook_count(model) == session_pairs.hook_count(build())
        assert all(map(torch.equal, build().state_dict().values(), model.state_dict().values()))


def test_afterwards_memory_is_free_at_once(opt_level):
    """No cycle holds weights and gradients until Python looks for cycles."""
    session_pairs.one_step(*start_pair(opt_level), 0)  # torch keeps the first optimizer that steps
    ampatch.deactivate()
    model, optimizer = start_pair(opt_level)
    session_pairs.one_step(model, optimizer, 0)
    held = [weakref.ref(net) for net in (model, optimizer, *model.parameters())]
    held += [weakref.ref(parameter.grad) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        ampatch.deactivate()
        del model, optimizer
        assert [reference() for reference in held if reference() is not None] == []
    finally:
        gc.enable()


def start_pair(level):
    model = session_pairs.build()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    overrides = {"0": "float"}
    ampatch.initialize(model, optimizer, opt_level=level, overrides=overrides, verbosity=0)
    return model, optimizer
