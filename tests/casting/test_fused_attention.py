"""torch's fused kernels for attention and encoder layers in evaluation at O1.

They run in half where that gives what the single calls give but for half's rounding, and
nowhere else.  The single calls are those that run with `set_fastpath_enabled(False)`.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from matrix_kernels import FUSED, Kernels, tensor_of
from registrations import forgotten_afterwards
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch
from ampatch.session import facade

LAYER, ATTENTION = "_transformer_encoder_layer_fwd", "_native_multi_head_attention"
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
PADDED = torch.arange(6).expand(3, 6) >= torch.tensor([[6], [4], [1]])
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*nested tensors")
BOTH_TYPES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.fixture
def half() -> torch.dtype:
    """Which kernel runs does not depend on the half type; its results do: see `BOTH_TYPES`."""
    return torch.bfloat16


def layer(**settings) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, **{"batch_first": True, **settings})


def encoder(layers: int = 2, **settings) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(layer(**settings), layers)


class Whole(nn.Module):
    """A model with one part: `initialize` hooks the model, and torch asks layers for hooks."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x, **kwargs):
        return self.part(x, **kwargs)


class SelfAttention(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, **settings)

    def forward(self, x, **kwargs):
        return self.attention(x, x, x, **kwargs)


def made(make, half=None) -> tuple[nn.Module, torch.Tensor]:
    """A model in evaluation, with weights of some size and FP32 input; managed, given a half."""
    torch.manual_seed(0)
    model = Whole(make()).eval()
    for weight in model.parameters():
        if weight.layout is not torch.strided:
            continue
        if weight.dim() > 1:
            nn.init.normal_(weight, 0.0, weight.shape[1] ** -0.5)
        else:
            nn.init.normal_(weight, float(weight[0] == 1), 0.2)
    if half is not None:
        ampatch.initialize(model, dtype=half, patch_scope="process", verbosity=0)
    return model, torch.randn(3, 6, 16)


def evaluated(model: nn.Module, x: torch.Tensor, **kwargs) -> tuple:
    """The output under `no_grad`, and which fused kernels ran."""
    with torch.no_grad(), Kernels() as kernels:
        output = model(x, **kwargs)
    return output, kernels.seen.keys() & FUSED


def by_single_calls(model: nn.Module, x: torch.Tensor, **kwargs):
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        output, fused = evaluated(model, x, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert not fused
    return output


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def check_single_calls(model: nn.Module, x: torch.Tensor, **kwargs) -> None:
    """No fused kernel runs, and the output is that of the single calls."""
    output, fused = evaluated(model, x, **kwargs)
    assert not fused
    expected = by_single_calls(model, x, **kwargs)
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


def check_fused(model: nn.Module, x: torch.Tensor, kernel: str = LAYER, **kwargs) -> None:
    """Only this kernel runs, and the output is that of the single calls but for rounding."""
    output, fused = evaluated(model, x, **kwargs)
    assert fused == {kernel}
    found, expected = tensor_of(output), tensor_of(by_single_calls(model, x, **kwargs))
    assert found.dtype is expected.dtype and found.shape == expected.shape
    assert error(found, expected.double()) < 0.03
    if isinstance(output, tuple) and output[1] is not None:
        assert output[1].dtype is by_single_calls(model, x, **kwargs)[1].dtype


# Where the kernels run in half

CASES = {  # make, further arguments, the kernel
    "attention": (SelfAttention, {"need_weights": False}, ATTENTION),
    "attention with weights": (SelfAttention, {}, ATTENTION),
    "weights by head": (SelfAttention, {"average_attn_weights": False}, ATTENTION),
    "padded attention": (SelfAttention, {"key_padding_mask": PADDED}, ATTENTION),
    "masked attention": (SelfAttention, {"attn_mask": CAUSAL.isinf()}, ATTENTION),
    "layer": (layer, {}, LAYER),
    "gelu": (lambda: layer(activation="gelu"), {}, LAYER),
    "padded layer": (layer, {"src_key_padding_mask": PADDED}, LAYER),
    "causal layer": (layer, {"src_mask": CAUSAL, "is_causal": True}, LAYER),
    "norm first": (lambda: layer(norm_first=True), {}, ATTENTION),
    "encoder": (lambda: encoder(4), {}, LAYER),
    "padded encoder": (encoder, {"src_key_padding_mask": PADDED}, LAYER),
    "causal encoder": (encoder, {"mask": CAUSAL}, LAYER),
    "deep encoder": (lambda: encoder(12), {}, LAYER),
    "deep encoder, norm first": (lambda: encoder(12, norm_first=True), {}, ATTENTION),
}


@BOTH_TYPES
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_single_calls_but_for_rounding(name, half):
    """The error against FP64 is at most four times theirs, whatever the depth."""
    make, kwargs, kernel = CASES[name]
    model, x = made(make)
    wide = {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in kwargs.items()
    }
    exact = by_single_calls(copy.deepcopy(model).double(), x.double(), **wide)
    ampatch.initialize(model, dtype=half, verbosity=0)
    output, fused = evaluated(model, x, **kwargs)
    expected = by_single_calls(model, x, **kwargs)
    assert fused == {kernel}
    pairs = [(output, expected, exact)] if torch.is_tensor(output) else zip(output, expected, exact)
    for found, single, true in pairs:
        if true is None:
            assert found is None
            continue
        assert found.dtype is single.dtype and found.shape == single.shape
        assert 0 < error(found, true) < 4 * error(single, true) + torch.finfo(half).eps


@BOTH_TYPES
@pytest.mark.parametrize("name", ["attention", "layer", "gelu", "encoder", "deep encoder"])
def test_autocast_for_the_cpu_makes_errors_of_the_same_size(name, half):
    """It runs the same kernels in half."""
    make, kwargs, kernel = CASES[name]
    model, x = made(make)
    exact = tensor_of(by_single_calls(copy.deepcopy(model).double(), x.double(), **kwargs))
    with torch.no_grad(), torch.autocast("cpu", dtype=half):  # a dispatch mode would hide casts
        reference = model(x, **kwargs)
    ampatch.initialize(model, dtype=half, verbosity=0)
    output, fused = evaluated(model, x, **kwargs)
    assert fused == {kernel} and tensor_of(reference).dtype is half
    assert error(tensor_of(output), exact) < 1.5 * error(tensor_of(reference), exact)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_gradients(around, half):
    model, x = made(encoder, half)
    expected = by_single_calls(model, x)
    with around(), Kernels() as kernels:
        output = model(x)
    assert kernels.seen.keys() == {LAYER}
    assert error(output, expected.double()) < 0.03


def test_frozen_weights_in_grad_mode(half):
    model, x = made(lambda: encoder().requires_grad_(False), half)
    with Kernels() as kernels:
        model(x)
    assert kernels.seen.keys() == {LAYER}


def test_a_half_input_of_a_layer(half):
    model, x = made(layer, half)
    check_fused(model, x.to(half))


def test_weights_of_the_other_half_type():
    model, x = made(lambda: layer().bfloat16(), torch.float16)
    check_fused(model, x)


def test_an_empty_batch(half):
    model, x = made(encoder, half)
    output, _ = evaluated(model, x[:0])
    assert output.shape == (0, 6, 16) and output.dtype is torch.float32


def test_a_large_value_overflows_where_it_does_in_the_single_calls():
    """FP32 sums of a layer with `norm_first` stay in FP32."""
    model, x = made(lambda: encoder(norm_first=True), torch.float16)
    x[0, 0, 0] = 1e6
    output, fused = evaluated(model, x)
    assert fused == {ATTENTION} and output.isfinite().all()


@pytest.mark.parametrize("name", ["layer", "attention"])
def test_in_float_precision(name, half):
    make, kwargs, kernel = CASES[name]
    model, x = made(make, half)
    with ampatch.precision("float"):
        output, fused = evaluated(model, x, **kwargs)
        expected = by_single_calls(model, x, **kwargs)
    assert fused == {kernel}
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layer", "attention with weights"])
def test_in_half_precision(name, half):
    make, kwargs, kernel = CASES[name]
    model, x = made(make, half)
    with ampatch.precision("half"):
        check_fused(model, x, kernel, **kwargs)


# Where the single calls run

ODD_MASKS = {
    "added to scores": {"src_mask": torch.linspace(-1, 0, 36).view(6, 6)},
    "finite for minus infinity": {"src_mask": CAUSAL.clamp(min=-1e9)},
    "padding that is float": {"src_key_padding_mask": PADDED * -2.0},
    "no place left": {"src_key_padding_mask": PADDED[:, :1].logical_not().expand(3, 6)},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDED.float() * -1e9},
    "none left by both": {"src_mask": CAUSAL.isinf(), "src_key_padding_mask": PADDED.flip(1)},
}


def test_masks_that_the_kernel_would_take_for_others(half):
    model, x = made(layer, half)
    for masks in ODD_MASKS.values():
        check_single_calls(model, x, **masks)


def test_a_padded_encoder_keeps_its_values_at_padded_places(half):
    """As under autocast for CUDA: no nested tensors, which would have zeros there."""
    model, x = made(encoder, half)
    output, _ = evaluated(model, x, src_key_padding_mask=PADDED)
    assert (output[PADDED] != 0).any()


class Doubled(nn.Linear):
    """As of an adapter: its forward is not that of its weight."""

    def forward(self, x):
        return 2 * super().forward(x)


class OtherLayer(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return 2 * super()._ff_block(x)


def with_adapter() -> nn.Module:
    model = layer()
    model.linear2 = Doubled(32, 16)
    return model


def with_own_forward() -> nn.Module:
    model = layer()
    model.linear2.forward = lambda x: F.linear(x, model.linear2.weight) * 2
    return model


def with_compressed_weight() -> nn.Module:
    model = layer()
    model.linear1.weight = nn.Parameter(model.linear1.weight.detach().to_sparse_csr())
    return model


def with_norm_without_bias() -> nn.Module:
    model = layer()
    model.norm2 = nn.LayerNorm(16, bias=False)
    return model


def with_hook() -> nn.Module:
    model = layer()
    model.linear1.register_forward_hook(lambda module, args, output: output * 2)
    return model


OTHER_PARTS = [
    with_adapter,
    with_own_forward,
    pytest.param(
        with_compressed_weight, marks=pytest.mark.filterwarnings("ignore:Sparse CSR tensor")
    ),
    with_norm_without_bias,
    with_hook,
    lambda: OtherLayer(16, 2, 32, batch_first=True),
    lambda: layer(bias=False),
    lambda: nn.TransformerEncoderLayer(16, 2, 32),
]


@pytest.mark.parametrize("make", OTHER_PARTS)
def test_layers_whose_parts_do_something_else(make, half):
    model, x = made(make, half)
    output, fused = evaluated(model, x)
    assert LAYER not in fused
    torch.backends.mha.set_fastpath_enabled(False)
    expected, _ = evaluated(model, x)
    torch.backends.mha.set_fastpath_enabled(True)
    assert error(output, expected.double()) < 0.03  # attention in it may be fused


def test_dropout_that_is_left_on_drops(half):
    model, x = made(lambda: layer(dropout=0.5), half)
    model.part.dropout1.train()
    (first, fused), (second, _) = evaluated(model, x), evaluated(model, x)
    assert LAYER not in fused and not torch.equal(first, second)


class Seen(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Observer:
    """Of each patched call."""

    def __enter__(self):
        facade.watch_casts(self)

    def __exit__(self, *exception):
        facade.stop_watching_casts(self)

    def call_begins(self, function): ...

    def was_cast(self, function, before, after): ...

    def call_ends(self, function, result): ...

    def copies_made(self, halves): ...


WATCHED = {
    "report": ampatch.report,
    "observer": Observer,
    "hook on all modules": lambda: nn.modules.module.register_module_forward_hook(
        lambda module, args, output: None
    ),
    "function mode": Seen,
}


@pytest.mark.parametrize("name", ["layer", "attention"])
@pytest.mark.parametrize("watched", WATCHED)
def test_who_watches_the_calls_sees_them(watched, name, half):
    make, kwargs, _ = CASES[name]
    model, x = made(make, half)
    with WATCHED[watched]():
        check_single_calls(model, x, **kwargs)


@pytest.mark.parametrize("name", ["layer", "attention"])
def test_overrides_of_functions_act_on_the_single_calls(name, half):
    make, kwargs, _ = CASES[name]
    model, x = made(make)
    plain = tensor_of(by_single_calls(model, x, **kwargs))
    overrides = {
        F.linear: "float",
        F.scaled_dot_product_attention: "float",
    }
    ampatch.initialize(model, dtype=half, overrides=overrides, verbosity=0)
    output, fused = evaluated(model, x, **kwargs)
    assert not fused
    torch.testing.assert_close(tensor_of(output), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layer", "attention"])
def test_registered_functions_act_on_the_single_calls(name, half):
    make, kwargs, _ = CASES[name]
    with forgotten_afterwards():
        ampatch.register_half_function(F, "layer_norm")
        model, x = made(make, half)
        check_single_calls(model, x, **kwargs)
    ampatch.deactivate()
    model, x = made(make, half)
    assert evaluated(model, x, **kwargs)[1]


def test_parts_in_another_precision(half):
    model, x = made(encoder)
    plain = by_single_calls(model, x)
    rules = {"part.layers.*": "float"}
    ampatch.initialize(model, dtype=half, overrides=rules, verbosity=0)
    output, fused = evaluated(model, x)
    assert LAYER not in fused  # their attention is fused, in FP32
    torch.testing.assert_close(output, plain, rtol=1e-5, atol=1e-5)


def test_apex_s_tables_have_more_functions():
    model, x = made(lambda: layer(activation="gelu"))
    ampatch.init()
    check_single_calls(model, x)


def test_weights_that_require_gradients_have_them(half):
    model, x = made(encoder, half)
    with Kernels() as kernels:
        model(x).sum().backward()
    assert not kernels.seen.keys() & FUSED
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch scripts its own formulas
def test_tangents(half):
    """The kernels have no formula for them."""
    model, x = made(lambda: layer().requires_grad_(False), half)
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        output = model(forward_ad.make_dual(x, torch.ones_like(x)))
        assert forward_ad.unpack_dual(output).tangent is not None


TRACED = {
    "make_fx": lambda model, x: make_fx(model)(x)(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x[None])[0],
}


@pytest.mark.filterwarnings("ignore")  # of vmap without a batching rule
@pytest.mark.parametrize("how", TRACED)
def test_traces_and_transforms_have_the_single_calls(how, half):
    model, x = made(layer, half)
    expected = by_single_calls(model, x)
    with torch.no_grad(), Kernels() as kernels:
        output = TRACED[how](model, x)
    assert not kernels.seen.keys() & FUSED
    assert error(output, expected.double()) < 0.01


@pytest.mark.filterwarnings("ignore")  # of tracing
def test_a_jit_trace_has_the_single_calls(half):
    model, x = made(layer, half)
    with torch.no_grad():
        traced = torch.jit.trace(model, x, check_trace=False)
    assert not [name for name in FUSED if name in str(traced.inlined_graph)]


def test_compiled_models_have_the_single_calls(half):
    model, x = made(layer, half)
    expected = by_single_calls(model, x)
    with torch.no_grad():
        output = torch.compile(model, backend="aot_eager")(x)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        assert not torch.equal(output, model(x))


def test_fake_tensors(half):
    model, _ = made(layer, half)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        output, fused = evaluated(model, torch.empty(3, 6, 16))
    assert not fused and output.dtype is torch.float32


# Weights


class Copies(TorchDispatchMode):
    """Counts the batches in which weights are cast, and the weights in them."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._overloadpacket.__name__ == "_foreach_copy_":
            self.batches.append(len(args[0]))
        return function(*args, **(kwargs or {}))


def batches(model: nn.Module, x: torch.Tensor) -> list[int]:
    with torch.no_grad(), Copies() as counted:
        model(x)
    return counted.batches


def test_the_weights_of_a_layer_are_cast_in_one_batch_and_once_a_forward(half):
    shared = layer()
    model, x = made(lambda: nn.Sequential(shared, shared, layer()), half)
    assert batches(model, x) == [8, 8]
    assert batches(model, x) == [8, 8]


def test_weights_that_change_between_forwards_and_in_one(half):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.changes = layer(), False

        def forward(self, x):
            x = self.layer(x)
            if self.changes:
                self.layer.linear2.weight.zero_()
                self.layer.linear2.bias.data.zero_()
            return self.layer(x)

    model, x = made(Net, half)
    first, _ = evaluated(model, x)
    model.part.changes = True
    second, fused = evaluated(model, x)
    assert fused == {LAYER} and error(second, first.double()) > 0.1
    model.part.changes = False
    check_fused(model, x)
    model.part.layer.linear1.weight.data.zero_()
    check_fused(model, x)


def test_weights_made_in_inference_mode(half):
    with torch.inference_mode():
        model, x = made(encoder, half)
    with torch.inference_mode():
        model(x)
    check_fused(model, x)


def test_training_casts_what_it_did_before_an_evaluation(half):
    """Weights of norms, which the fused kernel may take in half, join no batch of a training."""

    def trained() -> list[int]:
        with Copies() as counted:
            model(x).sum().backward()
        return counted.batches

    model, x = made(encoder, half)
    model.train()
    trained()
    before = trained()
    evaluated(model.eval(), x)
    model.train()
    assert trained() == trained() == before


# Calls by name, and afterwards


def arguments(model: nn.Module, x: torch.Tensor, norm_first: bool = False) -> tuple:
    attention = model.self_attn
    weights = [attention.in_proj_weight, attention.in_proj_bias]
    weights += attention.out_proj.parameters()
    norms = [*model.norm1.parameters(), *model.norm2.parameters()]
    products = [*model.linear1.parameters(), *model.linear2.parameters()]
    return (x, 16, 2, *weights, False, norm_first, 1e-5, *norms, *products, None, None)


def test_the_kernel_called_by_the_user(half):
    model, x = made(layer, half)
    expected = evaluated(model, x)[0]
    with torch.no_grad():
        found = torch._transformer_encoder_layer_fwd(*arguments(model.part, x))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_kernels_called_otherwise_than_by_torch_are_left_alone(half):
    model, x = made(layer)
    nested = torch.nested.nested_tensor([x[0], x[1, :2]])
    attention = model.part.self_attn
    weights, mixed, rest = (
        arguments(model.part, x)[3:7],
        (x, x, x.clone()),
        (None, True, True, None),
    )
    calls = [
        lambda: torch._transformer_encoder_layer_fwd(*arguments(model.part, x, norm_first=True)),
        lambda: torch._transformer_encoder_layer_fwd(*arguments(model.part, nested)).unbind()[1],
        lambda: torch._native_multi_head_attention(x, x, x, 16, 2, *weights)[0],
        lambda: torch._native_multi_head_attention(*mixed, 16, 2, *weights, *rest)[0],
        lambda: attention(nested, nested, nested, need_weights=False)[0].unbind()[1],
    ]
    with torch.no_grad():
        plain = [call() for call in calls]
        ampatch.initialize(model, dtype=half, verbosity=0)
        for call, expected in zip(calls, plain, strict=True):
            assert torch.equal(call(), expected)


def test_a_kernel_called_with_gradients_has_none_as_without_casts(half):
    model, x = made(layer, half)
    model.part.norm1.requires_grad_(False)
    model.part.norm2.requires_grad_(False)
    output = torch._transformer_encoder_layer_fwd(*arguments(model.part, x))
    with pytest.raises(RuntimeError, match="derivative"):
        output.sum().backward()


def test_a_class_that_handles_calls_sees_the_kernel(half):
    class Seeing(torch.Tensor):
        seen: list = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    model, x = made(layer, half)
    with torch.no_grad():
        torch._transformer_encoder_layer_fwd(*arguments(model.part, x.as_subclass(Seeing)))
    assert Seeing.seen[0] is torch._transformer_encoder_layer_fwd


def test_half_models_take_the_kernels_as_pytorch_does(half):
    model, x = made(encoder)
    expected = evaluated(copy.deepcopy(model).to(half), x.to(half))
    ampatch.initialize(model, opt_level="O2", dtype=half, verbosity=0)
    output, fused = evaluated(model, x)
    assert fused == expected[1] == {LAYER}
    assert torch.equal(output, expected[0].to(output.dtype))
