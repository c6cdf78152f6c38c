"""apex's compiled modules: what an import finds computes as torch does; others do not import."""

import copy
import importlib
import importlib.util
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_training import Made
from torch import nn

import ampatch
from ampatch.compat import apex as compat
from ampatch.compat.apex import kernels, packages
from ampatch.compat.apex.packages import replacement
from ampatch.compat.apex.parallel.distributed import flat_dist_call

MISSING = kernels.LOOKED_UP.split()
HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)
SHAPES = (((2, 3, 8), (8,)), ((4, 2, 6), (2, 6)), ((5,), (5,)))  # of an input, of a norm's weight


def kernel(name: str):
    return importlib.import_module(name)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours, theirs, dtype=torch.float32):
    size = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=size, atol=size)


# Which modules there are


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_a_module_has_what_computes_and_no_other_name(name):
    module = kernel(name)
    assert module.__spec__.name == name and importlib.util.find_spec(name) is module.__spec__
    functions, why = kernels.KERNELS[name]
    assert why and {*module.__all__} == {*functions, *(MISSING if name == "amp_C" else ())}
    scope: dict = {}
    exec(f"from {name} import *", scope)
    assert all(getattr(module, key) is scope[key] is functions[key] for key in functions)
    for other in ("no_such_kernel", *(() if name == "amp_C" else MISSING), "adam_undo"):
        assert not hasattr(module, other)
        with pytest.raises(ImportError):
            exec(f"from {name} import {other}")


@pytest.mark.parametrize("module", kernels.REFUSED_MODULES)
def test_what_does_not_compute_does_not_import(module):
    assert kernels.REFUSED_MODULES[module]  # a reason
    with pytest.raises(ImportError, match=f"{module} is not part of ampatch's apex") as raised:
        importlib.import_module(module)
    assert replacement(module) in str(raised.value) and raised.value.name == module
    with pytest.raises(ImportError, match="use "):
        exec(f"import {module}")
    assert importlib.util.find_spec(module) is None and module not in sys.modules


def test_a_module_of_the_users_own_with_such_a_name_is_found_whenever_it_comes(
    tmp_path, monkeypatch
):
    (tmp_path / "syncbn.py").write_text("mine = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("syncbn").mine
    del sys.modules["syncbn"]


def test_uninstall_takes_the_finders_out():
    compat.uninstall()
    assert not any(type(finder).__module__ == packages.__name__ for finder in sys.meta_path)
    for module in (*kernels.REFUSED_MODULES, "fused_adam_cuda"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{module}'"):
            importlib.import_module(module)


@pytest.mark.parametrize("name", MISSING)
def test_a_call_of_a_function_that_is_only_looked_up_names_what_to_use(name):
    function = getattr(kernel("amp_C"), name)
    assert f"amp_C.{name}" in repr(function)
    with pytest.raises(NotImplementedError) as raised:
        function(1, [], key=2)
    said = str(raised.value)
    assert said.startswith(f"amp_C.{name}(...)") and replacement(f"amp_C.{name}") in said
    assert "only looks the name up, nothing is to be done" in said


def test_every_replacement_of_a_kernel_is_used():
    used = {replacement(f"amp_C.{name}") for name in MISSING}
    used |= {replacement(name) for name in kernels.REFUSED_MODULES}
    used |= {replacement(f"{module}.other") for module in kernels.KERNELS}
    known = packages.REPLACEMENTS.items()
    assert {says for name, says in known if name.partition(".")[0] != "apex"} <= used


@pytest.mark.parametrize("name", ["amp_C", "fused_adam_cuda"])
def test_installed_kernels_stay(name, monkeypatch):
    compat.uninstall()
    assert name not in sys.modules
    installed = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, installed)
    compat.install()
    assert importlib.import_module(name) is installed
    compat.uninstall()
    assert sys.modules[name] is installed


# Lists of tensors: amp_C, apex_C and what calls them

CHUNK = 65536


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    data = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=data).to(dtype) for shape in ((3, 4), (5,), (), (0,))]


def flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int)


@pytest.mark.parametrize(
    "dtype, out", [(torch.float32, torch.float16), (torch.float16, torch.float32)]
)
def test_scale(dtype, out):
    amp_C, applier = kernel("amp_C"), kernel("apex.multi_tensor_apply").multi_tensor_applier
    grads, noop = tensors(dtype), flag()
    outs = [torch.empty_like(grad, dtype=out) for grad in grads]
    applier(amp_C.multi_tensor_scale, noop, [grads, outs], 1 / 3)
    for grad, scaled in zip(grads, outs, strict=True):
        assert torch.equal(scaled, (grad.float() * (1 / 3)).to(out))
    amp_C.multi_tensor_scale(CHUNK, noop, [grads, grads], 2.0)  # in place
    assert torch.equal(grads[1], tensors(dtype)[1] * 2)
    large, small = [torch.tensor([1e6])], [torch.empty(1, dtype=torch.float16)]
    amp_C.multi_tensor_scale(CHUNK, noop, [large, small], 1e-3)
    assert small[0].item() == 1000 and noop.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(dtype):
    amp_C, applier = kernel("amp_C"), kernel("apex.multi_tensor_apply").multi_tensor_applier
    grads, noop = [tensor * 300 for tensor in tensors(dtype)], flag()  # squares: more than float16
    each = torch.stack([grad.double().norm() for grad in grads])
    norm, none = applier(amp_C.multi_tensor_l2norm, noop, [grads], False)
    assert norm.shape == (1,) and norm.dtype is torch.float32 and none.numel() == 0
    torch.testing.assert_close(norm[0].double(), each.norm())
    norm, per_tensor = amp_C.multi_tensor_l2norm(CHUNK, noop, [grads], True)
    torch.testing.assert_close(per_tensor.double(), each)
    assert norm.item() > 0 and noop.item() == 0
    assert amp_C.multi_tensor_l2norm(CHUNK, noop, [[]])[0].tolist() == [0.0]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_noted(bad):
    amp_C = kernel("amp_C")
    good = [torch.ones(2), torch.ones(2)]
    broken, outs = [torch.ones(2), torch.tensor([1.0, bad])], [torch.empty(2), torch.empty(2)]

    def noted(function, *args) -> bool:
        noop = flag()
        function(CHUNK, noop, *args)
        return bool(noop.item())

    assert noted(amp_C.multi_tensor_scale, [broken, outs], 1.0)
    assert not outs[1].isfinite().all()  # it goes on
    assert noted(amp_C.multi_tensor_l2norm, [broken])
    assert not noted(amp_C.multi_tensor_scale, [good, outs], 1.0)
    assert not noted(amp_C.multi_tensor_l2norm, [good])


def test_they_are_the_same_within_a_session(amp):
    """Functions in the tables do not cast what is in a list."""
    amp_C = kernel("amp_C")
    expected = amp_C.multi_tensor_l2norm(CHUNK, flag(), [tensors()], True)
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    norms = amp_C.multi_tensor_l2norm(CHUNK, flag(), [tensors()], True)
    assert all(map(torch.equal, norms, expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_flatten_and_unflatten(dtype):
    import apex_C

    values = tensors(dtype)
    values[0] = values[0].t()  # with gaps between its rows
    flat = apex_C.flatten(values)
    numbers = [number for value in values for number in value.flatten().tolist()]
    assert flat.dtype is dtype and flat.tolist() == numbers
    parts = apex_C.unflatten(flat, values)
    assert all(map(torch.equal, parts, values))
    flat.zero_()
    assert not any(part.any() for part in parts)  # they are views, as scripts rely on


def reduced(rank: int) -> dict:
    values = [torch.full((2, 2), rank + 1.0), torch.full((3,), rank + 2.0, dtype=torch.float16)]
    flat_dist_call(values, dist.all_reduce)
    weights = [nn.Parameter(torch.full((2,), float(rank))), torch.full((1,), rank)]
    flat_dist_call([weight.data for weight in weights], dist.broadcast, (1,))
    return {"averaged": values, "sent": [weight.tolist() for weight in weights]}


def test_flat_dist_call(ranks):
    """As in apex, what is reduced is averaged."""
    for result in ranks(reduced):
        assert [value.unique().tolist() for value in result["averaged"]] == [[1.5], [2.5]]
        assert result["averaged"][1].dtype is torch.float16
        assert result["sent"] == [[1.0, 1.0], [1]]


def test_asking_first_says_yes():
    """Scripts that ask refuse to start without, and then call functions that are here."""
    from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
    from apex.multi_tensor_apply import multi_tensor_apply as module

    assert module.MultiTensorApply is MultiTensorApply
    assert multi_tensor_applier.available
    assert MultiTensorApply(8)(lambda *args: args, "flag", ["lists"], 1, 2) == (
        *(8, "flag", ["lists"], 1, 2),
    )


# Adam


def steps_of_adam(call, dtype=torch.float32, count=4):
    """A parameter, its moments, and what `call(param, first, second, grad, step)` makes of them."""
    param, first, second = numbers(3, 4).to(dtype), torch.zeros(3, 4), torch.zeros(3, 4)
    for step in range(1, count + 1):
        call(param, first, second, numbers(3, 4, seed=step), step)
    return param, first, second


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("corrected", [1, 0])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_fused_adam_cuda_follows_its_formula(mode, corrected, grad_dtype):
    """Modes, weight decay, half gradients; a copy that is empty, in half, and the weight itself."""
    lr, beta1, beta2, eps, decay = 0.05, 0.9, 0.99, 1e-2, 0.1
    p = numbers(3, 4).double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in (1, 2, 3):
        g = numbers(3, 4, seed=step).to(grad_dtype).double() / 8
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        size = lr * ((1 - beta2**step) ** 0.5 / (1 - beta1**step) if corrected else 1)
        p = p - size * (m / ((v + eps).sqrt() if mode == 0 else v.sqrt() + eps) + decay * p)

    half = torch.empty(3, 4, dtype=torch.float16)

    def call(param, first, second, grad, step):
        copied = {1: torch.tensor([]), 2: param, 3: half}[step]
        options = (lr, beta1, beta2, eps, 8.0, step, mode, corrected, decay)
        kernel("fused_adam_cuda").adam(param, copied, first, second, grad.to(grad_dtype), *options)
        assert step < 3 or torch.equal(half, param.half())

    for ours, expected in zip(steps_of_adam(call, count=3), (p, m, v), strict=True):
        close(ours, expected)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_multi_tensor_adam_is_torchs(mode, dtype):
    applier = kernel("apex.multi_tensor_apply").multi_tensor_applier
    theirs = nn.Parameter(numbers(3, 4))
    peer = (torch.optim.AdamW if mode else torch.optim.Adam)([theirs], lr=0.05, weight_decay=0.1)

    def call(param, first, second, grad, step):
        lists = [[grad], [param], [first], [second]]
        options = (0.05, 0.9, 0.999, 1e-8, step, mode, 1, 0.1)
        applier(kernel("amp_C").multi_tensor_adam, torch.zeros(1), lists, *options)
        theirs.grad = grad.clone()
        peer.step()

    ours, first, second = steps_of_adam(call, dtype)
    assert ours.dtype is dtype and first.dtype is second.dtype is torch.float32
    close(ours, theirs.detach(), dtype)
    kernel("amp_C").multi_tensor_adam(0, None, [[], [], [], []], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0)


def test_a_class_over_fused_adam_steps_by_the_kernel_and_resumes():
    """As fairseq's."""
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.optimizers import FusedAdam

    class OwnAdam(FusedAdam):
        def step(self, closure=None):
            [group] = self.param_groups
            [param] = group["params"]
            group["step"] = group.get("step", 0) + 1
            state = self.state[param]
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(param))
            lists = [[param.grad.data], [param.data], [state["exp_avg"]], [state["exp_avg_sq"]]]
            options = (group["lr"], *group["betas"], group["eps"], group["step"])
            options += (self.adam_w_mode, int(group["bias_correction"]), group["weight_decay"])
            buffer = self._dummy_overflow_buf
            multi_tensor_applier(self.multi_tensor_adam, buffer, lists, *options)

    theirs, ours = nn.Parameter(numbers(5)), nn.Parameter(numbers(5))
    peer = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.2)
    optimizer = OwnAdam([ours], lr=0.1, weight_decay=0.2)
    assert optimizer._dummy_overflow_buf.tolist() == [0]
    assert optimizer._dummy_overflow_buf.dtype is torch.int32
    for step in range(6):
        theirs.grad = ours.grad = numbers(5, seed=step)
        peer.step()
        optimizer.step()
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = OwnAdam([ours], lr=0.1, weight_decay=0.2)
            optimizer.load_state_dict(saved)
    close(ours.detach(), theirs.detach())


# Norms


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("is_rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("is_affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_output", [False, True], ids=["input", "memory efficient"])
def test_norms_forward_and_backward_are_torchs(sizes, is_rms, is_affine, dtype, has_output):
    size, shape = sizes
    module, eps = kernel("fused_layer_norm_cuda"), 1e-3
    x, grad = 1 + 3 * numbers(*size, dtype=dtype), numbers(*size, seed=1, dtype=dtype)
    params = [(0.5 + numbers(*shape, seed=2).abs()).to(dtype), numbers(*shape, seed=3, dtype=dtype)]
    params = params[: 2 - is_rms] if is_affine else []
    wide = [value.double().requires_grad_() for value in (x, *params)]
    weight, bias, *_ = *wide[1:], None, None
    if is_rms:
        expected = F.rms_norm(wide[0], shape, weight, eps)
    else:
        expected = F.layer_norm(wide[0], shape, weight, bias, eps)
    expected.backward(grad.double())

    name, end = "rms_" * is_rms, "_affine" * is_affine
    out, *stats = getattr(module, f"{name}forward{end}")(x, shape, *params, eps)
    assert out.dtype is dtype
    close(out, expected.detach(), dtype)
    rows = x.double().reshape(stats[-1].numel(), -1)
    variance = rows.square().mean(1) if is_rms else rows.var(1, unbiased=False)
    assert all(stat.dtype is torch.float32 for stat in stats) and len(stats) == 2 - is_rms
    close(stats[-1], (variance + eps).rsqrt())
    if not is_rms:
        close(stats[0], rows.mean(1))
    if has_output:
        stats = stats if is_rms else [None, stats[1]]
    last = (True,) if has_output else ()
    grads = getattr(module, f"{name}backward{end}")(
        grad, *stats, out if has_output else x, shape, *params, eps, *last
    )
    grads = grads if is_affine else [grads]
    for ours, theirs in zip(grads, wide, strict=True):
        assert ours.dtype is dtype
        room = 4 if has_output and dtype is not torch.float32 else 1  # the output was rounded
        close(ours / room, theirs.grad / room, dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_mixed_norms_give_the_weights_dtype(dtype):
    x, weight, bias = numbers(3, 6, dtype=dtype), 1 + numbers(6, seed=1), numbers(6, seed=2)
    expected = F.layer_norm(x.float(), (6,), weight, bias, 1e-5)
    for module, name in (
        ("fused_layer_norm_cuda", "forward_affine_mixed_dtypes"),
        ("fused_mix_prec_layer_norm_cuda", "forward_affine"),
    ):
        out, mean, invvar = getattr(kernel(module), name)(x, (6,), weight, bias, 1e-5)
        assert out.dtype is torch.float32
        close(out, expected)
    grads = kernel("fused_mix_prec_layer_norm_cuda").backward_affine(
        torch.ones(3, 6), mean, invvar, x, (6,), weight, bias, 1e-5
    )
    assert [grad.dtype for grad in grads] == [dtype, torch.float32, torch.float32]
    out, _ = kernel("fused_layer_norm_cuda").rms_forward_affine_mixed_dtypes(x, (6,), weight, 1e-5)
    close(out, F.rms_norm(x.float(), (6,), weight, 1e-5))


def test_a_weight_of_zero_does_not_make_a_memory_efficient_backward_nan():
    module, x = kernel("fused_layer_norm_cuda"), numbers(2, 4)
    weight, bias = torch.tensor([0.0, 1.0, -1.0, 2.0]), torch.zeros(4)
    out, _, invvar = module.forward_affine(x, (4,), weight, bias, 1e-5)
    options = (None, invvar, out, (4,), weight, bias, 1e-5, True)
    grads = module.backward_affine(torch.ones(2, 4), *options)
    assert all(bool(grad.isfinite().all()) for grad in grads)


class OwnNorm(torch.autograd.Function):
    """As Megatron-LM's and other copies of apex's layer norm have it."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        out, mean, invvar = kernel("fused_layer_norm_cuda").forward_affine(
            x, weight.shape, weight, bias, 1e-5
        )
        ctx.save_for_backward(x, weight, bias, mean, invvar)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, mean, invvar = ctx.saved_tensors
        return tuple(
            kernel("fused_layer_norm_cuda").backward_affine(
                grad.contiguous(), mean, invvar, x, weight.shape, weight, bias, 1e-5
            )
        )


def own_norm(model, x):
    x = model.first(x)
    weight, bias = model.norm.weight.to(x.dtype), model.norm.bias.to(x.dtype)
    return model.last(OwnNorm.apply(x, weight, bias))


def torchs_norm(model, x):
    return model.last(model.norm(model.first(x)))


def test_a_function_of_the_scripts_own_trains_by_the_kernels_as_torchs_layer_does(amp, opt_level):
    ends = []
    for forward in (own_norm, torchs_norm):
        torch.manual_seed(0)
        layers = {"first": nn.Linear(6, 8), "last": nn.Linear(8, 1)}
        model = Made(forward, norm=nn.LayerNorm(8), **layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        x = numbers(16, 6)
        for _ in range(10):
            optimizer.zero_grad()
            loss = (model(x).float() - x.sum(1, keepdim=True)).pow(2).mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        ends.append(loss.item())
        ampatch.deactivate()
    assert ends[0] == pytest.approx(ends[1], rel=0.02)


# Softmaxes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["", "_masked", "_upper_triang_masked", "generic"])
def test_softmaxes_are_torchs(dtype, kind):
    name = "generic_scaled_masked" if kind == "generic" else f"scaled{kind}"
    module, scale = kernel(f"{name}_softmax_cuda"), 0.5
    is_causal, is_masked = "upper" in kind, kind in ("_masked", "generic")
    size = (3, 5, 5) if is_causal else (2, 3, 4, 5)
    x, grad = 3 * numbers(*size, dtype=dtype), numbers(*size, seed=1, dtype=dtype)
    mask = torch.zeros(2, 1, 4, 5, dtype=torch.uint8)
    mask[0, :, :, 3:] = mask[1, :, 1:, 0] = 1
    wide = x.double().requires_grad_()
    scores = wide * scale
    if is_causal:
        scores = scores + torch.full((5, 5), -torch.inf).triu(1)
    if is_masked:
        scores = scores.masked_fill(mask.bool(), -torch.inf)
    expected = scores.softmax(-1)
    expected.backward(grad.double())
    masks = (mask,) if is_masked else ()
    out = module.forward(x, *masks, scale)
    assert out.dtype is dtype
    close(out, expected.detach(), dtype)
    of_input = module.backward(grad.clone(), out, scale)
    assert of_input.dtype is dtype
    close(of_input, wide.grad, dtype)
    assert hasattr(module, "get_batch_per_block") == (kind == "_masked")


def test_a_row_that_is_all_masked_is_zero_and_so_is_its_gradient():
    module = kernel("scaled_masked_softmax_cuda")
    mask = torch.ones(1, 1, 2, 4, dtype=torch.uint8)
    mask[0, 0, 0, 0] = 0
    out = module.forward(numbers(1, 2, 2, 4, dtype=torch.float16), mask, torch.tensor(1.0))
    assert out[0, :, 0].tolist() == [[1, 0, 0, 0]] * 2 and not out[0, :, 1].any()
    assert not module.backward(torch.ones_like(out), out, torch.tensor(1.0)).isnan().any()
    assert module.get_batch_per_block(2, 4, 1, 2) == 1
