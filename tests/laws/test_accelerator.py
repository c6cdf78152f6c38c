"""Training on a fake accelerator: what the host waits for, and what goes between the devices."""

import functools
import math
from contextlib import nullcontext

import pytest
import torch
from fake_accelerator import NAME, capturing, counted
from situations import batches, mlp, mse
from small_training import pass_back
from small_training import step as train
from torch import nn

import ampatch
from ampatch.torch_private import devices

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]

FUSED = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adagrad, {}),
]
OTHERS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {"foreach": True, "capturable": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.RMSprop, {"foreach": True}),
]
HEALTHY = [1.0] * 6
FACTORS = [*HEALTHY[:4], math.inf, 1.0, math.nan, math.nan, 1.0]
"""Of the losses: at a growth interval of 2 a scale of 256 grows to 1024 and falls to 128."""
LEVELS = ["O1", "O2"]
FIRST = 2  # the first steps look at the inputs; at O2 they and the tenth look at the half weights


class Attention(nn.Module):
    """Embedding, norm, attention, convolution, loss: a layer of each kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution, self.batch_norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        x = self.norm(self.into(x)).unsqueeze(0)
        x = self.attention(x, x, x, need_weights=False)[0].squeeze(0)
        x = self.batch_norm(self.convolution(x.unsqueeze(1)))
        return self.out(torch.relu(x).flatten(1))


def steps(make_model, kind, options, factors, **settings):
    """The counts of each training step; without settings, of plain torch."""
    model = make_model().to(NAME)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    if settings:
        ampatch.initialize(model, optimizer, verbosity=0, **settings)
    data = [(x.to(NAME), y.to(NAME)) for x, y in batches(len(factors))]
    results = []
    for (x, y), factor in zip(data, factors, strict=True):
        with counted() as counts:
            optimizer.zero_grad()
            loss = mse(model(x)[:, :2], y) * factor
            if settings:
                pass_back(loss, optimizer)
            else:
                loss.backward()
            optimizer.step()
        results.append(counts)
    return results


def of_each_kind(kinds):
    return pytest.mark.parametrize(
        ("model", "kind", "options"),
        [*((Attention, *kind) for kind in kinds), (mlp, *kinds[0])],
    )


def assert_nothing_moves(results):
    """Between the devices, not even a number: whatever a step needs is where the model is."""
    for counts in results:
        late = counts["launch copy to the host, not waited for"]
        assert (counts.uploads, counts.downloads - late) == (0, 0)


@pytest.mark.parametrize("level", LEVELS)
@of_each_kind(FUSED)
def test_with_fused_optimizers_the_host_never_waits(model, kind, options, level):
    options, settings = {"fused": True, **options}, {"opt_level": level, "growth_interval": 2}
    results = steps(model, kind, options, FACTORS, init_scale=256.0, **settings)[FIRST:]
    assert [counts.waits for counts in results] == [0] * len(results)
    assert ampatch.loss_scale() == 128.0
    assert_nothing_moves(results)


@pytest.mark.parametrize("level", LEVELS)
@of_each_kind(OTHERS)
def test_with_others_the_host_waits_once(model, kind, options, level):
    settings = {"opt_level": level, "growth_interval": 2, "init_scale": 256.0}
    plain = steps(model, kind, options, HEALTHY)[-1].waits
    actual = steps(model, kind, options, FACTORS, **settings)
    expected = [1 + (plain if factor == 1.0 else 0) for factor in FACTORS]
    assert [counts.waits for counts in actual[FIRST:]] == expected[FIRST:]
    assert_nothing_moves(actual[FIRST:])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("fused", [True, False])
def test_without_loss_scaling_the_host_never_waits(fused, level):
    options = {"fused": True} if fused else {}
    settings = {"opt_level": level, "dtype": torch.bfloat16}
    results = steps(Attention, torch.optim.SGD, options, HEALTHY, **settings)[FIRST:]
    assert [counts.waits for counts in results] == [0] * len(results)


def test_a_long_row_of_skips_is_noticed_without_a_wait(caplog):
    model = mlp().to(NAME)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    ampatch.initialize(model, optimizer, max_consecutive_skips=8)
    x = torch.ones(1, 4, device=NAME)
    waits = []
    for _ in range(12):
        with counted() as counts:
            train(model(x).sum() * math.nan, optimizer)
        waits.append((counts.waits, "steps of Adam in a row" in caplog.text))
    assert waits[-1][1]
    assert all(not count for count, told in waits[1:] if not told)
    assert ampatch.step_counts(optimizer).skipped == 12


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_can_be_captured(level):
    """Whoever waits while a graph is captured gets an error, as on CUDA: inputs are not looked at,
    nor the counts, at which so few skips would have each step look."""
    model = mlp().to(NAME)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True, capturable=True)
    ampatch.initialize(model, optimizer, opt_level=level, max_consecutive_skips=4, verbosity=0)
    x, y = (tensor.to(NAME) for tensor in next(batches(1)))
    with capturing():
        assert model(x).dtype is (torch.float16 if level == "O1" else torch.float32)
        with pytest.raises(RuntimeError, match="captured"):
            x.sum().item()
    for capture in (nullcontext, capturing):
        with capture():
            for _ in range(4):
                train(mse(model(x), y), optimizer)
    assert ampatch.step_counts(optimizer) == (8, 0, 0)


def test_each_stream_has_its_own_buckets():
    tensor, other = torch.ones(2, device=NAME), torch.Stream(device=NAME)
    here = devices.device_and_stream(tensor)
    with other:
        assert devices.device_and_stream(tensor) != here
    assert devices.device_and_stream(tensor) == here


def test_fused_optimizers_of_apex_use_the_kernels_of_the_device():
    import ampatch.compat.apex  # noqa: F401
    from ampatch.compat.apex.optimizers import FusedAdam

    assert FusedAdam(mlp().to(NAME).parameters(), lr=0.1).param_groups[0]["fused"]
    assert not FusedAdam(mlp().parameters(), lr=0.1).param_groups[0]["fused"]


def test_autocast_and_casts_are_the_devices_and_work_of_the_host_stays_float32():
    model = mlp().to(NAME)
    ampatch.initialize(model, dtype=torch.bfloat16, patch_scope="process", verbosity=0)
    assert torch.is_autocast_enabled(NAME) and not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype(NAME) is torch.bfloat16
    for device, dtype in (("cpu", torch.float32), (NAME, torch.bfloat16)):
        operands = [torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)]
        assert torch.nn.functional.linear(*operands).dtype is dtype


def linears(layers, width=8):
    torch.manual_seed(0)
    middle = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(nn.Linear(4, width), *middle)


def launches(layers, width, level):
    """Of one step beyond what a step of FP32 launches."""
    results = []
    for settings in ({}, {"opt_level": level, "dtype": torch.bfloat16}):
        make = functools.partial(linears, layers, width)
        counts = steps(make, torch.optim.SGD, {"fused": True}, [1.0] * 4, **settings)
        results.append(counts[-1].launches)
        ampatch.deactivate()
    return results[1] - results[0]


@pytest.mark.parametrize(
    ("layers", "width", "level", "most"),
    [
        (40, 8, "O1", 6 + 9),  # 82 weights in three buckets, each cast down and its gradients up
        (40, 8, "O2", 20),
        (40, 8, "O3", 6),
        (6, 1100, "O1", 6 + 2 * 2),  # of 4.8 MB: a list is one kernel, so that they share buckets
    ],
)
def test_weights_are_cast_and_compared_in_lists(layers, width, level, most):
    assert launches(layers, width, level) <= most


def test_large_weights_are_compared_in_few_kernels():
    """Of 1.2 million elements each: not in parts that are made for the cache of a CPU."""
    assert launches(4, 1100, "O2") - launches(2, 1100, "O2") <= 2 * 8


def test_a_model_on_two_devices(opt_level, half):
    """Against FP32 on the same devices; what is on the host stays there."""

    def trained(**settings):
        torch.manual_seed(0)
        first, second = nn.Linear(4, 8), nn.Linear(8, 2).to(NAME)
        model = nn.ModuleList([first, second])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if settings:
            ampatch.initialize(model, optimizer, verbosity=0, init_scale=256.0, **settings)
        for x, y in batches(4):
            loss = mse(second(torch.tanh(first(x)).to(NAME)).float(), y[:, :2].to(NAME))
            pass_back(loss, optimizer) if settings else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        held = ampatch.master_params(optimizer) if settings else model.parameters()
        return [param.detach().float() for param in held]

    plain, ours = trained(), trained(opt_level=opt_level, dtype=half)
    assert [param.device.type for param in ours] == ["cpu", "cpu", NAME, NAME]
    for reference, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(reference, other, atol=0.02, rtol=0)


CLASSES = torch.tensor([1, 2, 3, -100])
CROSS_ENTROPIES = {
    "mean": ((4, 8), CLASSES, {}),
    "none": ((4, 8), CLASSES, {"reduction": "none"}),
    "sum": ((4, 8), torch.arange(4), {"reduction": "sum", "ignore_index": 2}),
    "bytes": ((4, 8), CLASSES.abs().to(torch.uint8), {"ignore_index": 100}),
    "one row": ((8,), torch.tensor(3), {}),
    "pictures": ((2, 8, 2), torch.tensor([[1, 2], [3, 4]]), {}),
    "smooth": ((4, 8), CLASSES, {"label_smoothing": 0.1}),
    "probabilities": ((4, 8), torch.rand(4, 8), {}),
}


def of_half_and_of_fp32(function, shape):
    """Results and gradients of half inputs, and of a copy of them in FP32."""
    ampatch.initialize(mlp().to(NAME), patch_scope="process", verbosity=0)
    x, results = torch.randn(shape, device=NAME).half(), []
    for copied in (lambda leaf: leaf, torch.Tensor.float):
        leaf = x.clone().requires_grad_()
        result = function(copied(leaf))
        assert result.dtype is torch.float32
        result.square().sum().backward()
        results.append((result.detach().cpu(), leaf.grad.cpu()))
    return results


@pytest.mark.parametrize("case", CROSS_ENTROPIES)
def test_cross_entropy_of_half_logits_is_that_of_a_copy_in_fp32(case):
    shape, target, options = CROSS_ENTROPIES[case]

    def loss_of(logits):
        return torch.nn.functional.cross_entropy(logits, target.to(NAME), **options)

    assert all(map(torch.equal, *of_half_and_of_fp32(loss_of, shape)))


TOTALS = {
    "norm": lambda x: torch.norm(x),
    "norm of rows": lambda x: x.norm(3, dim=1, keepdim=True),
    "nuclear": lambda x: torch.norm(x, p="nuc"),
    "matrix": lambda x: torch.linalg.matrix_norm(x),
    "vector": lambda x: torch.linalg.vector_norm(x, 2, dim=1),
    "normalize": torch.nn.functional.normalize,
    "sum": lambda x: torch.sum(x, 0, True),
    "sum of all": lambda x: x.sum(),
    "product": lambda x: x.prod(dim=1),
    "cumprod": lambda x: torch.cumprod(x, 0),
    "cumsum": lambda x: x.cumsum(dim=0),
    "softmax": lambda x: torch.special.softmax(x, 1),
    "module": torch.nn.Softmax(0),
    "open dtype": lambda x: torch.softmax(x, 1, None),
    "open dtype by name": lambda x: x.log_softmax(1, dtype=None),
    "input by name": lambda x: torch.softmax(input=x, dim=1),
}


@pytest.mark.parametrize("name", TOTALS)
def test_float_functions_have_the_results_of_a_copy_in_fp32(name):
    for ours, expected in zip(*of_half_and_of_fp32(TOTALS[name], (4, 8)), strict=True):
        # a sum may be made in another order
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
