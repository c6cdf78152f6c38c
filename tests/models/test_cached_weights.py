"""`ampatch.cached_weights`: half copies made once, for loops of forwards without a step."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from small_training import Net, in_threads, managed, step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch

WEIGHTS = ((8, 4), (8,), (2, 8), (2,))


class Casts(TorchDispatchMode):
    """Counts the tensors of the weights' shapes that are cast, one by one or in lists."""

    def __init__(self, shapes=WEIGHTS):
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.count += tuple(args[0].shape) in self.shapes
        elif function is torch.ops.aten._foreach_copy_.default:
            self.count += sum(tuple(one.shape) in self.shapes for one in args[1])
        return function(*args, **(kwargs or {}))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=("O1", "O2"))
def level(request):
    return request.param


def start(level, model=None, **settings):
    return managed((Net() if model is None else model).eval(), level, lr=0.5, **settings)


@pytest.fixture
def pair(level):
    return start(level)


def fresh(model):
    """What the forward gives without a block: at this moment, from these weights."""
    with torch.no_grad():
        return model(X)


def of_a_copy(model, level):
    """What another model with the same weights gives."""
    return fresh(start(level, ampatch.unwrap(model))[0])


def train(model, optimizer):
    step(model(X).square().sum(), optimizer)


# Counts and bits


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_weights_are_cast_once(pair, around):
    model, _ = pair
    train(*pair)
    expected = fresh(model)
    for _ in range(2):  # a block after a block casts anew
        with ampatch.cached_weights(model), around(), Casts() as casts:
            found = [model(X) for _ in range(5)]
        assert casts.count == len(WEIGHTS)
        assert all(torch.equal(one, expected) for one in found)
    with around(), Casts() as casts:
        model(X), model(X)
    assert casts.count == 2 * len(WEIGHTS)


def test_both_modes_without_gradients_in_one_block(pair):
    """A tensor that was made in inference mode cannot be saved for a backward pass."""
    model, _ = pair
    expected = fresh(model)
    model.first.requires_grad_(False)
    x = X.clone().requires_grad_()
    with ampatch.cached_weights(model):
        with torch.inference_mode():
            assert torch.equal(model(X), expected)
        assert torch.equal(fresh(model), expected)
        model(x).sum().backward()
    assert x.grad is not None and model.second.weight.grad is not None


def test_a_graph_has_casts_of_its_own_and_frozen_weights_do_not(pair):
    model, optimizer = pair
    model.first.requires_grad_(False)
    with ampatch.cached_weights(model):
        model(X)
        for _ in range(2):
            optimizer.zero_grad()
            with Casts(WEIGHTS[:1]) as frozen:
                loss = model(X).sum()
            with Casts(WEIGHTS[2:3]) as trained:
                loss.backward()
            assert (frozen.count, trained.count) == (0, 1)
    assert model.first.weight.grad is None and model.second.weight.grad.dtype is torch.float32


def test_parts_and_modules_around(pair, level):
    """A part, a module around the model, a list; blocks in blocks, one object entered twice."""
    model, _ = pair
    around = nn.Sequential(model)
    expected, block = fresh(model), ampatch.cached_weights([around])
    with block, ampatch.cached_weights(model.first), block, torch.no_grad(), Casts() as casts:
        assert torch.equal(around(X), expected) and torch.equal(model(X), expected)
    assert casts.count == len(WEIGHTS)
    with block:
        fresh(model)
        with block:
            pass
        with torch.no_grad(), Casts() as casts:
            model.encode(X), model.encode(X), model(X), model(X)
    assert casts.count == (2 * 2 if level == "O1" else 0)  # outside of a forward
    with torch.no_grad(), Casts() as casts:
        model(X), model(X)
    assert casts.count == 2 * len(WEIGHTS)


def test_two_models_and_one_inside_another(level):
    inner, other = start(level)[0], start(level)[0]
    outer = nn.Sequential(inner, nn.Linear(2, 2))
    start(level, outer)
    with torch.no_grad():
        expected = outer(X), other(X)
        with ampatch.cached_weights(inner), Casts() as casts:
            for _ in range(2):
                assert torch.equal(outer(X), expected[0]) and torch.equal(other(X), expected[1])
    once = len(WEIGHTS) + 1  # the outer model's bias has the shape of one of these
    assert casts.count == once + 2 * len(WEIGHTS)


@pytest.mark.parametrize("settings", [{}, {"enabled": False}])
def test_a_script_runs_where_nothing_is_cast(opt_level, settings):
    model, optimizer = start(opt_level, **settings)
    with ampatch.cached_weights(model):
        fresh(model)
        if opt_level in ("O0", "O3") or settings:
            train(model, optimizer)


def test_a_model_that_is_not_managed():
    for error, of, says in (
        (ampatch.AmpatchError, Net(), r"cached_weights\(Net\).*ampatch.initialize"),
        (ampatch.AmpatchError, Net(), "no open session manages"),
        (TypeError, torch.optim.SGD(Net().parameters(), lr=1), "expected a torch.nn.Module"),
    ):
        with pytest.raises(error, match=says), ampatch.cached_weights(of):
            pass
        start("O2")  # another one


# Changes of weights: forwards use the new values


def fused_step(model, optimizer):
    """It raises no versions."""
    fused = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    ampatch.add_optimizers(fused)
    train(model, fused)


def step_of_another(model, optimizer):
    """Of one that ampatch does not manage."""
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


@torch.no_grad()
def add_one(model, optimizer=None):
    model.first.weight.add_(1)


def load(model, optimizer):
    model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})


def give_data(model, optimizer):
    model.first.weight.data = model.first.weight.data + 1


def replace(model, optimizer):
    """Nobody watches the new one: its copies are of one forward."""
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)


def swap(model, optimizer):
    """By torch's exchange of two tensors, here of the same version: the addresses tell."""
    other = nn.Linear(4, 8).weight
    assert other._version == model.first.weight._version
    torch.utils.swap_tensors(model.first.weight, other)


CHANGES = {
    "step": train,
    "fused step": fused_step,
    "step of another": step_of_another,
    "in place": add_one,
    "load_state_dict": load,
    "new data": give_data,
    "in data": lambda model, optimizer: model.first.weight.data.add_(1),
    "replaced": replace,
    "swapped": swap,
}


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", CHANGES)
def test_after_a_change_weights_are_cast_anew(pair, level, how, around):
    """A parameter that was replaced is then written into."""
    model, optimizer = pair
    with ampatch.cached_weights(model):
        for change in (CHANGES[how], add_one):
            with around():
                before = model(X)
                model(X)
            change(model, optimizer)
            with around():
                after = model(X)
                assert torch.equal(model(X), after)
            assert not torch.equal(before, after)
    assert torch.equal(after, of_a_copy(model, level))


def test_what_the_forward_writes_itself(pair, level):
    """As without a block, to the bit."""
    model, twin = pair[0], start(level)[0]

    def inside(model):
        with torch.no_grad():
            model.second.weight.mul_(1.5)

    model.inside = twin.inside = inside
    with ampatch.cached_weights(model):
        for _ in range(4):
            assert torch.equal(fresh(model), fresh(twin))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


# Ends


def copies_of_second():
    """Half copies of a weight that are in memory."""
    return [
        one
        for one in gc.get_objects()
        if type(one) is torch.Tensor and one.dtype is torch.bfloat16 and one.shape == (2, 8)
    ]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "block"])
def test_an_exception_ends_the_block(pair, level, where, error):
    """It is raised as it is, whatever was written before it."""
    model, _ = pair

    def fail(model):
        add_one(model)
        raise error

    with pytest.raises(error):
        with ampatch.cached_weights(model):
            fresh(model)
            if where == "block":
                fail(model)
            model.inside = fail
            fresh(model)
    model.inside = lambda model: None
    gc.collect()
    assert not copies_of_second() or (level, where, error) == ("O2", "forward", KeyboardInterrupt)
    train(*pair)
    assert not copies_of_second()
    assert torch.equal(fresh(model), of_a_copy(model, level))


def test_deactivate_or_another_level_inside(pair, level):
    model, optimizer = pair
    with ampatch.cached_weights(model):
        fresh(model)
        ampatch.deactivate()
        assert torch.equal(fresh(model), Net()(X))
        model(X).sum().backward()
        optimizer.step()
    start(level, model)
    with ampatch.cached_weights(model):
        fresh(model)
        ampatch.initialize(model, opt_level="O0", verbosity=0)
        add_one(model)
        after = fresh(model)
    assert torch.equal(after, copy.deepcopy(model)(X))


def test_threads_share_the_copies(pair):
    model, _ = pair
    expected = fresh(model)
    with ampatch.cached_weights(model):
        fresh(model)
        found = in_threads(*[lambda: [fresh(model) for _ in range(5)]] * 3)
    assert all(torch.equal(one, expected) for each in found for one in each)


# Other calls in a block


def test_compiled(pair):
    """A graph has its casts in it: the same results."""
    torch.compiler.reset()
    model, _ = pair
    compiled = torch.compile(model, backend="aot_eager")

    @torch.compile(backend="eager")
    def whole():
        with ampatch.cached_weights(model), torch.no_grad():
            return model(X)

    with torch.no_grad():
        expected = compiled(X)
        with ampatch.cached_weights(compiled):
            assert torch.equal(compiled(X), expected) and torch.equal(compiled(X), expected)
            assert torch.allclose(fresh(model), expected, atol=1e-2)
        assert torch.allclose(whole(), expected, atol=1e-2)


def test_traced_transformed_and_fake(pair):
    """Nothing of a recording is kept for the forwards after it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, _ = pair
    expected = fresh(model)
    with ampatch.cached_weights(model), torch.no_grad():
        make_fx(model)(X)
        torch.func.vmap(model)(X)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(X)
        assert torch.equal(model(X), expected)


def test_calls_with_other_weights_and_of_other_functions(pair):
    """Copies are of the weights that are there; a loss outside of the model may use them too."""
    model, _ = pair
    other = {name: one.detach() * 2 for name, one in model.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, other, X)
        loss = F.linear(X, model.first.weight)
        with ampatch.cached_weights(model):
            before = model(X)
            assert torch.equal(torch.func.functional_call(model, other, X), expected)
            assert torch.equal(F.linear(X, model.first.weight), loss)
            assert torch.equal(model(X), before)
