"""torch's own words about precision: `torch.autocast`, `custom_fwd`."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch

H, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(3, 4)
STATE = ampatch.session.session.registry.state


class Net(nn.Module):
    """Runs a function on its layer and the input."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer, x)


def o1(function=lambda layer, x: layer(x), level="O1", dtype=H, **options):
    options = {"verbosity": 0, **options}
    return ampatch.initialize(Net(function), opt_level=level, dtype=dtype, **options)


def off(**options):
    return torch.autocast("cpu", enabled=False, **options)


REGIONS = {
    "torch.autocast": off,
    "torch.amp.autocast": lambda: torch.amp.autocast("cpu", enabled=False),
    "torch.cpu.amp.autocast": lambda: torch.cpu.amp.autocast(enabled=False),
}


@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning")
@pytest.mark.parametrize("scope", ["process", "model"])
@pytest.mark.parametrize("title", REGIONS)
def test_no_cast_in_a_disabled_region(title, scope):
    """In the model and outside, nested and as a decorator; a model that is called in it casts."""
    region = REGIONS[title]

    def forward(layer, x):
        with region():
            inside = layer(x)
            with torch.autocast("cpu", dtype=FP16):
                nested = layer(x)
            again = layer(x)
        return [y.dtype for y in (layer(x), inside, nested, again, layer(x))]

    model = o1(forward, patch_scope=scope)
    assert model(X) == [H, FP32, FP16, FP32, H]
    with region():
        assert model(X) == [H, FP32, FP16, FP32, H]
        assert model.layer(X).dtype is F.linear(X, model.layer.weight).dtype is FP32
    assert region()(lambda: model.layer(X).dtype)() is FP32
    assert model.layer(X).dtype is H and not STATE.per_thread


CUDA_OFF = "ignore:.*CUDA is not available:UserWarning"
AROUND = {
    "none": contextlib.nullcontext,
    "disabled": off,
    "disabled, for CUDA": lambda: torch.cuda.amp.autocast(False),
    "enabled": lambda: torch.autocast("cpu", dtype=H),
    "enabled, for CUDA": lambda: torch.autocast("cuda", dtype=FP16),
    "in a region that is off": lambda: both(off(), torch.autocast("cpu", dtype=H)),
}


@contextlib.contextmanager
def both(outer, inner):
    with outer, inner:
        yield


@contextlib.contextmanager
def raw_switch(value):
    torch.set_autocast_enabled("cpu", value)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", not value)


class Classes(nn.Module):
    """Calls of all kinds of rows; a forward without a graph is compared to the bit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(4))
        self.seen = []

    def forward(self, x):
        x = self.norm(self.first(x)).softmax(-1)
        self.seen.append(x.dtype)
        return torch.cat([self.last(x) * self.shift, x.exp()], -1)


def trained(around, **settings):
    """Outputs and gradients of a model whose forward is called inside `around`."""
    model = Classes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, dtype=H, verbosity=0, **settings)
    found = []
    for _ in range(3):
        with around():
            output = model(X)
        with ampatch.scale_loss(output.float().square().mean(), optimizer) as scaled:
            scaled.backward()
        found += [output, *(p.grad.clone() for p in ampatch.master_params(optimizer))]
        optimizer.step()
    found.append(model.seen)
    ampatch.deactivate()
    return found


def same(found, expected):
    assert found.pop() == expected.pop()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning", CUDA_OFF)
@pytest.mark.parametrize("title", [title for title in AROUND if title != "none"])
@pytest.mark.parametrize("scope", ["process", "model"])
def test_a_managed_forward_is_its_own_region(title, scope):
    """NVIDIA's scripts have `autocast(args.amp == "pytorch")` around the model."""
    same(trained(AROUND[title], patch_scope=scope), trained(AROUND["none"], patch_scope=scope))


@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning", CUDA_OFF)
@pytest.mark.parametrize("title", [title for title in AROUND if "disabled" in title])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_disabled_region_leaves_the_other_levels_alone(title, level, beside):
    """A half model with an FP32 buffer needs casts, too; `beside` an O1 model or without."""

    def run(around):
        if beside:
            ampatch.initialize(nn.Linear(2, 2), verbosity=0, dtype=H)
        return trained(around, opt_level=level)

    same(run(AROUND[title]), run(AROUND["none"]))


@pytest.mark.filterwarnings(CUDA_OFF)
def test_an_enabled_region_for_another_device_changes_nothing_inside_a_model_either():
    """accelerate puts one around `forward`."""

    def forward(layer, x):
        with torch.autocast("cuda", dtype=FP16):
            return torch.softmax(layer(x), -1), layer(x)

    assert [y.dtype for y in o1(forward)(X)] == [FP32, H]


@pytest.mark.parametrize("inside", [False, True])
def test_an_enabled_region_says_the_half_type(inside):
    """The rules stay those of the opt level: those of torch for the CPU have fewer rows."""

    def calls(layer, x):
        y = layer(x)
        return y, torch.softmax(y, -1), torch.mm(y, y.t())

    def region():
        return torch.autocast("cpu", dtype=FP16)

    def forward(layer, x):
        with region() if inside else contextlib.nullcontext():
            found = calls(layer, x)
        return (*found, layer(x))

    expected = o1(calls, dtype=FP16)(X)
    ampatch.deactivate()
    model = o1(forward)
    with contextlib.nullcontext() if inside else region():
        *found, after = model(X)
    assert after.dtype is (H if inside else FP16)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)
    assert model(X)[-1].dtype is H and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_inside_an_enabled_region_has_the_last_word(inside):
    """Parts with a precision of their own, and blocks; torch's autocast would cast in them."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=H) if inside else contextlib.nullcontext():
            with ampatch.disable_casts():
                plain = torch.mm(x, x.t())
            with ampatch.precision("float"):
                exact = torch.mm(x, x.t())
            return plain, exact, self.inner(x), torch.bmm(x[None], x.t()[None]), self.layer(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    Outer.forward = forward
    overrides = {"inner": "float", torch.bmm: "float"}
    model = ampatch.initialize(Outer(), dtype=H, overrides=overrides, verbosity=0)
    with contextlib.nullcontext() if inside else torch.autocast("cpu", dtype=H):
        found = model(X)
        assert torch.mm(X, X.t()).dtype is (FP32 if inside else H)  # torch's own, beside models
        with ampatch.disable_casts():
            assert torch.mm(X, X.t()).dtype is model.layer(X).dtype is FP32
    assert [y.dtype for y in found] == [FP32, FP32, FP32, FP32, H]


@pytest.mark.parametrize("block", [ampatch.disable_casts, lambda: ampatch.precision("float")])
def test_what_is_said_to_ampatch_holds_for_the_models_inside(block):
    """As apex's `disable_casts` does; a region of torch's in between says nothing new."""
    model = o1()
    with block():
        assert model(X).dtype is FP32
        with off():
            assert model(X).dtype is FP32
        with torch.autocast("cpu", dtype=H):
            assert torch.mm(X, X.t()).dtype is H
    with off(), block():
        assert model(X).dtype is FP32
    assert model(X).dtype is H


def test_a_model_in_an_island_of_another_model_casts():
    inner = o1()

    def forward(layer, x):
        with off():
            return layer(x), inner(x)

    assert [y.dtype for y in o1(forward)(X)] == [FP32, H]


@pytest.mark.parametrize("scope", ["process", "model"])
def test_outside_of_models_a_region_is_torch_s(scope):
    """Its rules and its dtype, gradients too."""

    def train(weight):
        with torch.autocast("cpu", dtype=FP16):
            output = torch.log_softmax(F.linear(X, weight).exp(), -1)
        output.float().sum().backward()
        return output, weight.grad

    torch.manual_seed(0)
    weight = torch.randn(4, 4)
    expected = train(weight.clone().requires_grad_())
    o1(patch_scope=scope)
    found = train(weight.clone().requires_grad_())
    assert all(map(torch.equal, found, expected)) and found[0].dtype is expected[0].dtype


@pytest.mark.parametrize("how", ["the model", "a part at O2", "in a region"])
@pytest.mark.parametrize("scope", ["process", "model"])
def test_what_ctrl_c_left_is_gone_when_the_next_forward_begins(scope, how):
    """It skips the hooks that would end the forward."""
    level = "O2" if how == "a part at O2" else "O1"

    def interrupted(layer, x):
        raise KeyboardInterrupt

    model = o1(interrupted, level=level, patch_scope=scope)
    region = torch.autocast("cpu", dtype=FP16) if how == "in a region" else contextlib.nullcontext()
    before = (X @ X.T).dtype
    with region:
        if how == "a part at O2":
            hook = model.layer.register_forward_pre_hook(lambda *_: interrupted(None, None))
        with pytest.raises(KeyboardInterrupt):
            model.layer(X) if how == "a part at O2" else model(X)
    if how == "a part at O2":
        hook.remove()
    model.function = lambda layer, x: layer(x)
    assert model(X).dtype is (FP32 if level == "O2" else H)
    assert not STATE.thread.stack and (X @ X.T).dtype is before
    if level == "O1":
        with torch.autocast("cpu", dtype=FP16):
            assert model(X).dtype is FP16


@pytest.mark.parametrize("scope", ["process", "model"])
def test_a_block_of_precision_beside_a_region_casts(scope):
    model = o1(patch_scope=scope)
    on, fp16 = torch.autocast("cpu", dtype=H), torch.autocast("cpu", dtype=FP16)
    for around, expected in (
        ((on, ampatch.precision("half")), H),
        ((fp16, ampatch.precision("half")), FP16),
        ((off(), ampatch.precision("half")), H),
        ((ampatch.precision("half"), off()), H),
        ((ampatch.precision("float"), off()), FP32),
        ((ampatch.disable_casts(), off()), FP32),
        ((on, ampatch.precision("float")), FP32),
    ):
        with contextlib.ExitStack() as stack:
            for one in around:
                stack.enter_context(one)
            assert model(X).dtype is expected, around
    assert model(X).dtype is H and not STATE.thread.stack


@pytest.mark.parametrize("block", [ampatch.disable_casts, lambda: ampatch.precision("float")])
def test_torchs_autocast_within_a_block_casts_alone_in_models_there(block):
    def forward(layer, x):
        return layer(x).dtype, torch.softmax(x.to(FP16), -1).dtype

    model = o1(forward)
    with torch.autocast("cpu", dtype=H):
        expected = forward(model.layer, X)
    with block(), off(), AROUND["enabled"]():
        assert model(X) == expected == (H, FP16)


def test_a_region_belongs_to_its_thread():
    model, found = o1(), []

    def run(inside):
        with inside:
            found.append(F.linear(X, model.layer.weight).dtype)

    with off():
        thread = threading.Thread(target=run, args=(torch.no_grad(),))
        thread.start()
        thread.join()
    thread = threading.Thread(target=run, args=(off(),))
    thread.start()
    thread.join()
    assert found == [H, FP32]


def test_regions_around_sessions():
    with off():  # from before the session: initialize is the innermost
        model = o1()
        assert model(X).dtype is F.linear(X, model.layer.weight).dtype is H
    assert model(X).dtype is F.linear(X, model.layer.weight).dtype is H
    with off():
        ampatch.deactivate()
        assert model(X).dtype is FP32
    assert not STATE.per_thread and not STATE.thread.stack
    with torch.autocast("cpu", dtype=FP16):
        model = o1()
        assert model(X).dtype is FP16
    assert model(X).dtype is H


@pytest.mark.parametrize("scope", ["process", "model"])
@pytest.mark.parametrize("region", [off, lambda: torch.autocast("cpu", dtype=FP16)])
def test_a_region_entered_by_hand_ends_with_its_session(region, scope):
    """No replacement sees its exit, which may come before the next session or in it."""
    o1(patch_scope=scope)
    region = region()
    region.__enter__()
    ampatch.deactivate()
    assert not STATE.thread.stack
    region.__exit__(None, None, None)
    model = o1(patch_scope=scope)
    assert model(X).dtype is F.linear(X, model.layer.weight).dtype is H


def test_a_region_that_outlives_its_session_is_one_in_the_next():
    o1(patch_scope="process")
    with torch.autocast("cpu", dtype=FP16):
        ampatch.deactivate()
        model = o1(patch_scope="process")
        assert model(X).dtype is torch.mm(X, X.t()).dtype is FP16
        assert torch.mm(X, X.t()).dtype is FP16
    assert model(X).dtype is torch.mm(X, X.t()).dtype is H and not STATE.thread.stack


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("value", [True, False])
def test_the_raw_switch_leaves_our_casts_as_they_are_and_says_so(value, is_before, caplog):
    found = torch.is_autocast_enabled("cpu")
    if is_before:
        torch.set_autocast_enabled("cpu", value)
    model = o1(verbosity=1)
    if not is_before:
        torch.set_autocast_enabled(enabled=value, device_type="cpu")
    try:
        assert model(X).dtype is H and not STATE.thread.stack
        said = [m for m in caplog.messages if "autocast_enabled" in m]
        assert len(said) == (not is_before)
        assert all("with ampatch.disable_casts():" in message for message in said)
    finally:
        ampatch.deactivate()
        assert torch.is_autocast_enabled("cpu") is value or not (value or is_before)
        torch.set_autocast_enabled("cpu", found)


@pytest.mark.parametrize("block, inside", [(off, H), (ampatch.disable_casts, FP32)])
def test_in_the_closure_of_a_step(block, inside):
    model, seen = Net(lambda layer, x: layer(x)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ampatch.initialize(model, optimizer, dtype=H, verbosity=0)

    def closure():
        output = model(X)
        seen.append(output.dtype)
        with ampatch.scale_loss(output.float().sum(), optimizer) as scaled:
            scaled.backward()

    optimizer.step(closure)
    with block():
        optimizer.step(closure)
    assert seen == [H, inside]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_runs_as_its_forward(reentrant, inside):
    """torch enters regions around it, to bring back autocast's state: no words of the user's."""
    seen = []

    def part(layer, x):
        seen.append(layer(x).dtype)
        return layer(x)

    def forward(layer, x):
        with off() if inside else torch.enable_grad():
            return checkpoint(part, layer, x, use_reentrant=reentrant)

    o1(forward)(X.clone().requires_grad_()).float().sum().backward()
    assert seen == [FP32 if inside else H] * 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("on", [lambda: torch.autocast("cpu", dtype=H), lambda: raw_switch(True)])
def test_a_recomputation_in_torchs_autocast_within_a_block(reentrant, on):
    """torch's autocast casts there, in the recomputation too."""
    seen = []

    def part(layer, x):
        seen.append(layer(x).dtype)
        return layer(x)

    model = o1(lambda layer, x: checkpoint(part, layer, x, use_reentrant=reentrant))
    with ampatch.disable_casts(), on():
        output = model(X.clone().requires_grad_())
    output.float().sum().backward()
    assert seen == [H, H] and not STATE.thread.stack


def test_replicas_of_data_parallel_have_the_casts_of_the_call():
    """torch enters regions in their threads, to bring back autocast's state there."""
    seen = []

    def parts(modules, inputs):
        def run(module, x):
            with off():  # what torch's own does where its autocast is off
                seen.append(module(x).dtype)

        threads = [threading.Thread(target=run, args=each) for each in zip(modules, inputs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def forward(layer, x):
        torch.nn.parallel.parallel_apply([layer, layer], [x, x])
        return layer(x)

    original, torch.nn.parallel.parallel_apply = torch.nn.parallel.parallel_apply, parts
    try:
        o1(forward)(X)
        ampatch.deactivate()
    finally:
        torch.nn.parallel.parallel_apply = original
    assert seen == [H, H]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_region_around_training_with_half_weights(level):
    """Autocast does on half weights what it does without us on a half model."""

    def train(inside):
        net = Net(lambda layer, x: layer(x))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        net, optimizer = ampatch.initialize(net, optimizer, opt_level=level, dtype=H, verbosity=0)
        for _ in range(3):
            with inside:
                loss = net(X).square().mean()
                optimizer.zero_grad()
                with ampatch.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
        weights = [value.clone() for value in net.state_dict().values()]
        ampatch.deactivate()
        return weights

    plain, found = train(torch.enable_grad()), train(torch.autocast("cpu", dtype=H))
    assert all(map(torch.equal, found, plain))


# What is said of our casts


def test_our_casts_count_as_autocast():
    """As libraries ask before they choose a dtype; FP32 islands by way of such a question too."""

    def forward(layer, x):
        with torch.autocast("cpu", enabled=False):
            inside = torch.is_autocast_enabled("cpu")
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), inside

    assert o1(forward, dtype=FP16)(X) == (True, FP16, False)
    with ampatch.disable_casts():
        assert not torch.is_autocast_enabled("cpu")
    ampatch.deactivate()
    assert not torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is H
    assert o1(forward, level="O2")(X) == (False, H, False)


def test_torch_itself_is_told_the_truth():
    """It keeps the state of autocast to bring it back, and would bring back one of its own."""
    o1()
    kwargs = torch.utils.checkpoint._get_autocast_kwargs("cpu")
    assert all(not one["enabled"] for one in kwargs if one is not None)
    assert torch.autocast("cpu").fast_dtype is H


class Multiply(torch.autograd.Function):
    seen: list = []

    @classmethod
    def note(cls, *tensors):
        cls.seen.append([*(t.dtype for t in tensors), torch.mm(X, X.t()).dtype])


class Cast(Multiply):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a, b):
        Cast.note(a, b)
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        Cast.note(grad)
        return grad @ b.t(), a.t() @ grad


class Follow(Multiply):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        Follow.note(a, b)
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        Follow.note(grad)
        return (grad @ b.t()).float(), (a.t() @ grad).float()


@pytest.mark.parametrize("cls", [Cast, Follow])
@pytest.mark.parametrize("forward_in", ["casts", "region"])
def test_custom_fwd_and_custom_bwd(cls, forward_in):
    """As under autocast; the backward pass is elsewhere, and runs as its forward did."""
    weight = torch.randn(4, 4, requires_grad=True)

    def seen(run, *around):
        Multiply.seen.clear()
        with around[0], around[1]:
            output = run()
        output.float().sum().backward()
        return list(Multiply.seen)

    def forward(layer, x):
        with off() if forward_in == "region" else torch.enable_grad():
            return cls.apply(x, weight)

    grad = torch.enable_grad()
    expected = seen(lambda: forward(None, X), torch.autocast("cpu", dtype=H), grad)
    model = o1(forward)
    assert seen(lambda: model(X), grad, grad) == expected
    assert seen(lambda: model(X), off(), grad) == expected


@torch.library.custom_op("ampatch_tests::early", mutates_args=())
def early(x: torch.Tensor) -> torch.Tensor:
    return x * 2


early.register_autocast("cpu", torch.float16)


def test_an_operator_with_a_kernel_for_autocast_runs_as_it_is_called():
    """docs/limits.md"""
    with torch.autocast("cpu", dtype=H):
        assert early(X).dtype is FP16
    o1(patch_scope="process")
    calls = (early, torch.ops.ampatch_tests.early, torch.ops.ampatch_tests.early.default)
    assert [call(X).dtype for call in calls] == [FP32] * 3
    assert [call(X.to(H)).dtype for call in calls] == [H] * 3


# torch.compile


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_region_in_a_compiled_model(backend):
    def forward(layer, x):
        with off():
            inside = layer(x)
            asked = torch.is_autocast_enabled("cpu")
            product = torch.mm(x, x.t())
            with torch.autocast("cpu", dtype=FP16):
                nested = layer(x)
        with torch.autocast("cpu", dtype=H):
            again = layer(x)
            exact = torch.softmax(again, -1)
        return layer(x), inside, product, nested, again, exact, torch.tensor(asked)

    torch._dynamo.reset()
    model = o1(forward)
    expected = model(X)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        found = compiled(X)
        assert [y.dtype for y in found] == [y.dtype for y in expected]
        for new, old in zip(found, expected, strict=True):
            torch.testing.assert_close(new, old)
    assert [y.dtype for y in expected[:6]] == [H, FP32, FP32, FP16, H, FP32]
    for around in (off(), torch.autocast("cpu", dtype=H)):
        with around:
            found = compiled(X)
        assert [y.dtype for y in found] == [y.dtype for y in expected]
    assert not STATE.per_thread and not STATE.thread.stack
