"""A block has one scale, and its backward passes are those of the scaled loss: others are refused.

The common slip is `with scale_loss(loss, optimizer) as scaled_loss: loss.backward()`.  All right
uses are silent.
"""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_training import close, data, float_grads, grads, pass_back, seeded, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch
from ampatch.compat.apex import amp


class Adam(torch.optim.Adam):
    """With a name of its own in messages."""


def silent(caplog):
    return not [record for record in caplog.records if record.name == "ampatch"]


def loss_of(model, batch=None):
    inputs, targets = batch or data()
    return F.mse_loss(model(inputs), targets)


# Wrong uses


def twice(scaled, loss, model):
    loss.backward(retain_graph=True)
    loss.backward()


def by_hand(scaled, loss, model):
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad


def another(model):
    return loss_of(model, data(3))


def after(use):
    """`use` of another loss, and of some weights, behind the right backward pass."""
    return lambda scaled, loss, model: (scaled.backward(), use(another(model), [model[0].weight]))


SLIP, BESIDE = r"(?s)<Adam>.*scaled_loss\.backward\(\)", "Add another loss to this one first"
WRONG = {
    "backward": (SLIP, lambda scaled, loss, model: loss.backward()),
    "twice": (SLIP, twice),
    "by hand": (SLIP, by_hand),
    "of a copy": (SLIP, lambda scaled, loss, model: (loss * 2).backward()),
    "of some": (SLIP, lambda scaled, loss, model: loss.backward(inputs=[model[0].weight])),
    "after": (BESIDE, after(lambda aux, some: aux.backward())),
    "before": (BESIDE, lambda scaled, loss, model: (another(model).backward(), scaled.backward())),
    "of some after": (BESIDE, after(lambda aux, some: aux.backward(inputs=some))),
    "by torch.autograd": (BESIDE, after(lambda aux, some: torch.autograd.backward([aux]))),
}


@pytest.mark.parametrize("use", WRONG)
@pytest.mark.parametrize("earlier", [0, 1])
def test_a_backward_pass_of_another_loss_is_refused(use, earlier, opt_level, scale_lives_on):
    """Earlier gradients, the count of clean steps and the scale are as before."""
    words, act = WRONG[use]
    model, optimizer = start(opt_level, kind=Adam, options={"lr": 1.0}, loss_scale="dynamic")
    for number in range(earlier):
        pass_back(loss_of(model, data(number)), optimizer)
    before, held = ampatch.state_dict(), grads(optimizer)
    kept, loss = copy.deepcopy(held), loss_of(model)
    with pytest.raises(ampatch.AmpatchError, match=words):
        with ampatch.scale_loss(loss, optimizer) as scaled:
            act(scaled, loss, model)
    assert all(ours is other for ours, other in zip(grads(optimizer), held, strict=True))
    assert held == [None] * 4 or all(map(torch.equal, held, kept))
    assert ampatch.state_dict() == before
    pass_back(loss_of(model, data(2)), optimizer)
    assert close(grads(optimizer), float_grads(*[data(0)] * earlier, data(2)))


def slip(model, optimizer, scale_loss=ampatch.scale_loss, **options):
    loss = loss_of(model)
    with pytest.raises(ampatch.AmpatchError, match=r"scaled_loss\.backward"):
        with scale_loss(loss, optimizer, **options):
            loss.backward()


def test_delayed_blocks_are_looked_at_too(caplog):
    """What is added to gradients that wait scaled cannot be taken away again, which is logged."""
    for waits in (False, True):
        model, optimizer = start("O1", verbosity=1)
        if waits:
            pass_back(loss_of(model), optimizer, delay_unscale=True)
        slip(model, optimizer, delay_unscale=not waits)
        assert ("These additions stay" in caplog.text) == waits
        ampatch.deactivate()


def test_it_is_refused_where_the_block_is_under_no_grad():
    model, optimizer = start("O1")
    loss = loss_of(model)
    with torch.no_grad(), pytest.raises(ampatch.AmpatchError, match=r"scaled_loss\.backward"):
        with ampatch.scale_loss(loss, optimizer):
            loss.backward()


def test_one_of_two_losses_is_refused_by_its_own_block():
    model = seeded()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    ampatch.initialize(model, [first, second], num_losses=2, verbosity=0)
    losses = [loss_of(model, data(i)) for i in (1, 2)]
    with pytest.raises(ampatch.AmpatchError, match="<SGD>, <SGD>"):
        for number, loss in enumerate(losses):
            with ampatch.scale_loss(loss, [first, second], loss_id=number) as scaled:
                (loss if number else scaled).backward()
    assert close(grads(first), float_grads(data(1))[:2])


def test_it_is_refused_in_the_apex_package_and_by_a_handle():
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    slip(model, optimizer, amp.scale_loss)
    ampatch.deactivate()
    handle = ampatch.init()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    slip(model, optimizer, lambda loss, optimizer: optimizer.scale_loss(loss))


def under_ddp(rank):
    """Two right micro-batches, and a wrong one that adds to gradients in place, or to none."""
    model, optimizer = start("O1")
    parallel = DistributedDataParallel(model)
    for number in (0, 1):
        pass_back(loss_of(parallel, data(number)), optimizer)
    for _ in range(2):
        slip(parallel, optimizer)
        optimizer.zero_grad()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without it")
def test_each_rank_of_ddp_refuses_it_alone(ranks):
    ranks(under_ddp)


def test_observers_hear_of_no_unscaled_gradients():
    heard = []
    model, optimizer = start("O1")
    stop = ampatch.observe(SimpleNamespace(on_unscaled=heard.append))
    try:
        slip(model, optimizer)
    finally:
        stop()
    assert heard == []


# A block without a backward pass


def test_a_block_without_a_backward_pass_says_so_once(opt_level, caplog):
    model, optimizer = start(opt_level, loss_scale=64.0, verbosity=1)
    for _ in range(3):
        with ampatch.scale_loss(loss_of(model), optimizer) as scaled:
            pass
        scaled.backward()
        optimizer.zero_grad()
    assert caplog.text.count("without a backward pass") == 1
    assert "scaled_loss.backward()" in caplog.text


def test_a_block_without_one_beside_gradients_that_wait_scaled(caplog):
    """These are no new ones."""
    model, optimizer = start("O0", loss_scale=64.0, verbosity=1)
    for _ in range(2):
        pass_back(loss_of(model), optimizer, delay_unscale=True)
    with ampatch.scale_loss(loss_of(model), optimizer):
        pass
    assert caplog.text.count("without a backward pass") == 1
    assert close(grads(optimizer), float_grads(data(), data()))


# Right uses


def in_place(scaled, loss, model):
    scaled *= 0.5
    scaled += scaled.clone()
    scaled.backward()


def hooked(scaled, loss, model):
    scaled.register_hook(lambda grad: None)
    scaled.retain_grad()
    scaled.backward()
    assert scaled.grad == 1


def by_a_graph_of_gradients(scaled, loss, model):
    params = list(model.parameters())
    results = torch.autograd.grad(scaled, params, create_graph=True)
    for param, grad in zip(params, results, strict=True):
        param.grad = grad.detach()


def by_the_gradient_of_the_scaled_loss(scaled, loss, model):
    """As a pipeline hands gradients on."""
    (factor,) = torch.autograd.grad(scaled.square() / 2 / scaled.detach(), scaled)
    scaled.backward(factor)


def zeroed_first(scaled, loss, model):
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    scaled.backward()


def pickled(scaled, loss, model):
    pickle.dumps(scaled)  # a warning would be an error
    scaled.backward()


RIGHT = {
    "as ever": lambda scaled, loss, model: scaled.backward(),
    "in a sum": lambda scaled, loss, model: (scaled + 0.0 * model[0].weight.sum()).backward(),
    "through the function": lambda scaled, loss, model: torch.autograd.backward([scaled]),
    "inputs": lambda scaled, loss, model: scaled.backward(inputs=list(model.parameters())),
    "in parts": lambda scaled, loss, model: [
        scaled.div(2).backward(retain_graph=True) for _ in range(2)
    ],
    "set by hand": lambda scaled, loss, model: by_hand(None, scaled, model),
    **{use.__name__: use for use in (in_place, hooked, zeroed_first, pickled)},
    "a graph of gradients": by_a_graph_of_gradients,
    "the gradient of the scaled loss": by_the_gradient_of_the_scaled_loss,
}


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("use", RIGHT)
def test_right_uses_are_silent(use, delays, caplog):
    model, optimizer = start("O0", loss_scale="dynamic", verbosity=1)
    caplog.clear()
    loss = loss_of(model)
    with ampatch.scale_loss(loss, optimizer, delay_unscale=delays) as scaled:
        RIGHT[use](scaled, loss, model)
    assert silent(caplog)
    optimizer.step()
    assert close(grads(optimizer), float_grads(data()))


@pytest.mark.parametrize("way", ["parts", "sum", "vector"])
def test_losses_in_one_tensor_are_silent(way, caplog):
    model, optimizer = start("O0", loss_scale="dynamic", verbosity=1)
    caplog.clear()
    losses = (model(data()[0]) - data()[1]).square().mean(0) / 2
    with ampatch.scale_loss(losses, optimizer) as scaled:
        if way == "parts":
            for part in scaled:
                part.backward(retain_graph=True)
        elif way == "sum":
            scaled.sum().backward()
        else:
            scaled.backward(torch.ones(2))
    assert silent(caplog) and close(grads(optimizer), float_grads(data()))


def test_blocks_inside_blocks_and_a_sum_of_two_are_silent(caplog):
    model = seeded()
    pair = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    ampatch.initialize(model, pair, num_losses=2, opt_level="O0", loss_scale=64.0)
    caplog.clear()
    losses = [loss_of(model, data(i)) for i in (1, 2)]
    with ampatch.scale_loss(losses[0], pair[0]) as first:
        with ampatch.scale_loss(losses[1], pair[1], loss_id=1) as second:
            (first + second).backward()
    assert silent(caplog) and close(grads(pair[1]), float_grads(data(1), data(2))[2:])


def test_the_exception_of_the_block_wins():
    model, optimizer = start("O1")
    loss = loss_of(model)
    with pytest.raises(KeyError), ampatch.scale_loss(loss, optimizer) as scaled:
        by_hand(scaled, loss, model)
        raise KeyError


@pytest.mark.parametrize("settings", [{"enabled": False}, {"loss_scale": 1.0}, {"opt_level": "O3"}])
def test_without_a_scale_any_backward_pass_is_right(settings, caplog):
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, **{"opt_level": "O1", **settings})
    caplog.clear()
    loss = loss_of(model)
    with ampatch.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        loss.backward()
    assert silent(caplog) and close(grads(optimizer), float_grads(data()))


@pytest.mark.parametrize("use", ["backward", "by hand"])
def test_a_dynamic_scale_that_has_come_to_1_refuses_nothing(use):
    model, optimizer = start("O1", init_scale=1.0)
    loss = loss_of(model)
    with ampatch.scale_loss(loss, optimizer) as scaled:
        WRONG[use][1](scaled, loss, model)
    assert close(grads(optimizer), float_grads(data()))


def test_losses_without_a_graph_are_silent(caplog):
    """In an evaluation that shares its code with the training, and where gradients are by hand."""
    model, optimizer = start("O1", verbosity=1)
    caplog.clear()
    with torch.no_grad(), ampatch.scale_loss(loss_of(model), optimizer):
        pass
    loss = loss_of(model)
    with torch.no_grad(), ampatch.scale_loss(loss, optimizer):
        pass
    with ampatch.scale_loss(torch.tensor(1.0), optimizer) as scaled:
        for param in model.parameters():
            param.grad = torch.ones_like(param) * scaled
    assert silent(caplog) and all(torch.equal(g, torch.ones_like(g)) for g in grads(optimizer))


def test_the_hook_keeps_nothing():
    """Without a collection the graph goes with the scaled loss, also one of second derivatives."""
    model, optimizer = start("O1")
    gc.collect()
    gc.disable()
    try:
        for graph in (False, True):
            loss = loss_of(model)
            with ampatch.scale_loss(loss, optimizer) as scaled:
                torch.autograd.grad(scaled * scaled, list(model.parameters()), create_graph=graph)
            gone = [weakref.ref(loss), weakref.ref(scaled)]
            del loss, scaled
            assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo does not know")
@pytest.mark.parametrize("compiles", ["model", "step", "backward"])
def test_compiled_code_is_silent_and_looked_at(compiles, caplog):
    model, optimizer = start("O1", dtype=torch.bfloat16, loss_scale=64.0, verbosity=1)
    caplog.clear()
    called = torch.compile(model, backend="eager") if compiles == "model" else model

    def step(plain):
        loss = F.mse_loss(called(data()[0]), data()[1])
        with ampatch.scale_loss(loss, optimizer) as scaled:
            (loss if plain else scaled).backward()

    if compiles == "step":
        step = torch.compile(step, backend="eager")
    with torch._dynamo.config.patch(compiled_autograd=compiles == "backward"):
        for _ in range(2):
            step(False)
            optimizer.zero_grad()
        assert silent(caplog)
        with pytest.raises(ampatch.AmpatchError, match=r"scaled_loss\.backward"):
            step(True)
    torch.compiler.reset()


def test_the_loss_scale_is_1_where_ampatch_is_disabled():
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, enabled=False)
    assert ampatch.loss_scale() == 1.0
    with pytest.raises(ValueError, match="loss_id=1"):
        ampatch.loss_scale(1)


# Two blocks at a time

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def pair(**settings):
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    settings = {"opt_level": "O0", "loss_scale": "dynamic", "verbosity": 0, **settings}
    ampatch.initialize(models, optimizers, dtype=torch.float16, num_losses=2, **settings)
    return models, optimizers


def joint_loss(models) -> torch.Tensor:
    return models[1](torch.tanh(models[0](X))).pow(2).mean()


def expected(models) -> list:
    plain = copy.deepcopy(models)
    joint_loss(plain).backward()
    return [weight.grad for model in plain for weight in model.parameters()]


def lower_second_scale(models, optimizers):
    pass_back(models[1](X).sum() * torch.inf, optimizers[1], loss_id=1)
    optimizers[1].step()
    optimizers[1].zero_grad()


@pytest.mark.parametrize("which", [0, 1])
def test_blocks_of_one_scale_share_a_pass(which, scale_lives_on):
    models, optimizers = pair()
    wanted = expected(models)
    for _ in range(2):
        loss = joint_loss(models)
        with ampatch.scale_loss(loss, optimizers[0]) as first:
            with ampatch.scale_loss(loss, optimizers[1]) as second:
                (first, second)[which].backward()
        assert close([*grads(optimizers[0]), *grads(optimizers[1])], wanted)
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("passes", [[0], [1], [0, 1]])
def test_blocks_of_different_scales_do_not(passes):
    models, optimizers = pair()
    lower_second_scale(models, optimizers)
    loss = joint_loss(models)
    with pytest.raises(ampatch.AmpatchError, match=r"(?s)65536.*32768|32768.*65536") as raised:
        with ampatch.scale_loss(loss, optimizers[0]) as first:
            with ampatch.scale_loss(loss, optimizers[1], loss_id=1) as second:
                for number in passes:
                    (first, second)[number].backward(retain_graph=True)
    assert "scale_loss(loss, [first, second])" in str(raised.value)
    assert grads(optimizers[0]) == grads(optimizers[1]) == [None, None]


def test_blocks_of_different_scales_with_weights_of_their_own_have_a_pass_each():
    models, optimizers = pair()
    lower_second_scale(models, optimizers)
    losses = [model(X).pow(2).mean() for model in models]
    wanted = [
        torch.autograd.grad(losses[i], models[i].parameters(), retain_graph=True) for i in (0, 1)
    ]
    with ampatch.scale_loss(losses[0], optimizers[0]) as first:
        with ampatch.scale_loss(losses[1], optimizers[1], loss_id=1) as second:
            first.backward()
            second.backward()
    assert close(grads(optimizers[0]), wanted[0]) and close(grads(optimizers[1]), wanted[1])


def test_passes_that_bring_the_block_nothing_are_silent():
    models, (optimizer, _) = pair()
    loss = models[0](X).pow(2).mean()
    wanted = torch.autograd.grad(loss, models[0].parameters(), retain_graph=True)
    x, free = X.clone().requires_grad_(), nn.Linear(4, 1)
    with ampatch.scale_loss(loss, optimizer) as scaled:
        free(X).sum().backward()
        models[0](x).sum().backward(inputs=x)
        (scaled / 2).backward(retain_graph=True)
        torch.autograd.backward([scaled / 4, scaled / 4])
        torch.autograd.grad(models[0](X).sum(), models[0].weight)
    assert close(grads(optimizer), wanted) and free.weight.grad is not None


@pytest.mark.parametrize("change", [lambda loss: loss, lambda loss: loss / 2 + 1])
def test_a_scaled_loss_is_not_scaled_again(change):
    models, optimizers = pair()
    loss = joint_loss(models)
    with pytest.raises(ampatch.AmpatchError, match="scaled twice") as raised:
        with ampatch.scale_loss(loss, optimizers[0]) as first:
            pass_back(change(first), optimizers[1])
    assert "scale_loss(loss, [first, second])" in str(raised.value)
    assert grads(optimizers[0]) == grads(optimizers[1]) == [None, None]
    wanted = expected(models)
    pass_back(joint_loss(models), optimizers)
    assert close([*grads(optimizers[0]), *grads(optimizers[1])], wanted)
