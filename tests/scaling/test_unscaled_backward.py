"""A block whose backward pass is not that of the scaled loss is refused; all right uses are silent.

The slip is `with scale_loss(loss, optimizer) as scaled_loss: loss.backward()`.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from small_training import close, data, float_grads, grads, pass_back, seeded, start
from torch.nn.parallel import DistributedDataParallel

import ampatch
from ampatch.compat.apex import amp

SCALE = {"loss_scale": 1024.0, "unskipped": 0}


class Adam(torch.optim.Adam):
    """With a name of its own in messages."""


def silent(caplog):
    return not [record for record in caplog.records if record.name == "ampatch"]


def loss_of(model, batch=None):
    inputs, targets = batch or data()
    return F.mse_loss(model(inputs), targets)


# Wrong uses


def twice(scaled, loss, params):
    loss.backward(retain_graph=True)
    loss.backward()


def by_hand(scaled, loss, params):
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad


WRONG = {
    "backward": lambda scaled, loss, params: loss.backward(),
    "twice": twice,
    "by hand": by_hand,
    "of a copy": lambda scaled, loss, params: (loss * 2).backward(),
    "of some": lambda scaled, loss, params: loss.backward(inputs=params[:1]),
}


@pytest.mark.parametrize("use", WRONG)
def test_a_backward_pass_of_the_plain_loss_is_refused(use):
    model, optimizer = start("O1", kind=Adam, options={"lr": 1.0})
    loss = loss_of(model)
    with (
        pytest.raises(ampatch.AmpatchError, match=r"(?s)<Adam>.*scaled_loss\.backward\(\)"),
        ampatch.scale_loss(loss, optimizer) as scaled,
    ):
        WRONG[use](scaled, loss, list(model.parameters()))
    assert grads(optimizer) == [None] * 4
    assert ampatch.state_dict()["loss_scaler0"] == SCALE


def test_it_is_refused_at_each_level_with_a_scale(opt_level, scale_lives_on):
    """Earlier gradients, the count of clean steps and the scale are as before."""
    model, optimizer = start(opt_level, loss_scale="dynamic")
    pass_back(loss_of(model, data(1)), optimizer)
    before, kept = ampatch.state_dict(), copy.deepcopy(grads(optimizer))
    held = grads(optimizer)
    loss = loss_of(model)
    with pytest.raises(ampatch.AmpatchError), ampatch.scale_loss(loss, optimizer):
        loss.backward()
    assert all(map(torch.equal, grads(optimizer), kept)) and ampatch.state_dict() == before
    assert all(ours is other for ours, other in zip(grads(optimizer), held, strict=True))
    pass_back(loss_of(model, data(2)), optimizer)
    assert close(grads(optimizer), float_grads(data(1), data(2)))


def test_delayed_blocks_are_looked_at_too(caplog):
    """What is added to gradients that wait scaled cannot be taken away again, which is logged."""
    for waits in (False, True):
        model, optimizer = start("O1", verbosity=1)
        if waits:
            pass_back(loss_of(model), optimizer, delay_unscale=True)
        loss = loss_of(model)
        with (
            pytest.raises(ampatch.AmpatchError, match=r"scaled_loss\.backward"),
            ampatch.scale_loss(loss, optimizer, delay_unscale=not waits),
        ):
            loss.backward()
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
    loss = loss_of(model)
    with pytest.raises(ampatch.AmpatchError, match=r"scaled_loss\.backward"):
        with amp.scale_loss(loss, optimizer):
            loss.backward()
    ampatch.deactivate()

    handle = ampatch.init()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = loss_of(model)
    with pytest.raises(ampatch.AmpatchError, match=r"scaled_loss\.backward"):
        with optimizer.scale_loss(loss):
            loss.backward()


def under_ddp(rank):
    """Two right micro-batches, and a wrong one that adds to gradients in place."""
    model, optimizer = start("O1", kind=Adam)
    parallel = DistributedDataParallel(model)
    for number in (0, 1):
        pass_back(loss_of(parallel, data(number)), optimizer)
    loss, errors = loss_of(parallel), []
    for _ in range(2):  # beside earlier gradients, and beside none
        try:
            with ampatch.scale_loss(loss, optimizer):
                loss.backward(retain_graph=True)
        except ampatch.AmpatchError as error:
            errors.append(str(error))
        optimizer.zero_grad()
    ampatch.deactivate()
    return errors


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without it")
def test_each_rank_of_ddp_refuses_it_alone(ranks):
    for errors in ranks(under_ddp):
        assert len(errors) == 2 and all("scaled_loss.backward()" in error for error in errors)


def test_observers_hear_of_no_unscaled_gradients():
    heard = []

    class Observer:
        def on_unscaled(self, loss_id):
            heard.append(loss_id)

    model, optimizer = start("O1")
    stop = ampatch.observe(Observer())
    try:
        loss = loss_of(model)
        with pytest.raises(ampatch.AmpatchError), ampatch.scale_loss(loss, optimizer):
            loss.backward()
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


def retained(scaled, loss, model):
    scaled.div(2).backward(retain_graph=True)
    scaled.div(2).backward()


def in_place(scaled, loss, model):
    scaled *= 0.5
    scaled += scaled.clone()
    scaled.backward()


def hooked(scaled, loss, model):
    scaled.register_hook(lambda grad: None)
    scaled.retain_grad()
    scaled.backward()
    assert scaled.grad == 1


def set_by_hand(scaled, loss, model):
    by_hand(None, scaled, list(model.parameters()))


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
    **{
        use.__name__: use
        for use in (retained, in_place, hooked, set_by_hand, zeroed_first, pickled)
    },
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
        by_hand(scaled, loss, list(model.parameters()))
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
        WRONG[use](scaled, loss, list(model.parameters()))
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
