"""How often the host waits for the device: read off the dispatcher and off `Tensor`'s methods.

A CPU tensor is read without any wait, but through the same calls, so they can be
counted here.  torch's own optimizers read their step counts so; what plain torch
reads in its step is no wait of ours and is taken off.
"""

import collections
import math

import pytest
import torch
from small_training import step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch

# Not tolist: of CPU memory it reads without a wait, and is how skips are looked at there.
METHODS = ("item", "__bool__", "__float__", "__int__", "cpu", "numpy")


class Reads(TorchDispatchMode):
    """Counts what makes the host wait, by what it was."""

    def __init__(self, monkeypatch, methods=METHODS):
        super().__init__()
        self.count = collections.Counter()
        for name in methods:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, original):
        def method(tensor, *args, **kwargs):
            self.count["method"] += 1
            return original(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in str(function) for word in ("_local_scalar_dense", "is_nonzero", "nonzero")):
            self.count["dispatched"] += 1
        return function(*args, **(kwargs or {}))

    @property
    def seen(self):
        return max(self.count["method"], self.count["dispatched"])


# A dispatch mode has torch register each operator at its first use; let it, once.
for _name in ("_amp_update_scale_", "_foreach_copy_", "_fused_adam_", "_fused_adamw_"):
    getattr(torch.ops.aten, _name)
for _name in ("_fused_sgd_", "_fused_adagrad_", "_amp_foreach_non_finite_check_and_unscale_"):
    getattr(torch.ops.aten, _name)


@pytest.mark.parametrize(
    "read", [float, int, bool, torch.Tensor.item, torch.nonzero, lambda t: [1, 2][t.long()]]
)
def test_the_counter_sees_a_read(read, monkeypatch):
    with Reads(monkeypatch) as reads:
        read(torch.ones(()))
    assert reads.seen >= 1


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def training_step(model, optimizer, x, factor=1.0):
    step(model(x).float().square().mean() * factor, optimizer)


def reads_in(monkeypatch, kind, options, factors, enabled=True, **settings):
    """The reads of each step, and whether it was skipped and moved weights."""
    model = two_layers()
    optimizer = kind(model.parameters(), lr=0.01, **options)
    ampatch.initialize(model, optimizer, verbosity=0, enabled=enabled, **settings)
    results = []
    for factor in factors:
        before = [p.detach().clone() for p in model.parameters()]
        with monkeypatch.context() as patch, Reads(patch) as reads:
            training_step(model, optimizer, torch.ones(3, 4), factor)
            seen = reads.seen
        moved = not all(map(torch.equal, before, model.parameters()))
        results.append((seen, ampatch.step_was_skipped(optimizer), moved))
    assert not {"found_inf", "grad_scale"} & vars(optimizer).keys()  # were there for the kernel
    return results


def waits(monkeypatch, kind, options, factors, **settings):
    """How often each step waits for the device; what plain torch reads in its step is no wait."""
    ours = reads_in(monkeypatch, kind, options, factors, **settings)
    scale = ampatch.loss_scale()
    ampatch.deactivate()
    plain = reads_in(monkeypatch, kind, options, [1.0] * len(factors), enabled=False)
    for (_, skipped, moved), factor in zip(ours, factors, strict=True):
        assert skipped is not moved and skipped is (factor != 1.0)
    counts = [
        seen - (0 if skipped else of_torch)  # no step, none of torch's reads
        for (seen, skipped, _), (of_torch, *_) in zip(ours, plain, strict=True)
    ]
    return counts, scale


FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
HEALTHY, FAULTY = [1.0] * 6, [1.0, 1.0, math.inf, 1.0, math.nan, math.nan, 1.0]
OTHERS = [
    (torch.optim.SGD, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
]
DYNAMIC = {"opt_level": "O2", "growth_interval": 2, "init_scale": 256.0}


@pytest.mark.parametrize("factors", [HEALTHY, FAULTY], ids=["growing", "with overflows"])
@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {"fused": True}) for kind in FUSED),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
        *OTHERS,
    ],
)
def test_fused_optimizers_never_wait_and_others_once(
    kind, options, factors, scale_lives_on, monkeypatch
):
    """On an accelerator; where the host owns the memory there is nothing to wait for."""
    counts, scale = waits(monkeypatch, kind, options, factors, **DYNAMIC)
    waits_for = scale_lives_on == "device" and "fused" not in options
    assert counts == [waits_for] * len(factors)
    assert scale == (2048.0 if factors is HEALTHY else 64.0)


@pytest.mark.parametrize("kind, options", [*OTHERS, (torch.optim.SGD, {"fused": True})])
@pytest.mark.parametrize(
    "settings",
    [{"loss_scale": 1.0}, {"loss_scale": 128.0}, {"dtype": torch.bfloat16, "opt_level": "O1"}],
    ids=str,
)
def test_without_dynamic_scaling_the_host_does_not_wait(kind, options, settings, monkeypatch):
    counts, _ = waits(monkeypatch, kind, options, HEALTHY, **{"opt_level": "O2", **settings})
    assert counts == [0] * len(HEALTHY)


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
