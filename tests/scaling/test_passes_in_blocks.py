"""Which backward pass has brought a block its gradients: one block has one scale, or is refused."""

import copy

import pytest
import torch
from small_training import close, grads, pass_back
from torch import nn

import ampatch

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


AUX = {
    "after": lambda scaled, aux: (scaled.backward(), aux.backward()),
    "before": lambda scaled, aux: (aux.backward(), scaled.backward()),
    "of some weights": lambda scaled, aux: (scaled.backward(), aux.backward(inputs=[aux.weight])),
    "by torch.autograd": lambda scaled, aux: (scaled.backward(), torch.autograd.backward([aux])),
}


@pytest.mark.parametrize("order", AUX)
@pytest.mark.parametrize("earlier", [False, True])
def test_an_unscaled_pass_beside_the_scaled_one_is_refused(order, earlier):
    models, (optimizer, _) = pair()
    if earlier:
        pass_back(models[0](X).sum(), optimizer)
    before = copy.deepcopy(grads(optimizer))
    loss, aux = models[0](X).pow(2).mean(), models[0](X).sum()
    aux.weight = models[0].weight
    with pytest.raises(ampatch.AmpatchError, match="Add another loss to this one first"):
        with ampatch.scale_loss(loss, optimizer) as scaled:
            AUX[order](scaled, aux)
    results = grads(optimizer)
    assert results == before == [None, None] if not earlier else close(results, before)


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
