"""torch.autocast's regions, switch and questions, and `custom_fwd`, beside our casts.

Training with regions in and around a model is in `tests/laws/situations_amp_examples.py`.
"""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from engine import nothing_runs
from small_training import Made, in_threads
from torch import nn

import ampatch

H, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(3, 4)
NOTHING = contextlib.nullcontext


def o1(function=lambda layer, x: layer(x), level="O1", **options):
    """A managed model that runs a function on its layer and the input."""
    torch.manual_seed(0)
    model = Made(lambda self, x: self.function(self.layer, x), layer=nn.Linear(4, 4))
    model.function = function
    return ampatch.initialize(model, opt_level=level, **{"dtype": H, "verbosity": 0, **options})


def off(**options):
    return torch.autocast("cpu", enabled=False, **options)


def on(device="cpu", dtype=H):
    return torch.autocast(device, dtype=dtype)


def fp16():
    return on(dtype=FP16)


@contextlib.contextmanager
def both(outer, inner):
    with outer, inner:
        yield


CUDA_OFF = "ignore:.*CUDA is not available:UserWarning"
REGIONS = {
    "torch.autocast": off,
    "torch.amp.autocast": lambda: torch.amp.autocast("cpu", enabled=False),
    "torch.cpu.amp.autocast": lambda: torch.cpu.amp.autocast(enabled=False),
}


@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning", CUDA_OFF)
@pytest.mark.parametrize("scope", ["process", "model"])
@pytest.mark.parametrize("title", REGIONS)
def test_no_cast_in_a_disabled_region(title, scope):
    """In the model and outside, nested and as a decorator; a model that is called in it casts.

    One that is enabled for another device changes nothing: accelerate puts it around `forward`.
    """
    region = REGIONS[title]

    def forward(layer, x):
        with region():
            inside = layer(x)
            with fp16():
                nested = layer(x)
            again = layer(x)
        with on("cuda", FP16):
            other = layer(x)
        return [y.dtype for y in (layer(x), inside, nested, again, other, layer(x))]

    model, expected = o1(forward, patch_scope=scope), [H, FP32, FP16, FP32, H, H]
    assert model(X) == expected
    with region():
        assert model(X) == expected
        assert model.layer(X).dtype is F.linear(X, model.layer.weight).dtype is FP32
    assert region()(lambda: model.layer(X).dtype)() is FP32
    assert model.layer(X).dtype is H and nothing_runs()


AROUND = {
    "disabled": off,
    "disabled, for CUDA": lambda: torch.cuda.amp.autocast(False),
    "enabled": on,
    "enabled, for CUDA": lambda: on("cuda", FP16),
    "in a region that is off": lambda: both(off(), on()),
}


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
    """Outputs and gradients of a model whose forward is called inside `around`, and its dtypes."""
    model, outputs = Classes(), []
    ampatch.initialize(model, dtype=H, verbosity=0, **settings)
    for _ in range(2):  # the second begins with the weights that the first has cast
        with around():
            outputs.append(model(X))
        outputs[-1].float().square().mean().backward()
    ampatch.deactivate()
    return [*outputs, *(p.grad for p in model.parameters())], model.seen


@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning", CUDA_OFF)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("scope", ["process", "model"])
def test_a_managed_forward_is_its_own_region(opt_level, scope, beside):
    """NVIDIA's scripts have `autocast(args.amp == "pytorch")` around the model.

    A half model with an FP32 buffer needs casts, too; `beside` an O1 model or without.
    """
    results = {}
    for title, around in {"none": NOTHING, **AROUND}.items():
        if beside:
            ampatch.initialize(nn.Linear(2, 2), verbosity=0, dtype=H)
        if opt_level in ("O1", "O2", "O3") or "disabled" in title or title == "none":
            results[title] = trained(around, opt_level=opt_level, patch_scope=scope)
    expected, expected_dtypes = results.pop("none")
    for title, (tensors, dtypes) in results.items():
        assert dtypes == expected_dtypes, title
        for tensor, other in zip(tensors, expected, strict=True):
            assert tensor.dtype is other.dtype and torch.equal(tensor, other), title


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_inside_an_enabled_region_has_the_last_word(inside):
    """Parts with a precision of their own, and blocks; torch's autocast would cast in them."""

    def forward(self, x):
        with on() if inside else NOTHING():
            with ampatch.disable_casts():
                plain = torch.mm(x, x.t())
            with ampatch.precision("float"):
                exact = torch.mm(x, x.t())
            return plain, exact, self.inner(x), torch.bmm(x[None], x.t()[None]), self.layer(x)

    model = Made(forward, inner=nn.Linear(4, 4), layer=nn.Linear(4, 4))
    overrides = {"inner": "float", torch.bmm: "float"}
    ampatch.initialize(model, dtype=H, overrides=overrides, verbosity=0)
    with NOTHING() if inside else on():
        outputs = model(X)
        assert torch.mm(X, X.t()).dtype is (FP32 if inside else H)  # torch's own, beside models
        with ampatch.disable_casts():
            assert torch.mm(X, X.t()).dtype is model.layer(X).dtype is FP32
    assert [y.dtype for y in outputs] == [FP32, FP32, FP32, FP32, H]


SETTINGS = [  # what stands around a managed forward, and the dtype that it computes in
    ([on, lambda: ampatch.precision("half")], H),
    ([fp16, lambda: ampatch.precision("half")], FP16),
    ([off, lambda: ampatch.precision("half")], H),
    ([lambda: ampatch.precision("half"), off], H),
    ([on, lambda: ampatch.precision("float")], FP32),
    *(
        (around, FP32)
        for block in (ampatch.disable_casts, lambda: ampatch.precision("float"))
        for around in ([block], [block, off], [off, block])
    ),
    # torch's autocast within a block casts alone, in models there too
    *(([b, off, on], H) for b in (ampatch.disable_casts, lambda: ampatch.precision("float"))),
]


@pytest.mark.parametrize("scope", ["process", "model"])
def test_the_users_blocks_hold_in_models_and_say_more_than_regions(scope):
    """As apex's `disable_casts` does; a region of torch's in between says nothing new."""

    def forward(layer, x):
        return layer(x).dtype, torch.softmax(x.to(FP16), -1).dtype

    model = o1(forward, patch_scope=scope)
    with on():
        of_torch = forward(model.layer, X)
    for around, expected in SETTINGS:
        with contextlib.ExitStack() as stack:
            for enter in around:
                stack.enter_context(enter())
            dtypes = model(X)
        assert dtypes[0] is expected, around
        assert len(around) < 3 or dtypes == of_torch == (H, FP16)
    with ampatch.disable_casts(), on():
        assert torch.mm(X, X.t()).dtype is H
    assert model(X)[0] is H and nothing_runs()


def test_regions_around_sessions():
    with off():  # from before the session: initialize is the innermost
        model = o1()
        assert model(X).dtype is F.linear(X, model.layer.weight).dtype is H
    assert model(X).dtype is F.linear(X, model.layer.weight).dtype is H
    with off():
        ampatch.deactivate()
        assert model(X).dtype is FP32
    assert nothing_runs()
    with fp16():
        model = o1(patch_scope="process")
        assert model(X).dtype is FP16
        ampatch.deactivate()  # one that outlives its session is one in the next
        model = o1(patch_scope="process")
        assert model(X).dtype is torch.mm(X, X.t()).dtype is FP16
    assert model(X).dtype is torch.mm(X, X.t()).dtype is H and nothing_runs()


@pytest.mark.parametrize("scope", ["process", "model"])
@pytest.mark.parametrize("region", [off, fp16])
def test_a_region_entered_by_hand_ends_with_its_session(region, scope):
    """No replacement sees its exit, which may come before the next session or in it."""
    o1(patch_scope=scope)
    region = region()
    region.__enter__()
    ampatch.deactivate()
    assert nothing_runs()
    region.__exit__(None, None, None)
    model = o1(patch_scope=scope)
    assert model(X).dtype is F.linear(X, model.layer.weight).dtype is H


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("value", [True, False])
def test_the_raw_switch_leaves_our_casts_as_they_are_and_says_so(value, is_before, caplog):
    with torch.autocast("cpu", enabled=value) if is_before else NOTHING():
        model = o1(verbosity=1)
        if not is_before:
            torch.set_autocast_enabled(enabled=value, device_type="cpu")
        try:
            assert model(X).dtype is H
            said = [m for m in caplog.messages if "autocast_enabled" in m]
            assert len(said) == (not is_before)
            assert all("with ampatch.disable_casts():" in message for message in said)
            ampatch.deactivate()
            assert torch.is_autocast_enabled("cpu") is value
        finally:
            if not is_before:
                torch.set_autocast_enabled("cpu", False)


def test_replicas_of_data_parallel_have_the_casts_of_the_call(monkeypatch):
    """torch enters regions in their threads, to bring back autocast's state there."""

    def parts(modules, inputs):
        def run(module, x):
            with off():  # what torch's own does where its autocast is off
                return module(x).dtype

        return in_threads(*map(partial, [run] * len(modules), modules, inputs))

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.parallel, "parallel_apply", parts)
        model = o1(lambda layer, x: torch.nn.parallel.parallel_apply([layer, layer], [x, x]))
        assert model(X) == [H, H]
        ampatch.deactivate()


def test_our_casts_count_as_autocast():
    """As libraries ask before they choose a dtype; FP32 islands by way of such a question too."""

    def forward(layer, x):
        with torch.autocast("cpu", enabled=False):
            inside = torch.is_autocast_enabled("cpu")
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), inside

    assert o1(forward, dtype=FP16)(X) == (True, FP16, False)
    assert not torch.is_autocast_enabled("cpu")  # beside models nothing is cast
    ampatch.deactivate()
    o1(dtype=FP16, patch_scope="process")
    assert torch.is_autocast_enabled("cpu")
    with ampatch.disable_casts():
        assert not torch.is_autocast_enabled("cpu")
    with ampatch.precision("float"):
        assert torch.get_autocast_dtype("cpu") is FP16
    ampatch.deactivate()
    assert not torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is H
    assert o1(forward, level="O2")(X) == (False, H, False)


def test_torch_itself_is_told_the_truth():
    """It keeps the state of autocast to bring it back, and would bring back one of its own."""
    o1()
    kwargs = torch.utils.checkpoint._get_autocast_kwargs("cpu")
    assert all(not options["enabled"] for options in kwargs if options is not None)
    assert torch.autocast("cpu").fast_dtype is H


def product(cast_inputs):
    """A Function with `custom_fwd`, and a list of the dtypes that it has seen in both passes."""
    seen = []

    def note(*tensors):
        result = torch.mm(X, X.t())
        seen.append([*(t.dtype for t in tensors), result.dtype, result.tolist()])

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, a, b):
            note(a, b)
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            note(grad)
            return (grad @ b.t()).float(), (a.t() @ grad).float()

    return Product, seen


@pytest.mark.parametrize("cast_inputs", [FP32, None])
@pytest.mark.parametrize("forward_in", ["casts", "region"])
def test_custom_fwd_and_custom_bwd(cast_inputs, forward_in):
    """As under autocast; the backward pass is elsewhere, and runs as its forward did."""
    weight = torch.randn(4, 4, requires_grad=True)
    function, dtypes = product(cast_inputs)

    def seen(run, around):
        dtypes.clear()
        with around:
            output = run()
        output.float().sum().backward()
        return list(dtypes)

    def forward(layer, x):
        with off() if forward_in == "region" else NOTHING():
            return function.apply(x, weight)

    expected = seen(lambda: forward(None, X), on())
    model = o1(forward)
    assert seen(lambda: model(X), NOTHING()) == expected
    assert seen(lambda: model(X), off()) == expected


def test_custom_bwd_means_the_policy_of_its_forward():
    """Not the tables in the half dtype, which torch's autocast would be."""
    function, seen = product(None)

    def forward(layer, x):
        with ampatch.precision("float"):
            return function.apply(x, layer.weight)

    o1(forward)(X).float().sum().backward()
    assert len(seen) == 2 and seen[0][-2:] == seen[1][-2:]


def test_custom_bwd_beside_models_casts_the_calls_that_its_forward_did():
    function, seen = product(None)
    o1(patch_scope="model")
    function.apply(X, torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert [dtypes[-2] for dtypes in seen] == [FP32, FP32]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_region_in_a_compiled_model(backend):
    def forward(layer, x):
        with off():
            inside = layer(x)
            asked = torch.is_autocast_enabled("cpu")
            product = torch.mm(x, x.t())
            with fp16():
                nested = layer(x)
        with on():
            again = layer(x)
            exact = torch.softmax(again, -1)
        return layer(x), inside, product, nested, again, exact, torch.tensor(asked)

    torch._dynamo.reset()
    model = o1(forward)
    expected = model(X)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        outputs = compiled(X)
        assert [y.dtype for y in outputs] == [y.dtype for y in expected]
        for new, old in zip(outputs, expected, strict=True):
            torch.testing.assert_close(new, old)
    assert [y.dtype for y in expected[:6]] == [H, FP32, FP32, FP16, H, FP32]
    for around in (off(), on()):
        with around:
            outputs = compiled(X)
        assert [y.dtype for y in outputs] == [y.dtype for y in expected]
    assert nothing_runs()
