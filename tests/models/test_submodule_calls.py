"""Half models whose parts and methods are called from outside their forward; their dtype stays."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from small_training import Made, managed, pass_back, step
from torch import nn

import ampatch
from ampatch.session import facade, policies

HALF_LEVELS = pytest.mark.parametrize("level", ["O2", "O3"])
X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 4)
        self.embed = nn.Embedding(5, 4)

    def encode(self, x):
        h = torch.relu(self.encoder(x))
        return self.norm(h)

    def project(self, x, *, memo):
        memo["seen"] = self.head(x)
        return F.normalize(memo["seen"], dim=-1)

    def encode_text(self, x):
        return self.head(x) @ self.head.weight  # as CLIP's: a part's result beside a weight

    def attend(self, x, mask):
        return torch.softmax(self.head(x) @ self.head(x).t() + mask, -1)

    def forward(self, x):
        return self.head(self.rnn(self.encode(x)[:, None])[0][:, 0])


CALLS = {
    "a layer": lambda model: model.head(X),
    "a container": lambda model: model.encoder(X),
    "a method": lambda model: model.encode(X),
    "a method with keywords": lambda model: model.project(X, memo={}),
    "a method that mixes": lambda model: model.encode_text(X),
    "in DataParallel": lambda model: nn.DataParallel(model).module.head(X),
    "an RNN": lambda model: model.rnn(X[:, None])[0],
    "a chain": lambda model: model.head(model.norm(model.encoder(X))),
    "a wrapper": lambda model: nn.Sequential(model.encoder, model.head)(X),
    "a batch norm": lambda model: model.norm(X),
    "an embedding": lambda model: model.embed(torch.arange(5)),
}


def start(level, dtype=torch.bfloat16, model=None, **settings):
    return managed(Net() if model is None else model, level, dtype, **settings)


@HALF_LEVELS
@pytest.mark.parametrize("name", CALLS)
def test_parts_and_methods_take_float_inputs(level, name, half):
    (model, _), plain = start(level, half), Net()
    model.train()
    for _ in range(2):
        torch.testing.assert_close(
            CALLS[name](model).float(), CALLS[name](plain), rtol=0.05, atol=0.05
        )
        model(X)
        plain(X)


@HALF_LEVELS
@pytest.mark.parametrize("beside", [None, {"meta"}], ids=["no GPU", "a GPU in the machine"])
def test_large_inputs_of_a_part_count(level, beside, monkeypatch):
    """Also of one on another device than the model's first weights."""
    monkeypatch.setattr(policies, "initial_cast_devices", lambda: beside and set(beside))
    (model, _), plain = start(level, torch.float16), Net()
    mask = torch.full((3, 3), -1e9).triu(1)
    torch.testing.assert_close(
        model.attend(X, mask).float(), plain.attend(X, mask), rtol=0.02, atol=0.02
    )
    big = torch.full((3, 4), 1e5)

    layer = Made(lambda self, x: self.layer(x / 1e5), layer=nn.Linear(4, 4))
    inner = nn.Sequential(nn.Linear(4, 4, device="meta"), layer)
    plain = copy.deepcopy(inner)
    start(level, torch.float16, inner)
    torch.testing.assert_close(inner[1](big).float(), plain[1](big), rtol=0.02, atol=0.02)


@HALF_LEVELS
def test_a_part_may_call_itself_and_may_fail(level):
    def deep(self, x, depth):
        if depth < 0:
            raise ValueError("too deep")
        x = self.layer(self(x, depth - 1) if depth else x)
        dtypes.append(self.layer.weight.dtype)
        return x

    dtypes = []
    model, _ = start(level, model=nn.Sequential(Made(deep, layer=nn.Linear(4, 4))))
    for _ in range(2):
        assert model[0](X, 3).shape == (3, 4)
        with pytest.raises(ValueError, match="too deep"):
            model[0](X, -1)
        assert model[0].layer(X).shape == (3, 4)
    assert dtypes == [torch.bfloat16] * 8


@pytest.mark.parametrize("reentrant", [False, True])
@HALF_LEVELS
def test_recomputation_gets_the_inputs_of_its_forward(level, reentrant):
    """A mask that is in FP32 within the forward is so in its recomputation."""
    dtypes = []

    def inner(self, x, mask):
        dtypes.append(mask.dtype)
        return self.layer(x) + mask.to(x.dtype)

    def outer(self, x):
        mask, x = torch.full((3, 4), 0.5), x.requires_grad_()
        return torch.utils.checkpoint.checkpoint(self.inner, x, mask, use_reentrant=reentrant)

    model = Made(outer, inner=Made(inner, layer=nn.Linear(4, 4)))
    model, optimizer = start(level, model=model)
    step(model(X.clone()).sum(), optimizer)
    assert dtypes == [torch.float32] * 2


# Their dtype

CHANGES = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.float64),
    "to device and dtype": lambda model: model.to("cpu", torch.float64),
    "type": lambda model: model.type(torch.float64),
    "a part": lambda model: model.encoder.double(),
    "a wrapper": lambda model: nn.Sequential(model).double(),
}
FLOATS = {
    "float": lambda model: model.float(),
    "float of a part": lambda model: model.encoder.float(),
    "float of a wrapper": lambda model: nn.Sequential(model).float(),
}
SAYS = r"Net.*ampatch.unwrap\(model\).float\(\), or call ampatch.deactivate\(\).*initialize"


@pytest.mark.parametrize("name", [*CHANGES, *FLOATS])
def test_another_dtype_is_refused_and_nothing_changed(opt_level, name):
    """`model.float()` before an export, too: at O2 forwards would stay in half."""
    model, optimizer = start(opt_level)
    before = {n: (t, t.dtype, t.clone()) for n, t in model.named_parameters()}
    if name in FLOATS and opt_level in ("O0", "O1"):
        assert FLOATS[name](model) is not None
    else:
        with pytest.raises(ampatch.AmpatchError, match=SAYS):
            {**CHANGES, **FLOATS}[name](model)
    for parameter_name, parameter in model.named_parameters():
        known, dtype, value = before[parameter_name]
        assert parameter is known and parameter.dtype is dtype and torch.equal(parameter, value)
    step(model(X).float().sum(), optimizer)
    plain, true = ampatch.unwrap(model).float(), Net()
    true.load_state_dict(model.state_dict())
    assert torch.equal(plain(X), true(X))


def test_what_changes_no_dtype_works(opt_level):
    model, optimizer = start(opt_level, overrides={"head": "float"})
    assert model.to("cpu") is model and model.to(memory_format=torch.channels_last) is model
    assert model.requires_grad_() is model and model.share_memory() is model
    assert model.head.float() is model.head  # it runs in FP32, and so do norms but at O3
    assert opt_level == "O3" or model.norm.float() is model.norm
    assert model.head.to("cpu", model.head.weight.dtype) is model.head
    assert nn.Linear(2, 2).half().weight.dtype is torch.float16  # it is unmanaged
    step(model(X).float().sum(), optimizer)
    ampatch.deactivate()
    assert model.double().head.weight.dtype is torch.float64


@pytest.mark.parametrize("late", [False, True])
def test_what_has_come_into_the_model_since_takes_its_neighbours_dtype(opt_level, late):
    """As peft's `add_adapter` does: nothing relies on it yet; later on its own dtype passes."""
    model, optimizer = start(opt_level)
    dtype = model.head.weight.dtype
    model.extra = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if late:
        optimizer.add_param_group({"params": list(model.extra.parameters())})
        model.extra.to("cpu", model.extra[0].weight.dtype)
        with pytest.raises(ampatch.AmpatchError, match="Sequential cannot be converted.*0.weight"):
            model.extra.double()
    else:
        model.extra.double().to("cpu", dtype)
        assert model.extra[1].running_mean.dtype is dtype
    assert model.extra[0].weight.dtype is (torch.float32 if late else dtype)
    with pytest.raises(ampatch.AmpatchError, match=SAYS):
        model.double()
    step(model(X).float().sum(), optimizer)


@HALF_LEVELS
def test_within_the_forward_a_dtype_is_refused_too(level):
    model, _ = start(
        level, model=Made(lambda self, x: self.layer.double()(x), layer=nn.Linear(4, 4))
    )
    with pytest.raises(ampatch.AmpatchError, match="Linear cannot be converted"):
        model(X)


def test_a_weight_of_the_model_in_another_module_is_still_the_models(opt_level):
    model, _ = start(opt_level)
    other = nn.Linear(4, 4)
    other.weight = model.head.weight
    with pytest.raises(ampatch.AmpatchError, match="Linear cannot be converted.*weight"):
        other.double()


@contextlib.contextmanager
def swapping(does):
    torch.__future__.set_swap_module_params_on_conversion(does)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_move_for_which_torch_makes_new_parameters_is_refused(opt_level):
    model, optimizer = start(opt_level)
    before = list(model.parameters())
    with pytest.raises(ampatch.AmpatchError, match=r"from cpu to meta.*Net.*before ampatch.init"):
        model.to("meta")
    assert all(param is other for param, other in zip(before, model.parameters(), strict=True))
    assert not any(param.is_meta for param in before)
    with swapping(True):  # the very parameters move
        model.to("meta")
    assert before[0].is_meta and optimizer.param_groups[0]["params"][0] is before[0]


@HALF_LEVELS
def test_moving_a_model_with_gradients_keeps_them(level):
    """A step after it is the one that would have been taken, also where parameters are swapped."""
    ends = []
    for swaps in (None, False, True):
        model, optimizer = start(level)
        pass_back(model(X).square().sum(), optimizer)
        if swaps is not None:
            with swapping(swaps):
                model.to(memory_format=torch.channels_last).to("cpu")
        optimizer.step()
        with torch.no_grad():
            ends.append([model(X), *(value.clone() for value in model.state_dict().values())])
        ampatch.deactivate()
    assert all(map(torch.equal, ends[0], ends[1])) and all(map(torch.equal, ends[0], ends[2]))


# A framework's step: code around a half model that calls its parts


@HALF_LEVELS
def test_a_step_that_is_sent_through_the_call_is_no_forward(level):
    """As Lightning sends it: through a `forward` that it puts in for one call."""
    model = Made(lambda self, inputs: self.net(inputs), net=nn.Linear(4, 4))
    ampatch.initialize(model, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    seen, original = [], model.forward

    def step(inputs):
        model.forward = original
        seen.extend((inputs.dtype, model.net(inputs).dtype, model(inputs).dtype))
        return inputs.double()

    with facade.in_framework_step(model):
        model.forward = step
        assert model(X).dtype is torch.float64
    assert seen == [torch.float32] * 3
    outside = torch.bfloat16 if level == "O3" else torch.float32
    assert model.net(X).dtype is outside

    def fails(inputs):
        model.forward = original
        return 1 / 0

    model.forward = fails
    with pytest.raises(ZeroDivisionError), facade.in_framework_step(model):
        model(X)
    assert model(X).dtype is torch.float32 and model.net(X).dtype is outside
