"""O2 and O3: what happens to a model, what goes in and out of it, and that it comes back."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import pickle
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ampatch

NORMS = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 2))
    model.register_buffer("offset", torch.randn(2))
    return model


def start(level, dtype=torch.float16, seed=0, **settings):
    model = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **settings)
    return model, optimizer


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).float().square().mean()
        with ampatch.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def dtypes(model):
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


# Conversion


@pytest.mark.parametrize("level, keep", [("O2", None), ("O2", True), ("O3", True), ("O3", "True")])
def test_batchnorm_stays_float(level, keep, half):
    model, _ = start(level, half, keep_batchnorm_fp32=keep)
    for name, dtype in dtypes(model).items():
        if name != "1.num_batches_tracked":
            assert dtype is (torch.float32 if name in NORMS else half), name


@pytest.mark.parametrize("level, keep", [("O3", None), ("O3", False), ("O2", "False")])
def test_all_is_half(level, keep, half):
    model, _ = start(level, half, keep_batchnorm_fp32=keep)
    found = dtypes(model)
    assert found.pop("1.num_batches_tracked") is torch.int64
    assert set(found.values()) == {half}


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_o0_and_o1_keep_float_weights(level):
    model, _ = start(level)
    found = dtypes(model)
    del found["1.num_batches_tracked"]
    assert set(found.values()) == {torch.float32}


def test_a_double_model_goes_to_the_levels_type():
    for level, dtype in (("O0", torch.float32), ("O3", torch.float16)):
        model = nn.Linear(2, 2).double()
        ampatch.initialize(model, opt_level=level, verbosity=0)
        assert model.weight.dtype is dtype
        ampatch.deactivate()
        assert model.weight.dtype is torch.float64


def test_parameters_and_buffers_stay_the_same_objects(opt_level):
    model = build()
    before = [*model.parameters(), *model.buffers()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    returned = ampatch.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    train(model, optimizer)
    assert returned[0] is model and returned[1] is optimizer and optimizer.param_groups[0] is group
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))


def test_weights_are_the_rounded_float_weights(half):
    plain, (model, optimizer) = build(), start("O2", half)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype)), name
    for master, theirs in zip(ampatch.master_params(optimizer), plain.parameters(), strict=True):
        assert torch.equal(master, theirs)


# Inputs and outputs


class Point(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass(frozen=True)
class Data:
    x: torch.Tensor
    count: int


class Output(collections.OrderedDict):
    """As transformers' ModelOutput: a dict whose constructor is its own, with attributes."""

    def __init__(self, *, x, note):
        super().__init__(x=x, note=note)
        self.note = note

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


CONTAINERS = {
    "tensor": lambda x: x,
    "dict": lambda x: {"x": x, "n": 3},
    "ordered": lambda x: collections.OrderedDict(b=x, a=None),
    "list": lambda x: [x, None, "text"],
    "tuple": lambda x: (x, 2),
    "namedtuple": lambda x: Point(x, "label"),
    "dataclass": lambda x: Data(x, 7),
    "model output": lambda x: Output(x=x, note="n"),
    "read-only": lambda x: types.MappingProxyType({"x": x}),
    "nested": lambda x: {"a": [Point(x, "l"), (Data(x, 1), None)]},
}


class Echo(nn.Module):
    """Remembers what came in, and gives it back."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: Any = None

    def forward(self, value, *, extra=None):
        self.seen = value, extra
        return value


def shape_of(value):
    """Types, keys and all that is no tensor, with the tensors' dtypes out of it."""
    if isinstance(value, torch.Tensor):
        return "tensor" if value.is_floating_point() else ("other", value.tolist())
    if isinstance(value, (dict, types.MappingProxyType)):
        return type(value), [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(item) for item in value]
    if dataclasses.is_dataclass(value):
        return type(value), [shape_of(getattr(value, f.name)) for f in dataclasses.fields(value)]
    return value


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, (dict, types.MappingProxyType)):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_inputs_and_outputs_keep_their_containers(container, level, half):
    model = Echo()
    ampatch.initialize(model, opt_level=level, dtype=half, verbosity=0)
    given = CONTAINERS[container](torch.tensor([1.5, 2.5]))
    extra = CONTAINERS[container](torch.tensor([3.0]))
    output = model(given, extra=extra)
    for found, dtype, like in (
        (model.seen[0], half, given),
        (model.seen[1], half, extra),
        (output, torch.float32, given),
    ):
        assert shape_of(found) == shape_of(like)
        assert tensors_in(found) and {t.dtype for t in tensors_in(found)} == {dtype}
        assert [t.tolist() for t in tensors_in(found)] == [t.tolist() for t in tensors_in(like)]
    assert {t.dtype for t in tensors_in(given)} == {torch.float32}  # the caller's own is left alone
    if isinstance(output, Output):
        assert output.x is output["x"] and output.note == "n"


def test_integers_masks_and_complex_numbers_pass():
    model = Echo()
    ampatch.initialize(model, opt_level="O3", verbosity=0)
    given = [torch.arange(3), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)]
    assert model(given) is given and model.seen[0] is given


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_cast_model_outputs(level):
    for asked in (torch.float16, torch.float32, "bfloat16"):
        model, _ = start(level, cast_model_outputs=asked)
        expected = torch.bfloat16 if asked == "bfloat16" else asked
        assert model(torch.randn(4, 3)).dtype is expected
        ampatch.deactivate()


@pytest.mark.parametrize("level, dtype", [("O0", torch.float32), ("O1", torch.float16)])
def test_outputs_without_being_asked(level, dtype):
    assert start(level)[0](torch.randn(4, 3)).dtype is dtype


# state_dict


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def test_shared_weights_stay_shared():
    model, plain = Shared(), Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", init_scale=64.0, verbosity=0)
    assert model.head.weight is model.embed.weight
    (master,) = ampatch.master_params(optimizer)
    state = model.state_dict()
    for name in ("embed.weight", "head.weight"):
        assert torch.equal(state[name], plain.embed.weight) and state[name].dtype is torch.float32
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embed.weight and copied.head.weight.dtype is torch.float32
    loss = model(torch.tensor([[1, 2]])).square().sum()
    with ampatch.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    plain(torch.tensor([[1, 2]])).square().sum().backward()
    assert torch.allclose(master.grad, plain.embed.weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_state_dict_is_float(level, half):
    model, optimizer = start(level, half)
    train(model, optimizer)
    state = model.state_dict()
    assert list(state) == list(build().state_dict())
    assert all(t.dtype is torch.float32 for t in state.values() if t.is_floating_point())
    masters = dict(zip(dict(model.named_parameters()), ampatch.master_params(optimizer)))
    for name, master in masters.items():
        assert torch.equal(state[name], master.float()), name
    assert torch.equal(state["offset"], model.offset.float())
    inner = model[3].state_dict(prefix="p.")
    assert torch.equal(inner["p.weight"], masters["3.weight"].float())
    build().load_state_dict(state)  # a plain script reads it


def test_state_dict_keep_vars():
    model, optimizer = start("O2")
    masters = list(ampatch.master_params(optimizer))
    kept = model.state_dict(keep_vars=True)
    assert kept["0.weight"] is masters[0] and kept["0.weight"].requires_grad
    detached = model.state_dict()["0.weight"]
    assert not detached.requires_grad and detached.data_ptr() == masters[0].data_ptr()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_load_state_dict_reaches_the_masters(half, trained, part):
    model, optimizer = start("O2", half)
    if trained:
        train(model, optimizer)
    other = build(seed=5)
    if part:
        model[3].load_state_dict(other[3].state_dict())
    else:
        model.load_state_dict(other.state_dict())
    for owner, theirs in ((model[3], other[3]), (model, other))[: 1 if part else 2]:
        for name, value in owner.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]) or name == "offset", name
    master = list(ampatch.master_params(optimizer))[-2]
    assert torch.equal(master, other[3].weight) and not torch.equal(master, master.to(half).float())
    assert torch.equal(model[3].weight, other[3].weight.to(half))
    before = master.detach().clone()
    optimizer.zero_grad()
    optimizer.step()  # settles; the masters must not take their own rounding for news
    assert torch.equal(master, before)


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_written_into_half_weights_is_adopted(half, trained):
    model, optimizer = start("O2", half)
    if trained:
        train(model, optimizer)
    masters = list(ampatch.master_params(optimizer))
    before = masters[0].detach().clone()
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
        model[3].bias.fill_(0.75)
    state = model.state_dict()
    clamped = before.abs() > 0.11
    assert clamped.any() and torch.equal(state["3.bias"], torch.full((2,), 0.75))
    assert torch.equal(state["0.weight"][clamped].abs(), model[0].weight[clamped].abs().float())
    kept = before.abs() < 0.09  # elements that the clamp left alone keep their precision
    assert kept.any() and torch.equal(state["0.weight"][kept], before[kept])
    optimizer.step()
    assert torch.equal(masters[0], state["0.weight"])


def test_data_writes_before_the_first_step_are_adopted():
    model, optimizer = start("O2")
    version = model[3].bias._version
    model[3].bias.data = torch.full((2,), 0.5, dtype=torch.float16)
    model[0].bias.data.fill_(0.25)
    assert model[3].bias._version == version  # nothing tells of such a write
    train(model, optimizer, steps=1)
    assert (model[0].bias - 0.25).abs().max() < 0.2
    assert (model[3].bias - 0.5).abs().max() < 0.3 and (model[3].bias > 0.2).all()


# Copies


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "unwrap": ampatch.unwrap,
    "in a list": lambda model: copy.deepcopy([model])[0],
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_plain_float_models(opt_level, how):
    model, optimizer = start(opt_level)
    train(model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    copied = COPIES[how](model)
    assert type(copied) is nn.Sequential and copied is not model
    for plain, reference in zip(copied.modules(), build().modules(), strict=True):
        assert hooks_of(plain) == hooks_of(reference)
        assert set(vars(plain)) == set(vars(reference))
    found = copied.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not {torch.float16} & set(dtypes(copied).values())
    managed = {t.data_ptr() for t in (*model.parameters(), *ampatch.master_params(optimizer))}
    assert not managed & {t.data_ptr() for t in copied.parameters()}
    ampatch.deactivate()
    x = torch.randn(4, 3)
    assert torch.equal(copied.eval()(x), model.eval()(x))


@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_copied_part_no_longer_knows_the_model(how, level):
    """Its weights are half as they were, and its `state_dict` is its own."""
    model, _ = start(level)
    part = how(model[3])
    assert type(part) is nn.Linear and torch.equal(part.weight, model[3].weight)
    with torch.no_grad():
        part.weight.fill_(2.0)
    assert torch.equal(part.state_dict()["weight"], torch.full((2, 4), 2.0, dtype=torch.float16))
    part.load_state_dict(build(3)[3].state_dict())
    assert torch.equal(model.state_dict()["3.bias"], build()[3].bias) or level == "O3"
    ampatch.deactivate()
    assert part(torch.ones(1, 4, dtype=torch.float16)).dtype is torch.float16


def hooks_of(module):
    return {
        name: len(table)
        for name, table in vars(module).items()
        if "hook" in name and hasattr(table, "__len__")
    }
