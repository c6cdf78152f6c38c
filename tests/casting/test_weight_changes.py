"""Weights that change in ways autograd does not count, between the calls that use their copies."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest
import torch
from torch import nn

import ampatch

H = torch.bfloat16


def network(*widths):
    torch.manual_seed(0)
    layers = [
        layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("rows", [slice(None, 5), slice(2, 7)], ids=["first", "middle"])
def test_pruned_weights_get_gradients_of_their_new_shape(level, rows):
    """`data[:5]` keeps the pointer."""
    model = network(*[8] * 11, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=H, verbosity=0)

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 8)).float().square().mean()
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    for _ in range(4):
        step()
    optimizer.zero_grad()
    for parameter in (model[-1].weight, model[-1].bias):
        parameter.data = parameter.data[rows]
    for master in list(ampatch.master_params(optimizer))[-2:]:
        if master.shape[0] == 10:
            master.data = master.data[rows]
    for _ in range(4):
        step()
        assert [g.grad.shape[0] for g in list(ampatch.master_params(optimizer))[-2:]] == [5, 5]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_within_the_forward_is_seen(fused):
    """A fused step raises no version."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            before = self.layer(x)
            optimizer.step()
            return before, self.layer(x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    x = torch.ones(2, 4)
    with torch.no_grad():
        before, after = model(x)
        halves = [one.to(H) for one in (x, *model.parameters())]
        assert torch.equal(after, nn.functional.linear(*halves)) and not torch.equal(after, before)


def test_a_weight_frozen_and_freed_within_the_forward_gets_what_it_would():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, wanted):
            self.second.requires_grad_(wanted)
            return self.second(self.first(x))

    model = ampatch.initialize(Model(), opt_level="O1", dtype=H, verbosity=0)
    for wanted in (False, True, False, True, True, False):
        model.zero_grad()
        model(torch.ones(1, 4), wanted).sum().backward()
        assert model.first.weight.grad is not None
        assert (model.second.weight.grad is not None) == wanted
        assert (model.second.bias.grad is not None) == wanted


def test_another_memory_format_is_followed():
    model = nn.Conv2d(3, 8, 3)
    ampatch.initialize(model, opt_level="O1", dtype=H, verbosity=0)
    x = torch.randn(2, 3, 7, 7)
    model(x)
    model.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=H):
        expected = nn.functional.conv2d(x, model.weight, model.bias)
    for _ in range(2):
        assert model(x).stride() == expected.stride()


def test_threads_that_meet_at_the_first_forwards():
    """The plan changes in one thread while another casts by it."""
    found = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors = []
    try:
        for _ in range(15):
            model = ampatch.initialize(network(*[4] * 6), opt_level="O1", dtype=H, verbosity=0)

            def run(model=model):
                try:
                    for _ in range(6):
                        with torch.no_grad():
                            model(torch.ones(1, 4))
                except Exception as error:  # shown below
                    errors.append(error)

            threads = [threading.Thread(target=run) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            ampatch.deactivate()
    finally:
        sys.setswitchinterval(found)
    assert errors == []


@pytest.mark.parametrize("forwards", [0, 3])
@pytest.mark.parametrize("how", ["in place", "other data", "held"])
def test_weights_written_through_data_within_the_forward(forwards, how):
    """Layers that keep their weights non-negative, or on a sphere."""

    class Clamped(nn.Linear):
        def forward(self, x):
            if how == "other data":
                self.weight.data = self.weight.data.clamp(min=0)
            elif how == "in place":
                self.weight.data.clamp_(min=0)
            else:
                held = self.weight.data
                held.clamp_(min=0)
                super().forward(x)
                held.mul_(2)
            return super().forward(x)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Clamped(4, 4), nn.Linear(4, 2))

    x = torch.randn(3, 4)
    model, plain = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    ampatch.initialize(model, optimizer, opt_level="O1", dtype=H, verbosity=0)
    for _ in range(forwards + 1):
        optimizer.zero_grad()
        with ampatch.scale_loss(model(x).float().square().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        other.zero_grad()
        with ampatch.disable_casts(), torch.autocast("cpu", dtype=H, cache_enabled=False):
            loss = plain(x).float().square().sum()
        loss.backward()
        other.step()
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad) and torch.equal(one, two)
