"""What apex's own tests ask of apex.amp, asked of the package: mixed models, infs, groups.

The models mix FP32 and half weights, which are left as they are (`cast_model_type=False`).
"""

import pytest
import torch
from torch import nn

import ampatch


class Mixed(nn.Module):
    """An FP32 weight and a half one; small whole numbers, which half holds exactly."""

    def __init__(self, offset=1.0):
        super().__init__()
        self.single = nn.Parameter(offset + torch.arange(2.0))
        self.rounded = nn.Parameter((1 + offset + torch.arange(2.0)).half())

    def forward(self, x):
        return (x * self.single.float() * self.rounded.float()).sum()


X = torch.tensor([0.5, 0.25])


def sgd(*models, lr=0.25):
    groups = [{"params": list(m.parameters()), "lr": lr / n} for n, m in enumerate(models, 1)]
    return torch.optim.SGD(groups, momentum=0.125)


def weights(*models):
    return [p.detach().clone() for model in models for p in model.parameters()]


def is_close(ours, expected):
    for value, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(value.float(), other.float(), atol=4e-3, rtol=4e-3)


SHAPES = {  # models of each optimizer; models of each loss
    "2 models, 2 losses, 1 optimizer": ([[0, 1]], [[0], [1]]),
    "3 models, 2 losses, 1 optimizer": ([[0, 1, 2]], [[0, 2], [1, 2]]),
    "2 models, 2 losses, 2 optimizers": ([[0], [1]], [[0], [1]]),
    "3 models, 2 losses, 2 optimizers": ([[0, 1], [2]], [[0, 1], [2, 1]]),
}


def feeding(optimizer_models, loss_models, optimizers):
    """The optimizers that a loss reaches."""
    return [
        o for o, own in zip(optimizers, optimizer_models, strict=True) if {*own} & {*loss_models}
    ]


def reference(shape, steps, faulty):
    """FP32 with the skips that apex takes: all optimizers that the faulty loss was given with."""
    of_optimizers, of_losses = SHAPES[shape]
    models = [Mixed(n).float() for n in range(1, 4)]
    optimizers = [sgd(*[models[n] for n in own]) for own in of_optimizers]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        skipping = []
        for number, own in enumerate(of_losses):
            loss = sum(models[n](X * (step + 1)) for n in own)
            loss.backward()
            if (step, number) == faulty:
                skipping = feeding(of_optimizers, own, optimizers)
        for optimizer in optimizers:
            if optimizer not in skipping:
                optimizer.step()
    return weights(*models)


FAULTS = [  # the step and the loss that has an inf, and the weight
    (None, None),
    *(((0, 0), "single"), ((0, 1), "rounded"), ((1, 0), "rounded"), ((1, 1), "single")),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("num_losses", [1, 2])
def test_models_losses_and_optimizers(amp, shape, level, num_losses):
    of_optimizers, of_losses = SHAPES[shape]
    for faulty, place in FAULTS:
        amp._amp_state.allow_incoming_model_not_fp32 = True
        models = [Mixed(n) for n in range(1, 4)]
        optimizers = [sgd(*[models[n] for n in own]) for own in of_optimizers]
        settings = {"cast_model_type": False, "num_losses": num_losses, "verbosity": 0}
        amp.initialize(models, optimizers, opt_level=level, **settings)
        for scaler in amp._amp_state.loss_scalers:
            scaler._loss_scale = 16.0
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for number, own in enumerate(of_losses):
                loss = sum(models[n](X * (step + 1)) for n in own)
                fed = feeding(of_optimizers, own, optimizers)
                loss_id = number if num_losses == 2 else 0
                with amp.scale_loss(loss, fed, loss_id=loss_id) as scaled:
                    scaled.backward()
                    if (step, number) == faulty:
                        getattr(models[own[0]], place).grad[0] = float("inf")
            for optimizer in optimizers:
                optimizer.step()
        is_close(weights(*models), reference(shape, 3, faulty))
        if faulty is not None:
            scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
            assert sorted(scales)[0] == 8.0 and (num_losses == 1 or scales[1 - faulty[1]] == 16.0)
        ampatch.deactivate()


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_one_optimizer_skips_both_as_in_apex(amp, fused):
    """`ampatch.scale_loss` leaves out the one alone, as `torch.amp.GradScaler` does."""
    for package, expected in ((amp, [True, True]), (ampatch, [True, False])):
        models = [nn.Linear(2, 1) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, fused=fused) for m in models]
        package.initialize(models, optimizers, opt_level="O1", verbosity=0, loss_scale="dynamic")
        before = weights(*models)
        loss = models[0](X[None]).float().sum() + models[1](X[None]).float().sum()
        with package.scale_loss(loss * 0.1, optimizers) as scaled:
            scaled.backward()
            models[0].weight.grad[0, 0] = float("inf")
        for optimizer in optimizers:
            optimizer.step()
        assert [ampatch.step_was_skipped(optimizer) for optimizer in optimizers] == expected
        moved = [not torch.equal(a, b) for a, b in zip(before, weights(*models), strict=True)]
        assert moved == [False, False, not expected[1], not expected[1]]
        assert ampatch.loss_scale() == 2.0**15
        ampatch.deactivate()


def test_settings_as_strings(amp):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strings = {"keep_batchnorm_fp32": "True", "min_loss_scale": "128.0", "max_loss_scale": "4096"}
    strings |= {"loss_scale": "dynamic", "cast_model_outputs": "float16"}
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **strings)
    assert model(torch.ones(1, 2)).dtype is torch.float16
    scaler = amp._amp_state.loss_scalers[0]
    assert (scaler._min_loss_scale, scaler._max_loss_scale) == (128.0, 4096.0)
    assert scaler.loss_scale() == 4096.0
    ampatch.set_loss_scale_settings(max_loss_scale="1024.0", min_loss_scale="256")
    assert ampatch.loss_scale() == 1024.0
    for _ in range(5):
        loss = model(torch.ones(1, 2)).float().sum() * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert scaler.loss_scale() == 256.0
    with pytest.raises(ValueError, match="max_loss_scale='many': expected a positive number"):
        ampatch.set_loss_scale_settings(max_loss_scale="many")


def test_models_left_as_they_are(amp, opt_level):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).half())
    before = [param.dtype for param in model.parameters()]
    amp.initialize(model, opt_level=opt_level, cast_model_type=False, verbosity=0)
    assert [param.dtype for param in model.parameters()] == before
