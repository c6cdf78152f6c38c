"""DataParallel: on the CPU it is its module; replicas in threads; several devices."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from ddp_training import backward, build, everything
from small_training import in_threads
from torch import nn
from torch.nn.parallel import DataParallel

import ampatch as amp

BF16 = {"dtype": torch.bfloat16, "verbosity": 0}


def test_data_parallel_on_the_cpu_is_its_module(opt_level):
    """Wrapped before and after `initialize`: the same training, bit for bit."""
    results = []
    for order in ("none", "before", "after"):
        model, optimizer = build(seed=0)
        wrapped = DataParallel(model) if order == "before" else model
        amp.initialize(wrapped, optimizer, opt_level=opt_level, **BF16)
        wrapped = DataParallel(model) if order == "after" else wrapped
        for number in range(4):
            optimizer.zero_grad()
            backward(wrapped, optimizer, number)
            optimizer.step()
        results.append(everything(model, optimizer))
        kept = torch.bfloat16 if opt_level == "O3" else torch.float32
        assert {value.dtype for value in wrapped.state_dict().values()} == {kept}
        amp.deactivate()
    for found in results[1:]:
        assert all(map(torch.equal, results[0], found))


def replicas_of(model: nn.Module, count: int) -> list[nn.Module]:
    """As DataParallel makes them: shallow copies whose parameters are no leaves."""

    def replica(module: nn.Module) -> nn.Module:
        copied = module._replicate_for_data_parallel()
        for name, child in module._modules.items():
            copied._modules[name] = replica(child)
        for name, parameter in module._parameters.items():
            setattr(copied, name, parameter * 1)  # in CUDA: a broadcast, with a gradient
        return copied

    return [replica(model) for _ in range(count)]


def test_replicas_in_threads_train_the_model(opt_level):
    """Each replica's forward in its thread, one loss: the gradients of the whole batch."""
    gradients = []
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for split in (False, True):
        model, optimizer = build(seed=0)
        amp.initialize(model, optimizer, opt_level=opt_level, **BF16)
        if split:
            pairs = zip(replicas_of(model, 2), inputs.chunk(2), strict=True)
            output = torch.cat(in_threads(*(functools.partial(one, half) for one, half in pairs)))
        else:
            output = model(inputs)
        assert output.dtype is (torch.bfloat16 if opt_level == "O1" else torch.float32)
        with amp.scale_loss(output.float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        gradients.append([param.grad.float() for param in amp.master_params(optimizer)])
        amp.deactivate()
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole, atol=2e-3, rtol=0.02)


@pytest.mark.gpu
def test_data_parallel_on_cuda(opt_level):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model, optimizer = build(seed=0)
    model.cuda()
    amp.initialize(model, optimizer, opt_level=opt_level, init_scale=256.0, verbosity=0)
    parallel = DataParallel(model)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        output = parallel(torch.ones(8, 6, device="cuda")).float()
        loss = F.cross_entropy(output, torch.zeros(8, dtype=torch.long, device="cuda"))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
