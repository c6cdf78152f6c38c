"""A managed module's own `forward`: hooks run around it, libraries wrap it, copies have none.

`model.forward(x)`: compat/test_compat_forward.py.  Ctrl-C: laws/test_interrupted_calls.py.
"""

import copy
import functools
import gc
import inspect
import pickle
import types
import weakref
from unittest import mock

import pytest
import torch
from small_training import Made, managed, pass_back
from torch import nn

import ampatch
from ampatch.session.facade import open_sessions

H, FP32 = torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    """Two layers and what they compute in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, *, scale: float = 1.0):
        """The docstring of a forward."""
        self.seen = (x.dtype, self.first.weight.dtype, self.first(x).dtype)
        return self.second(self.first(x)) * scale


def start(level, model=None, **settings):
    return managed(Net() if model is None else model, level, **settings)


def is_plain(model):
    return not any(
        name == "forward" or "ampatch" in name for part in model.modules() for name in vars(part)
    )


# Hooks


def test_hooks_on_the_model_run_around_the_casts(opt_level):
    model, _ = start(opt_level)
    seen = []

    def before(module, args, kwargs):
        seen.append((args[0].dtype, module.first.weight.dtype))

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    model.register_full_backward_hook(
        lambda module, grad_input, grad_output: seen.append(grad_input[0].dtype)
    )
    out = model(X.clone().requires_grad_())
    out.float().sum().backward()
    assert seen[0] == (FP32, H if opt_level == "O3" else FP32)
    assert seen[1:] == [(FP32, out.dtype), FP32]
    assert out.dtype is (H if opt_level == "O1" else FP32)


def test_hooks_on_an_overridden_submodule_run_around_it_and_others_inside(opt_level):
    model, _ = start(opt_level, overrides={"second": "float"})
    seen = {}
    for name, part in model.named_children():
        part.register_forward_pre_hook(
            lambda part, args, name=name: seen.update({name: args[0].dtype})
        )
    model(X)
    inside = FP32 if opt_level == "O0" else H
    assert seen == {"first": FP32 if opt_level == "O1" else inside, "second": inside}


# What scripts and libraries do with `forward`


def test_what_a_forward_says_of_itself():
    model, _ = start("O2")
    for forward in (model.forward, model.first.forward):
        assert inspect.ismethod(forward) and forward.__name__ == "forward"
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    assert inspect.getfullargspec(model.forward).args == ["self", "x"]
    assert model.forward.__doc__ == Net.forward.__doc__


def as_accelerate_does(model):
    """Autocast and FP32 outputs around the method's function; at last it unwraps."""

    def wrapped(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            return function(*args, **kwargs)

        return call

    model._original_forward = model.forward
    model.forward = types.MethodType(wrapped(model.forward.__func__), model)
    yield
    forward, original = model.forward, model.__dict__.pop("_original_forward")
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == original:
            break
    model.forward = types.MethodType(forward, model)
    yield


def test_a_library_that_wraps_the_function_and_unwraps_it(opt_level):
    model, _ = start(opt_level)
    expected = model(X)
    inside = model.seen
    for _ in as_accelerate_does(model):
        model.seen = None
        assert torch.equal(model(X), expected) and model.seen == inside
    ampatch.deactivate()
    assert torch.equal(model.float()(X), Net.forward(model, X))


def test_a_library_that_has_wrapped_before_and_unwraps_in_the_session(opt_level):
    model = Net()
    steps = as_accelerate_does(model)
    next(steps)
    plain = model(X)
    start(opt_level, model)
    inside, expected = model(X), model.seen
    next(steps)
    assert torch.equal(model(X), inside) and model.seen == expected
    ampatch.deactivate()
    torch.testing.assert_close(model(X), plain, rtol=0.05, atol=0.05)


def test_a_mock_that_wraps_forward(opt_level):
    model, _ = start(opt_level)
    expected = model(X)
    with mock.patch.object(model, "forward", wraps=model.forward) as mocked:
        assert torch.equal(model(X), expected) and mocked.call_count == 1
    assert torch.equal(model(X), expected)
    ampatch.deactivate()
    assert is_plain(model)


def block(model, optimizer):
    pass_back(model(X).float().sum(), optimizer)


REPLACED = "Net.forward was replaced or deleted after ampatch.initialize"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_forward_that_is_replaced_or_deleted_has_no_casts_and_that_is_said(level, caplog):
    model, optimizer = start(level, verbosity=1)
    block(model, optimizer)
    model.forward = lambda x: Net.forward(model, x.to(model.first.weight.dtype))
    for _ in range(2):
        model(X)
        if level != "O1":  # products with managed weights are cast there as outside of forwards
            assert model.seen[0] is (H if level == "O3" else FP32)
        pass_back(torch.ones((), requires_grad=True) * 2, optimizer)
    assert caplog.text.count(REPLACED) == 1
    ampatch.deactivate()
    assert "forward" in vars(model) and {p.dtype for p in model.parameters()} == {FP32}
    model, optimizer = start(level, verbosity=1)
    del model.forward
    pass_back(model(X.to(model.first.weight.dtype)).sum(), optimizer)
    assert caplog.text.count(REPLACED) == 2


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_forward_that_calls_the_earlier_one_is_not_reported(level, caplog):
    model, optimizer = start(level, verbosity=1)
    other = Net()
    ampatch.add_models(other)
    for module in (model, other):
        forward = lambda self, x, earlier=module.forward: earlier(x) * 1  # noqa: E731
        module.forward = types.MethodType(forward, module)
    for _ in range(3):
        block(model, optimizer)  # the other one is not called
    model(X), other(X)
    block(model, optimizer)
    assert REPLACED not in caplog.text


class Direct(nn.Linear):
    """Its own way of being called leaves out what torch does around a call."""

    def __call__(self, x):
        return self.forward(x)


class Static(nn.Module):
    @staticmethod
    def forward(x):
        return x @ torch.eye(4, dtype=x.dtype)


class Partial(nn.Module):
    def half(self, by, x):
        return x / by

    forward = functools.partialmethod(half, 2)


@pytest.mark.parametrize("make", [lambda: Direct(4, 4), Static, Partial])
def test_a_forward_of_another_kind(opt_level, make):
    model = make()
    expected = model(X)
    ampatch.initialize(model, opt_level=opt_level, dtype=H, verbosity=0)
    output = model(X)
    torch.testing.assert_close(output.float(), expected, rtol=0.01, atol=0.01)
    assert output.dtype is (H if opt_level == "O1" and make is not Partial else FP32)


# Copies


def copied_by_itself(model):
    class Copied(type(model)):
        def __deepcopy__(self, memo):
            twin = type(self).__new__(type(self))
            memo[id(self)] = twin
            vars(twin).update(copy.deepcopy(vars(self), memo))
            return twin

    model.__class__ = Copied
    return model


def copied_without_memo(model):
    class Copied(type(model)):
        def __deepcopy__(self, memo):
            twin = type(self).__new__(type(self))
            vars(twin).update({name: copy.deepcopy(value) for name, value in vars(self).items()})
            return twin

    model.__class__ = Copied
    return model


class PicklesItself(Net):
    def __getstate__(self):
        return [self.first, self.second]

    def __setstate__(self, state):
        nn.Module.__init__(self)
        self.first, self.second = state


def with_own_state(model):
    return PicklesItself()


def with_slots(model):
    class Slotted(type(model)):
        __slots__ = ("beside",)

    other = Slotted()
    other.beside = "here"
    return other


@pytest.mark.parametrize(
    "make", [None, copied_by_itself, copied_without_memo, with_own_state, with_slots]
)
def test_deep_copies_compute_as_plain_models(opt_level, make):
    model = Net() if make is None else make(Net())
    start(opt_level, model, overrides={"second": "float"})
    model(X)
    twin = copy.deepcopy(model)
    plain = type(model).forward(twin.float(), X)
    assert torch.equal(twin(X), plain) and twin.second(X).dtype is FP32
    assert is_plain(twin)
    assert getattr(twin, "beside", "here") == "here"
    ampatch.deactivate()
    assert torch.equal(twin(X), plain) and is_plain(model)


def cloned(module, attributes):
    """As MAML libraries do: gradients go through the clones to the module's own parameters."""
    clone = module.__new__(type(module))
    clone.__dict__ = attributes(module)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(clone)[name] = vars(clone)[name].copy()
    for name, parameter in module._parameters.items():
        clone._parameters[name] = parameter.clone()
    for name, part in module._modules.items():
        clone._modules[name] = cloned(part, attributes)
    return clone


ATTRIBUTES = [
    lambda module: module.__dict__.copy(),
    lambda module: dict(vars(module)),
    lambda module: {**vars(module)},
    lambda module: copy.copy(vars(module)),
    lambda module: {name: vars(module)[name] for name in vars(module)},
    lambda module: dict(zip(vars(module).keys(), vars(module).values(), strict=True)),
]


def test_clones_by_their_attributes_are_plain_models(opt_level):
    model, _ = start(opt_level, overrides={} if opt_level == "O3" else {"second": "float"})
    model(X)
    clones = [cloned(model, attributes) for attributes in ATTRIBUTES]
    for _ in range(2):
        for clone in clones:
            assert is_plain(clone) and type(vars(clone)) is dict
            x, (first, second) = X.to(clone.first.weight.dtype), clone.children()
            inner = nn.functional.linear(x, first.weight, first.bias)
            expected = nn.functional.linear(inner, second.weight, second.bias)
            assert torch.equal(clone(x), expected) and torch.equal(second(inner), expected)
            clone(x).sum().backward(retain_graph=True)
            assert all(parameter.grad is not None for parameter in model.parameters())
            with torch.no_grad():
                second.bias.add_(1)
        model.zero_grad()
        ampatch.deactivate()
    assert is_plain(model) and type(vars(model)) is dict


@pytest.mark.parametrize("kind", [Net, PicklesItself])
def test_pickles_of_modules_do_not_name_ampatch(opt_level, kind):
    model, _ = start(opt_level, kind(), overrides={"second": "float"})
    for part in model.modules():
        data = pickle.dumps(part)
        assert b"ampatch" not in data and is_plain(pickle.loads(data))


def test_a_copy_of_a_copy_and_what_is_left_after_the_session(opt_level):
    model, _ = start(opt_level)
    twin = copy.copy(copy.copy(model))
    gc.collect()  # the copy between them, whose frame is in a cycle
    twin.title = "twin"
    assert twin.first is model.first and not hasattr(model, "title")
    assert torch.equal(twin(X), model(X)) and twin.seen == model.seen
    assert is_plain(pickle.loads(pickle.dumps(twin)))
    ampatch.deactivate()
    assert is_plain(twin) and torch.equal(twin(X), model(X)) and twin.seen[0] is FP32
    assert torch.equal(copy.deepcopy(twin)(X), model(X))
    torch.jit.script(copy.copy(nn.Sequential(twin.first)))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_shallow_copy_of_a_submodule_computes(level):
    model, _ = start(level)
    shallow = copy.copy(model.first)(X).float()
    torch.testing.assert_close(shallow, model.first(X).float(), atol=0.05, rtol=0.05)


def test_sessions_that_end_in_another_order_than_they_began():
    inner = Net()
    outer = nn.Sequential(inner, nn.Linear(2, 2))
    start("O1", outer, overrides={"0": "float"})
    start("O2", inner)
    first, second = open_sessions()
    first.close()
    assert inner(X).dtype is FP32 and inner.seen[0] is H
    second.close()
    assert is_plain(outer) and inner(X).dtype is FP32


def test_a_forward_that_was_there_before_is_there_again(opt_level):
    model = Net()
    model.forward = own = types.MethodType(lambda self, x: Net.forward(self, x) * 2, model)
    plain = copy.deepcopy(model)
    start(opt_level, model)
    torch.testing.assert_close(model(X).float(), plain(X), rtol=0.05, atol=0.05)
    kept = model.forward
    assert copy.deepcopy(model).forward.__func__ is own.__func__
    ampatch.deactivate()
    assert vars(model)["forward"] is own and torch.equal(kept(X), model(X))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_submodules_that_come_and_go(level):
    """Those that are none any more may go with the next forward; new ones are cast from outside."""
    model, _ = start(level)
    model(X), model.first(X)
    gone = weakref.ref(model.first)
    gc.disable()
    try:
        model.first = nn.Linear(4, 4).to(model.second.weight.dtype)
        model(X)
        assert gone() is None
    finally:
        gc.enable()
    assert model.first(X).dtype is (FP32 if level == "O2" else H)
    ampatch.deactivate()
    assert is_plain(model)


# Compiled


@pytest.mark.parametrize("how", ["model", "submodule", "caller"])
def test_a_compiled_submodule_whose_forward_the_script_wraps(how):
    """At O2 its call within the model's is a part of that: eager, traced, and by itself."""
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, _ = start("O2", Made(lambda self, x: (y := self.part(x)) + y**2, part=Net()))
        part = model.part
        part.forward = lambda *args, earlier=part.forward: earlier(*args)
        call = model
        if is_compiled:
            {"model": model.compile, "submodule": part.compile, "caller": str}[how](
                **({} if how == "caller" else {"backend": "eager"})
            )
            call = torch.compile(lambda x, model=model: model(x), backend="eager")
        results.append([call(X) if how == "caller" else model(X) for _ in range(2)] + [part(X)])
    for output, expected in zip(*results, strict=True):
        assert torch.equal(output, expected) and output.dtype is expected.dtype


MANY = {  # what each model is, and how many graphs they have
    # one code for all of torch's own would meet the limit of recompilations
    "of torch's own class": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 12),
    # the frames of submodules are out while the forward runs
    "of the script's class": (
        lambda: Made(lambda self, x: self.layer(x) * 2, layer=nn.Linear(4, 4)),
        1,
    ),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", MANY)
def test_many_models_are_compiled_as_wholes(kind, level):
    (make, expected), graphs = MANY[kind], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    for _ in range(12):
        model, _ = start(level, make())
        assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(X), model(X))
    assert len(graphs) == expected


def test_a_replica_goes_without_a_search_for_cycles(opt_level):
    """DataParallel makes them anew at each step, with copies of the weights."""
    model, _ = start(opt_level)
    replica = model._replicate_for_data_parallel()
    replica(X)
    gone = weakref.ref(replica)
    gc.disable()
    try:
        del replica
        assert gone() is None
    finally:
        gc.enable()


def test_a_shallow_copy_of_an_ended_session_is_initialized_again(opt_level):
    model, _ = start(opt_level)
    twin, first = copy.copy(model), copy.copy(model.first)
    ampatch.deactivate()
    for again in (twin, nn.Sequential(first, nn.Linear(4, 2))):
        managed(again, opt_level)
        assert again(X).shape == (3, 2)
        ampatch.deactivate()


def test_a_forward_that_is_a_property_is_refused(opt_level):
    class Chosen(nn.Linear):
        @property
        def forward(self):
            return super().forward

    with pytest.raises(ampatch.AmpatchError, match="Chosen has a property for its forward"):
        ampatch.initialize(model := Chosen(4, 2), opt_level=opt_level, verbosity=0)
    assert is_plain(model) and model(X).dtype is FP32
