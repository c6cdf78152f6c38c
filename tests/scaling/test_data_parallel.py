"""DataParallel: on the CPU it is its module; several devices.  Replicas: casting/test_threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ddp_training import backward, build, everything
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
