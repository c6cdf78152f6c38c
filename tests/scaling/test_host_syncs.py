"""Steps that the device itself skips: what the kernels leave, and that the host waits for none.

The waits of all kinds are counted on a fake accelerator: tests/laws/test_accelerator.py.
"""

import math

import pytest
import torch
from small_training import step
from torch import nn

import ampatch


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def training_step(model, optimizer, x, factor=1.0):
    step(model(x).float().square().mean() * factor, optimizer)


FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


@pytest.mark.usefixtures("scale_lives_on")
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_fused_sgd_whose_first_step_overflows_has_no_garbage_for_momentum(dampening):
    """torch's kernel leaves the buffer it was to fill uninitialized.  Beside SGD in its loop."""
    results = []
    for fused, factors in ((True, [math.inf, 1.0, 1.0]), (False, [1.0, 1.0])):
        model = two_layers()
        options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "fused": fused}
        optimizer = torch.optim.SGD(model.parameters(), **options)
        ampatch.initialize(model, optimizer, verbosity=0)
        for factor in factors:
            ampatch.set_loss_scale(256.0)
            junk = [torch.full(p.shape, 1e30) for p in model.parameters()]
            del junk  # what uninitialized memory is likely to hold next
            training_step(model, optimizer, torch.ones(1, 4), factor)
        results.append([p.detach().clone() for p in ampatch.master_params(optimizer)])
        ampatch.deactivate()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("scale_lives_on")
def test_a_group_that_is_not_fused_does_not_step_on_inf():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first]}, {"params": [second], "fused": False}]
    optimizer = torch.optim.Adam(groups, lr=0.1, fused=True)
    ampatch.initialize(nn.ParameterList([first, second]), optimizer, verbosity=0)
    step((first + second).sum() * math.inf, optimizer)
    assert ampatch.step_was_skipped(optimizer)
    assert torch.equal(first, torch.ones(3)) and torch.equal(second, torch.ones(3))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_is_captured_in_a_cuda_graph(kind, level):
    """Replays train, skip on overflow and count, with no wait and no Python."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).cuda()
    optimizer = kind(model.parameters(), lr=0.01, fused=True, capturable=True)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(8, 16, device="cuda")

    def one_step():
        loss = model(x).float().square().mean()
        step(loss, optimizer)
        return loss

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            first = one_step().item()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = one_step()
    before = ampatch.step_counts(optimizer)
    for _ in range(20):
        graph.replay()
    assert loss.item() < first and not ampatch.step_was_skipped(optimizer)
    weights = [p.detach().clone() for p in ampatch.master_params(optimizer)]
    scale, healthy = ampatch.loss_scale(), x.clone()
    x.fill_(math.nan)
    graph.replay()
    assert ampatch.step_was_skipped(optimizer) and ampatch.loss_scale() == scale / 2
    assert all(map(torch.equal, weights, ampatch.master_params(optimizer)))
    x.copy_(healthy)
    graph.replay()
    counts = ampatch.step_counts(optimizer)
    assert (counts.taken - before.taken, counts.skipped - before.skipped) == (21, 1)


def has_fused_kernel_on_cuda(kind):
    """Not all releases of torch have that of Adagrad."""
    weight = nn.Parameter(torch.ones(1, device="cuda"))
    weight.grad = torch.ones_like(weight)
    try:
        kind([weight], lr=0.1, fused=True).step()
    except RuntimeError:
        return False
    return True


LOOKED_AT = 10
"""Forwards until O2 looks no more for what was written into half weights unseen."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", FUSED)
def test_cuda_itself_sees_no_wait(kind, level):
    """CUDA's own check raises at the first one; the count of skips arrives all the same."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    if not has_fused_kernel_on_cuda(kind):
        pytest.skip("not fused on CUDA in this torch")
    model = two_layers().cuda()
    optimizer = kind(model.parameters(), lr=0.01, fused=True)
    settings = {"max_consecutive_skips": 8, "init_scale": 256.0, "verbosity": 0}
    ampatch.initialize(model, optimizer, opt_level=level, **settings)
    healthy = torch.randn(3, 4, device="cuda")
    faulty = torch.full_like(healthy, math.nan)

    for _ in range(LOOKED_AT):
        training_step(model, optimizer, healthy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in (healthy, faulty, healthy, *[faulty] * 6, healthy):
            training_step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ampatch.step_counts(optimizer) == (LOOKED_AT + 3, 7, 0)
