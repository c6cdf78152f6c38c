"""`overrides`: submodules, module classes and functions in another precision than the rest."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from operators import Operators
from small_training import Made, managed, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch

X = torch.randn(4, 4)
H = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
        self.act, self.second = nn.Softmax(-1), "two"

    def forward(self, x):
        self.dtypes = []
        for part in (self.body["one"], self.body[self.second], self.act):
            x = part(x)
            self.dtypes.append(x.dtype)
        return x


def start(model, level, overrides, **settings):
    settings = {"dtype": H, "verbosity": 0, **settings}
    return ampatch.initialize(model, opt_level=level, overrides=overrides, **settings)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ({}, [H, H, torch.float32]),
        ({"body.two": "float"}, [H, torch.float32, torch.float32]),
        ({"body.*": "float"}, [torch.float32] * 3),
        ({"body": "float"}, [torch.float32] * 3),  # a dict of modules, which is never called
        ({"body": "float", "body.one": "half"}, [H, torch.float32, torch.float32]),
        ({nn.ModuleDict: "float"}, [torch.float32] * 3),
        ({nn.Linear: "float"}, [torch.float32] * 3),
        ({nn.Linear: "float", "body.one": "half"}, [H, torch.float32, torch.float32]),
        ({nn.Softmax: "half"}, [H, H, H]),
        ({F.linear: "float"}, [torch.float32] * 3),
        ({torch.Tensor.softmax: "half"}, [H, H, H]),
    ],
)
def test_overrides_at_o1(overrides, expected):
    model = start(Net(), "O1", overrides)
    model(X).sum().backward()
    assert model.dtypes == expected


def test_overrides_of_a_function_without_a_row():
    start([], "O1", {torch.tanh: "float"}, patch_scope="process")
    assert torch.tanh(X.to(H)).dtype is torch.float32


def seeing(seen):
    def forward(self, x):
        seen.append((self.weight.dtype, x.dtype))
        return F.linear(x, self.weight, self.bias)

    return forward


@pytest.mark.parametrize("name, is_float", [("all.0.two", [False, True]), ("all", [True, True])])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_overrides_of_half_models(level, name, is_float):
    """Nothing calls a list; those in it, in lists in lists too, get and return what they need."""
    model, seen = Net(), []
    model.all = nn.ModuleList([model._modules.pop("body")])
    vars(model)["body"] = model.all[0]
    for part in model.body.values():
        part.__class__ = type("Seen", (nn.Linear,), {"forward": seeing(seen)})
    start(model, level, {name: "float"})
    assert model(X).dtype is torch.float32
    assert seen == [(torch.float32 if stays else H,) * 2 for stays in is_float]
    outside = [part.weight.dtype is torch.float32 for part in model.body.values()]
    assert outside == ([True, True] if level == "O2" else is_float)
    assert model.dtypes == [H, H, H]


def test_a_path_with_the_signs_of_globs_names_its_module_alone():
    model = Net()
    model.body = nn.ModuleDict({"one": model.body["one"], "[o]ne": model.body["two"]})
    model.second = "[o]ne"
    start(model, "O1", {"body.[o]ne": "float"})
    model(X)
    assert model.dtypes == [H, torch.float32, torch.float32]


class Attention(nn.Module):
    """One head; `bmm` twice, `softmax` once, linear layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in "qkv")
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        weights = torch.bmm(self.q(x), self.k(x).transpose(1, 2)).softmax(-1)
        return self.out(torch.bmm(weights, self.v(x)))


class DtypesOf(Operators):
    """Notes the dtypes in which some aten operators run."""

    def __init__(self, *ops) -> None:
        super().__init__()
        self.seen = {op: set() for op in ops}

    def look(self, function, args):
        if function in self.seen:
            dtypes = {value.dtype for value in args if isinstance(value, torch.Tensor)}
            self.seen[function] |= dtypes


BMM, SOFTMAX = torch.ops.aten.bmm.default, torch.ops.aten._softmax.default
ADDMM = torch.ops.aten.addmm.default
FUNCTIONS = {torch.bmm: "float", torch.Tensor.softmax: "half"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_overrides_of_functions_at_every_level(level):
    rules = FUNCTIONS if level == "O1" else {torch.bmm: "float"}
    (model, optimizer), x = managed(Attention(), level, overrides=rules), torch.randn(2, 3, 8)
    with DtypesOf(BMM, SOFTMAX, ADDMM) as ops:
        output = model(x)
    assert ops.seen == {BMM: {torch.float32}, SOFTMAX: {H}, ADDMM: {H}}
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), output)
    before = model.q.weight.detach().clone()
    step(output.float().square().mean(), optimizer)
    assert not torch.equal(before, model.q.weight)
    assert torch.bmm(x, x.mT).dtype is torch.float32  # FP32 in, FP32 out
    if level != "O1":
        assert torch.mm(X, X).dtype is torch.float32 and torch.mm is PLAIN_MM[0]


PLAIN_MM = [torch.mm]  # in a list, where early names are not looked for


def test_functions_at_o2_beside_a_session_at_o1():
    """The tables come and go with the O1 session; at O2 and O3 an override is for all calls."""
    half, x = start(Attention(), "O2", {torch.bmm: "float"}), torch.randn(2, 3, 8)
    with DtypesOf(BMM) as alone:
        expected = half(x)
    full = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(full.parameters(), lr=0.1)
    ampatch.initialize(full, optimizer, opt_level="O1", dtype=H, verbosity=0)
    with DtypesOf(BMM) as beside:
        assert torch.equal(half(x), expected)
        assert torch.bmm(x.to(H), x.mT).dtype is H and full(x).dtype is H
    assert alone.seen == beside.seen == {BMM: {torch.float32}}
    late = start(Attention(), "O3", {torch.bmm: "float"})
    assert F.linear(X, full.weight[:, :4]).dtype is torch.float32 and full(x).dtype is H
    assert late(x).dtype is torch.float32
    ampatch.initialize(full, optimizer, opt_level="O0", verbosity=0)
    assert torch.mm is PLAIN_MM[0] and torch.equal(half(x), expected)


def test_an_override_at_o1_is_that_of_its_session_and_ends_with_it():
    """It wins over the rows of what the function calls: F.softmax calls Tensor.softmax."""
    first, second = Net(), Net()
    start(first, "O1", None)
    start(second, "O1", {F.linear: "float", F.softmax: "half"})  # F.linear is a replacement by now
    first(X), second(X)
    assert first.dtypes == [H, H, torch.float32]
    assert second.dtypes == [torch.float32, torch.float32, H]
    ampatch.initialize(second, opt_level="O0", verbosity=0)
    start(second, "O1", None)
    second(X)
    assert second.dtypes == first.dtypes


def test_a_half_models_override_ends_with_its_session():
    start(nn.Linear(2, 2), "O3", None)
    model = start(nn.Linear(2, 2), "O2", {torch.mm: "float"})
    for dtype in (torch.float32, H):
        with DtypesOf(torch.ops.aten.mm.default) as ops:
            assert torch.mm(X.to(H), X.to(H)).dtype is H
        assert ops.seen == {torch.ops.aten.mm.default: {dtype}}
        ampatch.initialize(model, opt_level="O0", verbosity=0)


class Calls(nn.Linear):
    """A matrix product of an FP32 buffer, a list of half tensors, and a result of another dtype."""

    def forward(self, x):
        wide = F.linear(self.scale, self.weight)
        return wide, torch.linalg.multi_dot([x, x]), torch.softmax(x, -1, dtype=torch.float32)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_a_function_of_a_half_model_is_given(level):
    """FP32 arguments keep values that half cannot hold; the dtype that the call names counts."""
    model = Calls(4, 4)
    model.register_buffer("scale", torch.full((1, 4), 1e6))
    rules = dict.fromkeys((F.linear, torch.linalg.multi_dot, torch.softmax), "float")
    model, mm = start(model, level, rules, dtype=torch.float16), torch.ops.aten.mm.default
    with DtypesOf(mm) as ops:
        wide, product, shares = model(X)
    assert wide.isfinite().all() and ops.seen == {mm: {torch.float32}}
    half = X.half()
    assert torch.equal(product, (half.float() @ half.float()).half().float())
    assert torch.equal(shares, torch.softmax(half, -1, dtype=torch.float32))


def test_they_do_nothing_at_o0(caplog):
    model, x = Attention(), torch.randn(2, 3, 8)
    expected = model(x)
    overrides = {torch.bmm: "half", "q": "half", nn.Linear: "half"}
    with caplog.at_level("INFO", "ampatch"):
        ampatch.initialize(model, opt_level="O0", dtype=H, overrides=overrides)
    assert torch.equal(model(x), expected) and torch.mm is PLAIN_MM[0]
    assert "overrides=... has no effect" in caplog.text


@pytest.mark.parametrize("settings", [{}, {"master_weights": False}], ids=["copies", "converted"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_a_norm_in_half_at_o2(settings, norm):
    """Beside half copies it takes half inputs and keeps FP32 weights, as its statistics are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 1), norm(4, affine=True, track_running_stats=True))
    plain, seen = copy.deepcopy(model), []
    start(model, "O2", {norm: "half"}, **settings)
    model[1].register_forward_hook(
        lambda module, args, out: seen.append((module.weight.dtype, args[0].dtype, out.dtype))
    )
    x = torch.randn(8, 4, 16)
    torch.testing.assert_close(model(x), plain(x), rtol=0.05, atol=0.05)
    assert seen == [(H if settings else torch.float32, H, H)]
    for ours, theirs in zip(model[1].buffers(), plain[1].buffers(), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.01)


@pytest.mark.parametrize("orthogonal_map", ["matrix_exp", "cayley"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_orthogonal_weights_of_half_models_are_computed_in_fp32(level, orthogonal_map):
    """In half torch's `matrix_exp` gives inf and NaN on the CPU, and `solve` is not there."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.utils.parametrizations.orthogonal(model[1], orthogonal_map=orthogonal_map)
    _, optimizer = managed(model, level)
    for _ in range(3):
        step(model(X).pow(2).mean(), optimizer)
    weight = model[1].weight
    assert weight.dtype is (H if level == "O3" else torch.float32)
    torch.testing.assert_close(weight.float() @ weight.float().T, torch.eye(4), rtol=0, atol=0.02)


# An override inside an override: the code around it is the outer one's


class Decoder(nn.Module):
    """Its own code works with numbers that float16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.recomputes = False

    def forward(self, x):
        inner = partial(checkpoint, self.inner, use_reentrant=False)
        return (inner if self.recomputes else self.inner)(x) * 1e6 * 1e-6


class Coder(nn.Module):
    """`uses_part`: its own code calls a part of the decoder too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.decoder, self.last = nn.Linear(4, 4), Decoder(), nn.Linear(4, 4)
        self.uses_part = False

    def forward(self, x):
        x = self.decoder(self.first(x))
        return self.last(self.decoder.inner(x) if self.uses_part else x)


NESTED = {
    "float in float": {"decoder*": "float"},
    "half in float": {"decoder": "float", "decoder.inner": "half"},
    "float in half in float": {
        "decoder": "float", "decoder.inner": "half", "decoder.inner.1": "float"
    },
}  # fmt: skip


def results(model: nn.Module, run=None) -> list[torch.Tensor]:
    """What a call gives, and the gradients of the weights."""
    output = model(X) if run is None else run(X)
    output.float().square().mean().backward()
    return [output, *(weight.grad for weight in model.parameters())]


def nested(level: str, overrides: dict, **attributes) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model with these overrides in float16, and what it gives in FP32."""
    torch.manual_seed(0)
    model = Coder()
    vars(model).update(attributes)
    expected = results(copy.deepcopy(model))
    return start(model, level, overrides, dtype=torch.float16), expected


def assert_alike(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for tensor, reference in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.float(), reference, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("overrides", NESTED.values(), ids=NESTED)
def test_what_an_inner_override_gives_goes_on_in_the_outer_ones_precision(level, overrides):
    model, expected = nested(level, overrides)
    seen, weights, part = [], [], model.decoder.inner[0]
    model.decoder.inner.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    part.register_forward_hook(lambda *call: weights.append(part.weight.dtype))
    assert_alike(results(model), expected)
    assert seen == [torch.float32]
    is_half = "half" in overrides.values()
    assert weights == [torch.float16 if is_half and level != "O1" else torch.float32]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_part_of_an_override_that_the_models_own_code_calls(level):
    """What it gives is for that code, which is in half at O2 and O3; compiled too."""
    model, expected = nested(level, {"decoder*": "float"}, uses_part=True)
    seen, part = [], model.decoder.inner
    handle = part.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    assert_alike(results(model), expected)
    assert seen == [torch.float32, torch.float32 if level == "O1" else torch.float16]
    handle.remove()
    model.zero_grad()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_alike(results(model, fast), expected)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_overrides_in_overrides_are_recomputed_as_they_were(level):
    model, expected = nested(level, {"decoder*": "float"})
    model.decoder.recomputes = True
    assert_alike(results(model), expected)


def test_an_override_around_a_managed_model_holds_in_it():
    inner, seen = nn.Sequential(nn.Linear(4, 4)), []
    start(inner, "O2", {})
    outer = start(nn.Sequential(inner, nn.Linear(4, 2)), "O2", {"0": "float"})
    inner[0].register_forward_hook(lambda module, args, out: seen.append(module.weight.dtype))
    outer(X)
    assert seen == [torch.float32]


def test_overrides_in_overrides_after_an_interrupted_forward():
    model, expected = nested("O2", {"decoder*": "float"})
    strike = mock.Mock(side_effect=KeyboardInterrupt)
    handle = model.decoder.inner.register_forward_pre_hook(strike)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    assert_alike(results(model), expected)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_half_part_of_a_float_part_that_is_called_from_outside(level):
    """Also after a forward of the model: hooks of parts come behind those of overrides then."""

    def encode(self, x, buffer):
        buffer.add_(1)
        self.seen = x
        return self.inner(x)

    model = Made(
        lambda self, x: self.head(self.encoder(x, torch.zeros(4)).to(self.head.weight.dtype)),
        encoder=Made(encode, inner=nn.Linear(4, 4)),
        head=nn.Linear(4, 4),
    )
    overrides = {"encoder": "float", "encoder.inner": "half"}
    ampatch.initialize(model, opt_level=level, dtype=H, overrides=overrides, verbosity=0)
    x = torch.rand(3, 4)
    for _ in range(2):
        buffer = torch.zeros(4)
        model.encoder(x, buffer)
        assert torch.equal(model.encoder.seen, x) and buffer.eq(1).all()
        model(x)
