"""The replaced forwards of Linear and convolutions do what torch's do, whatever `weight` is."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types

import pytest
import torch
import torch.fx
import torch.nn.functional as F
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from torch import nn

import ampatch
from ampatch.torch_private import layer_forwards

INPUTS = {
    nn.Linear: torch.ones(2, 3),
    nn.Conv1d: torch.ones(2, 3, 1),
    nn.Conv2d: torch.ones(2, 3, 1, 1),
    nn.Conv3d: torch.ones(2, 3, 1, 1, 1),
}
KINDS = list(INPUTS)
ORIGINALS = {kind: kind.forward for kind in KINDS}
NAMES = ["weight", "bias"]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture(params=["O1", "O2"])
def session(request):
    """A session that replaces the forwards, of a model that has no part in the tests."""
    open_session(request.param)
    yield
    ampatch.deactivate()


def open_session(level="O1"):
    ampatch.initialize(nn.Linear(1, 1), opt_level=level, dtype="bfloat16", verbosity=0)


def make(kind, **options):
    torch.manual_seed(0)
    return kind(3, 3, **({} if kind is nn.Linear else {"kernel_size": 1}), **options)


def other_of(layer, name):
    """What `layer.name` is to be instead."""
    return torch.full_like(getattr(layer, name).detach(), 7.0)


def look_ups(call, *args):
    """How often `nn.Module.__getattr__` runs in a call."""
    found, code = 0, nn.Module.__getattr__.__code__

    def note(frame, event, argument):
        nonlocal found
        found += event == "call" and frame.f_code is code

    sys.setprofile(note)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
    return found


def does_what_torch_does(layer, kind):
    x = INPUTS[kind]
    found, expected = layer(x), ORIGINALS[kind](layer, x)
    return found.dtype is expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=["bias", "none"])
def test_weights_are_read_without_a_look_up(kind, options, session):
    layer = make(kind, **options)
    assert does_what_torch_does(layer, kind)
    assert look_ups(layer, INPUTS[kind]) == 0
    assert look_ups(ORIGINALS[kind], layer, INPUTS[kind]) == 2


def test_the_class_is_as_before_after_the_session(kind):
    open_session()
    assert kind.forward is not ORIGINALS[kind]
    ampatch.deactivate()
    assert kind.forward is ORIGINALS[kind]


def test_no_level_that_casts_nothing_replaces_it(kind):
    open_session("O0")
    assert kind.forward is ORIGINALS[kind]
    ampatch.deactivate()


def test_what_was_bound_in_the_session_serves_after_it(kind):
    open_session()
    layer = make(kind)
    forward = layer.forward
    ampatch.deactivate()
    x = INPUTS[kind]
    assert torch.equal(forward(x), layer(x))


def test_it_looks_like_torch_s(kind, session):
    found, original = kind.forward, ORIGINALS[kind]
    assert inspect.signature(found) == inspect.signature(original)
    assert (found.__name__, found.__qualname__) == (original.__name__, original.__qualname__)
    assert found.__module__ == original.__module__ and found.__doc__ == original.__doc__
    assert inspect.getsource(found) == inspect.getsource(original)
    assert pickle.loads(pickle.dumps(found)) is found


# What `self.weight` and `self.bias` may be


@pytest.mark.parametrize("name", NAMES)
def test_an_attribute_of_the_instance_goes_first(kind, name, session):
    layer = make(kind)
    layer.__dict__[name] = other_of(layer, name)  # beside the entry in the table
    assert does_what_torch_does(layer, kind)


@pytest.mark.parametrize("name", NAMES)
def test_a_property_of_the_class_goes_first(kind, name, session, monkeypatch):
    layer = make(kind)
    other = other_of(layer, name)
    monkeypatch.setattr(kind, name, property(lambda self: other), raising=False)
    assert does_what_torch_does(layer, kind)


@pytest.mark.parametrize("name", NAMES)
def test_a_property_of_a_subclass_goes_first(kind, name, session):
    layer = make(kind)
    other = other_of(layer, name)
    layer.__class__ = type("Mine", (kind,), {name: property(lambda self: other)})
    assert does_what_torch_does(layer, kind)


@pytest.mark.parametrize("name", NAMES)
def test_it_need_not_be_a_parameter(kind, name, session):
    layer = make(kind)
    other = other_of(layer, name)
    delattr(layer, name)
    layer.register_buffer(name, other)
    assert does_what_torch_does(layer, kind)


def test_another_look_up_is_used(kind, session, monkeypatch):
    layer, original = make(kind), nn.Module.__getattr__
    others = {name: other_of(layer, name) for name in NAMES}
    monkeypatch.setattr(
        nn.Module,
        "__getattr__",
        lambda self, name: others[name] if name in others else original(self, name),
    )
    assert does_what_torch_does(layer, kind)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", amount=0.5),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
    ],
    ids=["pruned", "weight_norm", "spectral_norm", "parametrized"],
)
def test_weights_that_are_computed(change, kind, session):
    layer = make(kind)
    change(layer)
    layer.eval()  # spectral_norm counts its calls
    assert does_what_torch_does(layer, kind)


def test_a_replica_has_plain_tensors(kind, session):
    layer = make(kind)
    replica = layer._replicate_for_data_parallel()
    for name in NAMES:
        setattr(replica, name, other_of(layer, name))
    assert does_what_torch_does(replica, kind)


def test_a_table_of_other_code_is_asked(kind, session):
    layer = make(kind)
    others = {name: nn.Parameter(other_of(layer, name)) for name in NAMES}

    class Gathering(dict):
        def __getitem__(self, name):
            return others[name]

    layer._parameters = Gathering(layer._parameters)
    assert does_what_torch_does(layer, kind)


def test_parameters_that_are_swapped(kind, session):
    layer, x = make(kind), INPUTS[kind]
    others = {name: other_of(layer, name) for name in NAMES}
    swapped = copy.deepcopy(layer)
    swapped.load_state_dict(others)
    assert torch.equal(torch.func.functional_call(layer, others, (x,)), swapped(x))


# What the forward calls


def test_a_function_that_was_replaced_later_is_called(session, monkeypatch):
    layer, called = make(nn.Linear), []
    monkeypatch.setattr(F, "linear", lambda *args: called.append(args) or args[0])
    layer(INPUTS[nn.Linear])
    assert len(called) == 1 and called[0][1] is layer.weight and called[0][2] is layer.bias


def test_the_module_finds_functions_where_torch_s_does(session, monkeypatch):
    mine = types.SimpleNamespace(linear=lambda input, weight, bias: "mine")
    monkeypatch.setattr(torch.nn.modules.linear, "F", mine)
    assert make(nn.Linear)(INPUTS[nn.Linear]) == "mine"


@pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
def test_a_method_of_the_instance_is_called(kind, session):
    layer = make(kind)
    layer._conv_forward = lambda input, weight, bias: "mine"
    assert layer(INPUTS[kind]) == "mine"


@pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
def test_padding_is_torch_s(kind, session):
    assert does_what_torch_does(make(kind, padding=1, padding_mode="circular"), kind)


# Forwards of other code


def test_a_forward_of_other_code_is_left_in(kind, monkeypatch):
    @functools.wraps(ORIGINALS[kind])
    def mine(self, input):
        return "mine"

    monkeypatch.setattr(kind, "forward", mine)
    open_session()
    assert kind.forward is mine and make(kind)(INPUTS[kind]) == "mine"
    ampatch.deactivate()
    assert kind.forward is mine


def test_a_copy_of_torch_s_in_another_module_is_left_in(kind, monkeypatch):
    """It may find other functions there."""
    elsewhere = types.FunctionType(ORIGINALS[kind].__code__, {"F": F})
    monkeypatch.setattr(kind, "forward", elsewhere)
    assert kind not in [owner for owner, _, _ in layer_forwards.replacements()]


def test_a_forward_that_does_something_else_is_left_in(kind, monkeypatch):
    """As that of a later torch may."""

    def later(self, input):
        return self._conv_forward(input, self.weight, self.bias, None)

    home = sys.modules[kind.__module__]
    monkeypatch.setattr(kind, "forward", types.FunctionType(later.__code__, vars(home)))
    assert kind not in [owner for owner, _, _ in layer_forwards.replacements()]


def test_a_forward_that_covers_it_is_left_in(kind, monkeypatch):
    with monkeypatch.context() as patch:
        open_session()
        covered = kind.forward
        mine = lambda self, input: covered(self, input) + 1  # noqa: E731
        patch.setattr(kind, "forward", mine)
        layer, x = make(kind), INPUTS[kind]
        assert torch.equal(layer(x), ORIGINALS[kind](layer, x) + 1)
        ampatch.deactivate()
        assert kind.forward is mine
        assert torch.equal(layer(x), ORIGINALS[kind](layer, x) + 1)
    kind.forward = ORIGINALS[kind]  # else the patch put the replacement back


# Traced and compiled


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.linear = nn.Conv2d(1, 2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(self.convolution(x).flatten(1))


X = torch.ones(3, 1, 2, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_compiles_torch_s_forward(session):
    net = Net()
    scripted = torch.jit.script(net)
    with ampatch.disable_casts():
        assert torch.equal(scripted(X), net(X))


@pytest.mark.filterwarnings("ignore:Was not able to add assertion")
def test_fx_records_parameters_where_layers_are_no_leaves(session):
    class All(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return False

    net = nn.Sequential(nn.Linear(3, 3))
    graph = All().trace(net, {"input": INPUTS[nn.Linear]})
    targets = [node.target for node in graph.nodes if node.op == "get_attr"]
    assert {"0.weight", "0.bias"} <= set(targets)


@pytest.mark.parametrize("is_linear", [True, False])
def test_dynamo_traces_torch_s_forward(is_linear, monkeypatch):
    monkeypatch.setattr(layer_forwards, "is_dynamo_compiling", lambda: True)
    forward = layer_forwards._of_table(nn.Linear, lambda self, input: "torch's", is_linear)
    assert forward(make(nn.Linear), INPUTS[nn.Linear]) == "torch's"


@pytest.mark.parametrize(
    "layer, call", [(nn.Linear(3, 3), "F.linear"), (nn.Conv1d(3, 3, 1), "_conv_forward")]
)
def test_an_error_is_explained_as_before(layer, call):
    model = nn.Sequential(layer)
    ampatch.initialize(model, opt_level="O3", dtype="bfloat16", verbosity=0)
    layer.weight = nn.Parameter(layer.weight.detach().float())
    try:
        with pytest.raises(RuntimeError) as error:
            model(torch.ones(2, 3, 3))
        notes = "".join(getattr(error.value, "__notes__", error.value.args))
    finally:
        ampatch.deactivate()
    assert layer.weight.dtype is torch.float32
    assert "with weights and inputs in torch.bfloat16" in notes and call in notes
