"""`ampatch run --auto` against FP32, where it has means of its own; and which modules are cast.

What scripts do at O1 too are situations: `tests/laws/test_auto_situations.py` runs these.
"""

from unittest import mock

import pytest
import torch
from auto_loops import AT_SCALE, batch, begin, both, close, grads, net, weights
from small_training import Made, in_threads
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampatch
from ampatch import auto

LOOPS = {}


@pytest.fixture(params=["static", "dynamic"])
def asked(request):
    """float16, at a static scale or a dynamic one, begun where these losses do not overflow."""
    return AT_SCALE if request.param == "static" else {}


def loop(function):
    """A row of the table: what it returns is compared."""
    LOOPS[function.__name__] = function
    return function


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


@loop
def gradients_of_what_no_optimizer_has():
    """Inputs, frozen-out weights, float64: added to earlier ones."""
    model, left_out = net(), nn.Linear(1, 1)
    optimizer = sgd(model, 0.05)
    x, y = batch()
    x.requires_grad_()
    double = torch.ones(1, dtype=torch.float64, requires_grad=True)
    grads_seen = []
    out = left_out(model(x)).float() * double
    for _ in range(2):
        F.mse_loss(out, y.double()).backward(retain_graph=True)
        grads_seen.append([t.grad.clone().float() for t in (x, double)] + grads(left_out))
    optimizer.step()
    return grads_seen, weights(model)


@loop
def a_graph_of_the_gradient():
    w = nn.Parameter(torch.full((4,), 0.5))
    optimizer = torch.optim.SGD([w], lr=0.1)
    (w**3).sum().backward(create_graph=True)
    first = w.grad
    w.grad = None
    first.sum().backward()
    optimizer.step()
    return first.detach(), w.grad.clone(), w.detach()


@loop
def inputs_and_given_gradients():
    model = net()
    optimizer = sgd(model)
    x, _ = batch()
    hidden = model[:2](x)
    out = model[2](hidden)
    first = list(model[0].parameters())
    out.backward(torch.full_like(out, 0.5), inputs=first, retain_graph=True)
    alone = grads(model)
    assert alone[2:] == [None, None]
    torch.autograd.backward((out, out * 2), (torch.ones_like(out), torch.ones_like(out)))
    optimizer.step()
    return alone[:2], weights(model)


@loop
def a_pass_within_a_pass_that_starts_from_a_loss_of_its_own():
    model, side = net(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), side], lr=0.1)
    x, y = batch()
    out = model(x)

    def hook(grad):
        with torch.enable_grad():
            (side * 2).sum().backward()

    out.register_hook(hook)
    F.mse_loss(out, y).backward()
    optimizer.step()
    return side.grad.clone(), grads(model), weights(model)


class Named(torch.Tensor):
    """Its functions call torch's again, by the names that are ours now."""


@loop
def hooks_on_tensors():
    """They see true gradients; what they return, or write in place, is scaled again."""
    model, other = net(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    seen = []
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model[2].weight.register_hook(lambda grad: seen.append(grad.clone().float()))
    x, y = batch()
    hidden = model[:2](x)
    hidden.register_hook(lambda grad: grad.clamp(-0.005, 0.005))
    between, named = other * 1.0, (other * 2.0).as_subclass(Named)

    def halve(grad):
        grad.mul_(0.5)

    between.register_hook(halve)
    named.register_hook(lambda grad: seen.append(grad.clone().as_subclass(torch.Tensor)))
    extra = ((between * 1.0).sum() + (named * 3.0).sum()).as_subclass(torch.Tensor)
    (F.mse_loss(model[2](hidden), y) + extra).backward()
    optimizer.step()
    return seen, weights(model), other.detach()


@loop
def torchs_amp_that_is_off():
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x, y = batch()
    with torch.autocast("cpu", enabled=False):
        loss = F.mse_loss(model(x), y)
    with torch.no_grad():  # which is no matter
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    seen = grads(model)
    scaler.step(optimizer)
    scaler.update()
    return seen, weights(model)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_in_fp32(name, asked):
    close(*both(LOOPS[name], asked))


@pytest.mark.parametrize(
    "register",
    [
        lambda model, x: model(x).retain_grad(),
        lambda model, x: model.register_full_backward_hook(print),
        lambda model, x: model.register_full_backward_pre_hook(print),
    ],
)
def test_what_would_show_scaled_gradients_is_refused(register):
    begin()
    model = net()
    model[0].weight.retain_grad()  # a leaf: it does nothing
    with pytest.raises(ampatch.AmpatchError, match="would show scaled gradients.*bfloat16"):
        register(model, torch.ones(2, 4))
    ampatch.deactivate()
    auto.start({"dtype": torch.bfloat16})
    register(model, torch.ones(2, 4))


def test_weights_updated_by_hand_do_not_meet_the_first_scale(caplog):
    """No code would skip this step, so its backward pass is not scaled."""
    auto.start({})
    w = nn.Parameter(torch.ones(4, 1))
    for _ in range(2):
        w.grad = None
        (torch.ones(1, 4) @ w * 1000.0).sum().backward()
        assert torch.equal(w.grad, torch.full((4, 1), 1000.0))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "reached no parameter of a torch.optim.Optimizer" in told[0]


def test_data_are_prepared_as_ever():
    begin()
    items = [torch.eye(2)] * 4
    half = torch.eye(2).half()
    assert torch.einsum("ij,jk->ik", half, torch.eye(2)).dtype is torch.float16
    loader = torch.utils.data.DataLoader(items, collate_fn=lambda items: items[0] @ items[0])
    assert {batch.dtype for batch in loader} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_go_to_numpy_in_fp32(dtype):
    numpy = pytest.importorskip("numpy")
    auto.start({"dtype": dtype})
    with torch.no_grad():
        out = net()(torch.ones(2, 4))
    assert out.dtype is dtype
    for array in (out.numpy(), numpy.asarray(out), out.cpu().numpy(force=True)):
        assert array.dtype == numpy.float32
        assert array.tolist() == out.tolist()
    shared = torch.ones(2)
    shared.numpy()[0] = 5
    assert shared[0] == 5
    with pytest.raises(RuntimeError, match="requires grad"):
        net()(torch.ones(2, 4)).numpy()


H, FP32 = torch.bfloat16, torch.float32
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def with_layer(forward=lambda self, x: self.layer(x @ x.T @ x)):
    return Made(forward, layer=nn.Linear(16, 16))


class Whitening(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.eye(16))

    def forward(self, x):
        return x @ self.matrix


@pytest.fixture
def session():
    yield auto.start({"dtype": H})
    ampatch.deactivate()


def whitened():
    centered = X - X.mean(0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(X))
    z = centered @ vectors @ torch.diag(values.clamp_min(1e-3).rsqrt()) @ vectors.T
    labels = (z @ torch.ones(16, 3).cumsum(0)).argmax(1)
    return z, labels, torch.cdist(z, z), Whitening()(z), F.conv1d(X[None], torch.ones(4, 8, 3))


def test_data_labels_and_metrics_are_those_of_fp32_to_the_bit():
    expected = whitened()
    auto.start({"dtype": H})
    with_layer()(X)  # casts have begun, and ended
    under_auto = whitened()
    ampatch.deactivate()
    for tensor, other in zip(expected, under_auto, strict=True):
        assert tensor.dtype is other.dtype and torch.equal(tensor, other)


def test_what_is_cast(session):
    model, weight = with_layer(), nn.Parameter(torch.ones(16, 4))
    output = model(X)
    assert output.dtype is H and (output @ output.T).dtype is H
    assert nn.Sequential(Whitening(), model)[0](X).dtype is FP32
    for tensor in (weight, weight.t().t(), weight[:, :2], (weight * 2).exp()):
        assert (X @ tensor).dtype is H
    with torch.no_grad():
        assert (X @ weight).dtype is (X @ weight[:, :2]).dtype is H
    unit = F.normalize(model(X).float(), dim=1)
    assert (unit @ unit.T).dtype is H, "it leads back to parameters"
    assert (unit.detach() @ unit.detach().T).dtype is FP32
    bare = torch.ones(16, 4, requires_grad=True)
    assert (X @ bare).dtype is ((X @ bare).exp() @ bare.T).dtype is FP32
    with torch.autocast("cpu", enabled=False):
        assert model(X).dtype is FP32


def test_a_forward_that_raises_ends_its_casts(session):
    for kind in (KeyError, KeyboardInterrupt):
        with pytest.raises(kind):
            with_layer(mock.Mock(side_effect=kind))(X)
        assert (X @ X.T).dtype is FP32, kind


def test_threads_and_checkpoints(session):
    model = with_layer()
    assert in_threads(lambda: (model(X).dtype, (X @ X.T).dtype)) == [(H, FP32)]
    for reentrant in (True, False):
        x = X.clone().requires_grad_()
        checkpoint(
            lambda x: model(x) @ torch.ones(16, 2), x, use_reentrant=reentrant
        ).sum().backward()
        assert x.grad is not None


def test_a_weight_is_cast_once_in_a_forward(session):
    with_layer(lambda self, x: self.layer(self.layer(x)))(X)
    assert session.policies.cache.misses == 2  # weight and bias


@pytest.mark.parametrize("function", [False, True], ids=["a model", "a function"])
def test_compiled(session, function):
    model = with_layer()
    call = (lambda x: model(x)) if function else model
    compiled = torch.compile(call, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(X), model(X), atol=0.3, rtol=0.05)
        assert compiled(X).dtype is H
    torch.compiler.reset()


@pytest.mark.parametrize(
    "step",
    [lambda loss, x: loss.backward(), lambda loss, x: torch.autograd.grad(loss, x)],
    ids=["backward", "grad"],
)
@pytest.mark.parametrize("asked", [{}, {"dtype": H}], ids=["float16", "bfloat16"])
def test_a_script_that_trains_bare_tensors_hears_that_nothing_is_cast(step, asked, caplog):
    auto.start(asked)
    bare = torch.ones(16, 4, requires_grad=True)
    for _ in range(2):
        step((X @ bare).pow(2).mean(), bare)
    [told] = [record.getMessage() for record in caplog.records]
    assert "nothing is cast" in told and "nn.Parameters of a module" in told
    ampatch.deactivate()


@pytest.mark.parametrize("holder", [with_layer, lambda: nn.Parameter(torch.ones(16, 4))])
def test_nobody_else_hears_it(session, holder, caplog):
    held = holder()
    (held(X) if isinstance(held, nn.Module) else X @ held).sum().backward()
    assert caplog.records == []
