"""`ampatch.gradient_range`: counted by hand, and against casts to float16."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import Made, managed, pass_back, step
from torch import nn

import ampatch
from ampatch.diagnose.histogram import Counts, percent


def counted(numbers, scale=1.0):
    counts = Counts()
    counts.add(torch.tensor(numbers, dtype=torch.float32), scale)
    return counts.read()


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=20), st.integers(0, 30))
def test_counts_are_what_casts_to_float16_give(numbers, exponent):
    counts = counted(numbers, 2.0**exponent)
    tensor = torch.tensor(numbers, dtype=torch.float32)
    nonzero = tensor[tensor != 0]
    assert counts.counted == len(nonzero) and counts.kinds["zero"] == int((tensor == 0).sum())
    assert counts.kinds["flushed"] == int((nonzero.half() == 0).sum())
    assert counts.kinds["flushed now"] == int(((nonzero * 2.0**exponent).half() == 0).sum())
    if len(nonzero):
        by_bins = counts.flushed_at(exponent) * counts.counted
        assert round(by_bins) == counts.kinds["flushed now"]
        half = nonzero.half().abs()
        normal = torch.finfo(torch.float16).smallest_normal
        assert counts.kinds["subnormal"] == int(((half > 0) & (half < normal)).sum())
        assert counts.largest == nonzero.abs().max().item()


def test_the_edges_of_float16():
    """2**-25 rounds to zero, what is just above it does not."""
    above = float(torch.nextafter(torch.tensor(2.0**-25), torch.tensor(1.0)))
    counts = counted([2.0**-25, above, 2.0**-14, 65504.0, 65520.0, 0.0, math.inf, math.nan])
    assert counts.kinds == {
        "zero": 1, "not finite": 2, "flushed": 1, "subnormal": 1,
        "flushed now": 1, "subnormal now": 1, "over now": 1,
    }  # fmt: skip


def test_the_static_scale_and_a_range_too_wide_for_any():
    counts = counted([2.0**-30] * 10 + [1.0] * 990)
    kept = counts.static_scale(0.0)
    assert (kept.scale, kept.lost, kept.fits) == (2.0**6, 0.0, True)
    assert (torch.tensor(2.0**-30) * kept.scale).half() > 0
    assert (torch.tensor(2.0**-30) * kept.scale / 2).half() == 0
    assert counts.static_scale(0.01).scale == 1.0
    assert "(limit: " in str(kept)
    counts = counted([2.0**-40, 1000.0])
    best = counts.static_scale(0.0)
    assert (best.scale, best.lost, best.fits) == (64.0, 0.5, False)
    assert 1000.0 * best.scale < 65504 <= 1000.0 * best.scale * 2
    assert "No static loss scale" in str(best) and "bfloat16" in str(best)
    assert counted([1e6]).static_scale(0.0).scale == 2.0**-4


def constant(gradients):
    """A model whose weights' gradients are the numbers given."""
    weight, numbers = nn.Parameter(torch.ones(len(gradients))), torch.tensor(gradients)
    return Made(lambda self, x: (self.weight.float() * numbers).sum() * x, weight=weight)


def counted_steps(model, steps=1, loss=lambda model: model(torch.tensor(1.0)), **settings):
    """The report after some steps, of a plain model or with `initialize(**settings)`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if settings:
        ampatch.initialize(model, optimizer, verbosity=0, **settings)
    with ampatch.gradient_range(model) as gradients:
        for _ in range(steps):
            if settings:
                pass_back(loss(model), optimizer)
            else:
                loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    return gradients.report()


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0, "dynamic"])
def test_gradients_are_unscaled_at_every_level(opt_level, loss_scale):
    if opt_level == "O3" and loss_scale == "dynamic":
        loss_scale = 128.0
    model = constant([2.0**-9, 2.0**-7, 0.0, 0.25])
    report = counted_steps(model, 3, opt_level=opt_level, loss_scale=loss_scale)
    assert report.steps == 3 and report.skipped == 0
    assert report.scale == (65536.0 if loss_scale == "dynamic" else loss_scale)
    assert report.total.bins == {-9: 3, -7: 3, -2: 3} and report.total.kinds["zero"] == 3
    assert set(report.by_parameter) == {"weight"}


def test_the_scale_decides_what_is_flushed_now():
    model = constant([2.0**-30, 2.0**-20, 1.0, 100.0])
    report = counted_steps(model, opt_level="O1", loss_scale=1024.0)
    assert report.total.share("flushed") == 0.25 and report.total.share("flushed now") == 0
    assert report.total.kinds["subnormal"] == 1 and report.total.kinds["subnormal now"] == 1
    assert report.total.share("over now") == 0.25  # 100 * 1024
    assert report.worst() == [("weight", 0.25)]
    text = str(report)
    assert "At loss scale 1024 (the current one) float16 flushes 0.00 %" in text
    assert "At loss scale 1 float16 flushes 25.00 %" in text
    assert "Flushed most at scale 1: weight (25.00 %)" in text


@pytest.mark.parametrize(
    "level, dtype, floor",
    [("O0", "float16", None), ("O1", "bfloat16", None)]
    + [(level, "float16", 2.0**-31) for level in ("O1", "O2", "O3")],
)
def test_what_float16_has_hidden_is_said(level, dtype, floor):
    """At scale 128 nothing below 2**-24 / 128 is left, whatever the model's gradients were."""
    report = counted_steps(
        nn.Linear(4, 4, bias=False), loss=lambda model: model(torch.ones(1, 4)).sum() * 2.0**-35,
        opt_level=level, dtype=dtype, loss_scale=128.0,
    )  # fmt: skip
    assert report.floor == floor and ("counted as zeros" in str(report)) == (floor is not None)
    assert report.total.kinds["zero"] == (0 if floor is None else 16)


def test_skipped_steps_are_left_out():
    settings = {"opt_level": "O1", "init_scale": 2.0**120, "max_loss_scale": 2.0**127}
    report = counted_steps(constant([1.0, 70000.0]), 12, **settings)
    assert report.skipped > 0 and report.steps == 12 - report.skipped
    assert report.total.kinds["not finite"] == 0
    assert report.total.bins == {0: report.steps, 17: report.steps}


def test_closures_plain_optimizers_and_sparse_gradients():
    model = constant([0.5, 0.5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampatch.gradient_range(model) as gradients:
        optimizer.step(lambda: model(torch.tensor(1.0)).backward())
    assert gradients.report().total.bins == {-1: 2}
    model = nn.Embedding(100, 4, sparse=True)
    report = counted_steps(model, loss=lambda model: model(torch.tensor([3, 5])).sum())
    assert report.total.bins == {0: 8}  # what they hold


@pytest.mark.parametrize(
    "settings, left_out",
    [({}, True), ({"kdim": 4}, True), ({"bias": False}, False)]
    + [({"add_bias_kv": True}, False), ({"add_zero_attn": True}, False)],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_key_bias_that_the_softmax_cancels_is_left_out(settings, left_out):
    """Its gradient is rounding errors of zero, which float16 would flush at any scale."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True, **settings)})
    x, keys = torch.randn(2, 5, 8), torch.randn(2, 5, settings.get("kdim", 8))
    seen = []

    def loss(model):
        bias = model["attention"].in_proj_bias
        if bias is not None:
            bias.register_hook(seen.append)
        return model["attention"](x, keys, torch.randn(2, 5, 8))[0].square().sum()

    report = counted_steps(model, loss=loss)
    name = "attention.in_proj_bias"
    assert report.left_out == report.as_dict()["left_out"] == ([name] if left_out else [])
    assert (f"Left out: parts of {name}." in str(report)) == left_out
    if settings.get("bias", True):
        key = seen[0][8:16]
        assert (key.abs().max().item() < 1e-5) == left_out
        counts = report.by_parameter[name]
        assert counts.counted + counts.kinds["zero"] == (16 if left_out else 24)


def conv1d(size):
    """The products of GPT-2 in transformers: inputs by outputs."""
    weight = nn.Parameter(torch.randn(size, 3 * size) / size**0.5)
    bias = nn.Parameter(torch.zeros(3 * size))
    return Made(lambda self, x: F.linear(x, self.weight.t(), self.bias), weight=weight, bias=bias)


def attention(model, x):
    """Self-attention with one product for queries, keys and values, and a layer behind it."""
    query, key, value = model.qkv(x).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
    mixed = F.scaled_dot_product_attention(query, key, value)
    return model.head(mixed.transpose(1, 2).flatten(2))


HALVES = [{}] + [
    {"opt_level": level, "dtype": dtype, "loss_scale": 1024.0}
    for level, dtype in zip(("O1", "O1", "O2", "O3"), ("float16", "bfloat16") * 2)
]


@pytest.mark.parametrize("settings", HALVES, ids=lambda values: "-".join(map(str, values.values())))
@pytest.mark.parametrize("projection", [lambda: nn.Linear(16, 48), lambda: conv1d(16)])
def test_the_keys_of_a_fused_projection_are_left_out_by_their_values(projection, settings):
    torch.manual_seed(1)
    model = Made(attention, qkv=projection(), head=nn.Linear(16, 16))
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(3))
    report = counted_steps(model, 3, lambda model: model(x).square().mean(), **settings)
    counts = report.by_parameter["qkv.bias"]
    assert report.left_out == ["qkv.bias"]
    # a neighbour may be small by chance
    assert 3 * 32 - 2 <= counts.counted + counts.kinds["zero"] <= 3 * 32


def test_a_bias_before_a_batch_norm_is_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten())
    report = counted_steps(model, loss=lambda model: model(torch.rand(8, 3, 6, 6)).square().mean())
    assert report.left_out == ["0.bias"] and not report.by_parameter["0.bias"].counted


@pytest.mark.parametrize("settings", HALVES, ids=lambda values: "-".join(map(str, values.values())))
@pytest.mark.parametrize("size", [1e-4, 1.0, 255.0])
def test_gradients_that_are_no_noise_are_counted(size, settings):
    """Whatever the size of the inputs, layers with dead units and a convolution among them."""
    torch.manual_seed(0)
    layers = nn.Conv1d(4, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(192, 256), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(256, 64))
    targets = torch.randint(64, (32,))
    x = torch.rand(32, 4, 8) * size

    def loss(model):
        return F.cross_entropy(model(x).float(), targets)

    report = counted_steps(model, loss=loss, **settings)
    assert report.left_out == []


def test_other_models_are_not_counted_and_none_counts_all():
    mine, other = constant([1.0]), constant([0.5])
    with ampatch.gradient_range(mine) as gradients, ampatch.gradient_range() as everything:
        for model in (mine, other):
            model(torch.tensor(1.0)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert gradients.report().total.bins == {0: 1} and gradients.report().steps == 1
    assert everything.report().total.bins == {0: 1, -1: 1}


def test_the_text_names_float16s_limits_and_json_has_the_same():
    report = counted_steps(constant([2.0**-e for e in range(40)]))
    lines = str(report).splitlines()
    zones = [line for line in lines if line.startswith("2^")]
    assert len(zones) <= 30
    for line in zones:
        upper = int(line.split("to 2^")[1].split()[0])
        assert ("zero in float16" in line) == (upper < -24)
        assert ("subnormal in float16" in line) == (-24 <= upper <= -14)
    assert sum(float(line.split("%")[0].split()[-1]) for line in zones) == pytest.approx(100, abs=1)
    as_json = json.loads(json.dumps(report.as_dict()))
    assert as_json["counted"] == 40 and as_json["bins"]["-39"] == 1
    assert as_json["flushed_share"] == 15 / 40
    assert as_json["suggestion"]["fits"] and as_json["suggestion"]["scale"] == 2.0**15
    assert list(as_json["parameters"]) == ["weight"]


def test_nothing_counted():
    report = counted_steps(nn.Linear(1, 1), 0)
    assert report.steps == 0 and report.total.counted == 0
    assert str(report) == (
        "0 nonzero gradient elements over 0 optimizer steps; 0 are zero, 0 are inf or NaN."
    )
    assert report.as_dict()["suggestion"] is None


def test_shares_are_never_rounded_away():
    shown = {0: "0.00 %", 1e-9: "under 0.01 %", 0.5: "50.00 %", 1 - 1e-9: "over 99.99 %"}
    assert [percent(share) for share in (*shown, 1)] == [*shown.values(), "100.00 %"]


def test_gradients_that_hooks_have_changed_suggest_no_scale():
    model, optimizer = managed(nn.Linear(4, 4), "O1", torch.float16)
    handle = model.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    with ampatch.gradient_range(model) as counting:
        step(model(torch.ones(2, 4)).float().sum() * 0.01, optimizer)
    report = counting.report()
    assert report.hooked == ["weight"] and report.as_dict()["suggestion"] is None
    assert "No static loss scale is suggested: hooks on weight" in str(report)
    assert "A static loss scale of" not in str(report)
    handle.remove()
