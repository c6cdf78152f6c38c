"""`ampatch.cached_weights`: half copies made once, for loops of forwards without a step."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from small_training import in_threads, managed, step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch

LEVELS = ("O1", "O2")
WEIGHTS = ((9, 4), (9,), (2, 9), (2,))


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


class Net(nn.Module):
    """Calls `inside` in its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 9), nn.Linear(9, 2)
        self.inside = lambda model: None

    def encode(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        hidden = self.encode(x)
        self.inside(self)
        return self.second(hidden)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


def start(level, model=None, **settings):
    return managed((Net() if model is None else model).eval(), level, lr=0.5, **settings)


def fresh(model):
    """What the forward gives without a block: at this moment, from these weights."""
    with torch.no_grad():
        return model(X)


def train(model, optimizer):
    step(model(X).square().sum(), optimizer)


# Counts and bits


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_weights_are_cast_once(level, around):
    model, optimizer = start(level)
    train(model, optimizer)
    expected = fresh(model)
    for _ in range(2):  # a block after a block casts anew
        with ampatch.cached_weights(model), around(), Casts() as casts:
            found = [model(X) for _ in range(5)]
        assert casts.count == len(WEIGHTS)
        assert all(torch.equal(one, expected) for one in found)
    with around(), Casts() as casts:
        model(X), model(X)
    assert casts.count == 2 * len(WEIGHTS)


def test_both_modes_without_gradients_in_one_block(level):
    """A tensor that was made in inference mode cannot be saved for a backward pass."""
    model, _ = start(level)
    expected = fresh(model)
    model.first.requires_grad_(False)
    x = X.clone().requires_grad_()
    with ampatch.cached_weights(model):
        with torch.inference_mode():
            assert torch.equal(model(X), expected)
        assert torch.equal(fresh(model), expected)
        model(x).sum().backward()
    assert x.grad is not None and model.second.weight.grad is not None


def test_a_graph_has_casts_of_its_own_and_frozen_weights_do_not(level):
    model, optimizer = start(level)
    model.first.requires_grad_(False)
    model.second(model.encode(X)).sum().backward()
    model(X).sum().backward()
    expected = model.second.weight.grad
    with ampatch.cached_weights(model):
        model(X)
        for _ in range(2):
            optimizer.zero_grad()
            with Casts(WEIGHTS[:1]) as frozen:
                loss = model(X).sum()
            with Casts(WEIGHTS[2:3]) as trained:
                loss.backward()
            assert (frozen.count, trained.count) == (0, 1)
    del expected
    assert model.first.weight.grad is None and model.second.weight.grad.dtype is torch.float32


class Decoder(nn.Module):
    """Embedding, GRU, transformer layer and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 16)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden, _ = self.gru(self.embedding(tokens))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]).to(hidden.dtype)
        return self.head(self.layer(hidden, src_mask=mask))


def decode(model, steps=8):
    tokens, logits = torch.tensor([[1], [2]]), []
    with torch.inference_mode():
        for _ in range(steps):
            logits.append(model(tokens)[:, -1])
            tokens = torch.cat((tokens, logits[-1].argmax(-1, keepdim=True)), dim=1)
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_greedy_decoding(level, dtype):
    model, _ = start(level, Decoder(), dtype=dtype)
    shapes = {tuple(one.shape) for one in model.parameters() if one.dim() > 1}
    with Casts(shapes) as without:
        tokens, logits = decode(model)
    with ampatch.cached_weights(model), Casts(shapes) as once:
        found = decode(model)
    assert torch.equal(found[0], tokens) and torch.equal(found[1], logits)
    with ampatch.cached_weights(model), Casts(shapes) as short:
        decode(model, 1)
    assert once.count == short.count < without.count / 4


def test_parts_and_modules_around(level):
    """A part, a module around the model, a list; blocks in blocks, one object entered twice."""
    model, _ = start(level)
    around = nn.Sequential(model)
    expected, block = fresh(model), ampatch.cached_weights([around])
    with block, ampatch.cached_weights(model.first), block, torch.no_grad(), Casts() as casts:
        assert torch.equal(around(X), expected) and torch.equal(model(X), expected)
    assert casts.count == len(WEIGHTS)
    with block, torch.no_grad(), Casts() as casts:
        model.encode(X), model.encode(X), model(X), model(X)
    assert casts.count == len(WEIGHTS) + (2 * 2 if level == "O1" else 0)  # outside of a forward
    with block, block:
        pass
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


def test_levels_without_casts_of_weights(opt_level):
    """A script runs at every level; where nothing is cast, nothing is asked of it."""
    model, optimizer = start(opt_level)
    with ampatch.cached_weights(model):
        fresh(model)
        if opt_level in ("O0", "O3"):
            train(model, optimizer)


def test_switched_off():
    model, _ = start("O2", enabled=False)
    with ampatch.cached_weights(model):
        fresh(model)
    ampatch.deactivate()
    model = ampatch.initialize(Net(), opt_level="O2", enabled=False)
    with ampatch.cached_weights(model):
        fresh(model)


# Errors


def test_a_model_that_is_not_managed():
    with pytest.raises(ampatch.AmpatchError, match=r"cached_weights\(Net\).*ampatch.initialize"):
        with ampatch.cached_weights(Net()):
            pass
    start("O2")
    with pytest.raises(ampatch.AmpatchError, match="no open session manages"):
        with ampatch.cached_weights(Net()):
            pass
    with pytest.raises(TypeError, match=r"ampatch.cached_weights.*expected a torch.nn.Module"):
        ampatch.cached_weights(torch.optim.SGD(Net().parameters(), lr=1))


# Changes of weights: forwards use the new values


@pytest.mark.parametrize("kind", ["managed", "fused", "unmanaged"])
def test_after_a_step_weights_are_cast_anew(level, kind):
    """Fused steps raise no versions."""
    model, optimizer = start(level)
    if kind != "managed":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=kind == "fused")
        if kind == "fused":
            ampatch.add_optimizers(optimizer)
    with ampatch.cached_weights(model):
        for _ in range(2):
            before = fresh(model)
            if kind == "unmanaged":
                model(X).sum().backward()
                optimizer.step()
            else:
                train(model, optimizer)
            after = fresh(model)
            assert not torch.equal(before, after)
        assert torch.equal(after, fresh(copy_of(model, level)))


def copy_of(model, level):
    """The same weights in a model of its own."""
    return start(level, ampatch.unwrap(model))[0]


def test_a_step_on_other_weights_is_none_of_its_business(level):
    model, _ = start(level)
    other, optimizer = start(level)
    with ampatch.cached_weights(model):
        fresh(model)
        train(other, optimizer)


def add_one(model):
    with torch.no_grad():
        model.first.weight.add_(1)


def load(model):
    model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})


def give_data(model):
    model.first.weight.data = model.first.weight.data + 1


WRITES = {
    "in place": add_one,
    "load_state_dict": load,
    "new data": give_data,
    "in data": lambda model: model.first.weight.data.add_(1),
}


@pytest.mark.parametrize("how", WRITES)
def test_after_a_write_weights_are_cast_anew(level, how):
    model, _ = start(level)
    without_graph = torch.no_grad if how == "in data" else torch.inference_mode
    with ampatch.cached_weights(model), without_graph():
        before = model(X)
        model(X)
        WRITES[how](model)
        after = model(X)
        assert torch.equal(model(X), after)
    assert not torch.equal(before, after)
    assert torch.equal(after, fresh(copy_of(model, level)))


def test_what_the_forward_writes_itself(level):
    """As without a block, to the bit."""
    model, _ = start(level)
    twin, _ = start(level)

    def inside(model):
        with torch.no_grad():
            model.second.weight.mul_(1.5)

    model.inside = twin.inside = inside
    with ampatch.cached_weights(model):
        for _ in range(4):
            assert torch.equal(fresh(model), fresh(twin))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_replaced_parameter_is_used(level):
    model, _ = start(level)
    with ampatch.cached_weights(model):
        before = fresh(model)
        model.second.weight = nn.Parameter(model.second.weight.detach() * 2)
        after = fresh(model)
        assert not torch.equal(before, after)
        with torch.no_grad():
            model.second.weight.mul_(3)  # nobody watches the new one: its copies are of one forward
        after = fresh(model)
    assert torch.equal(after, fresh(model))


def test_a_replaced_parameter_that_is_swapped(level):
    """`swap_tensors` exchanges versions too."""
    model, _ = start(level)
    with ampatch.cached_weights(model):
        fresh(model)
        model.second.weight = nn.Parameter(model.second.weight.detach() * 2)
        before = fresh(model)
        torch.utils.swap_tensors(model.second.weight, nn.Parameter(torch.ones(2, 9)))
        after = fresh(model)
        assert not torch.equal(before, after)
    assert torch.equal(after, fresh(model))


# Ends


def copies_of_second():
    """Half copies of a weight that are in memory."""
    return [
        one
        for one in gc.get_objects()
        if type(one) is torch.Tensor and one.dtype is torch.bfloat16 and one.shape == (2, 9)
    ]


def test_memory_is_given_back(level):
    model, _ = start(level)
    with ampatch.cached_weights(model):
        fresh(model), fresh(model)
        assert len(copies_of_second()) == 1
    assert not copies_of_second()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "block"])
def test_an_exception_ends_the_block(level, where, error):
    """It is raised as it is, whatever was written before it."""
    model, optimizer = start(level)

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
    train(model, optimizer)
    assert not copies_of_second()
    assert torch.equal(fresh(model), fresh(copy_of(model, level)))


def test_deactivate_inside(level):
    model, optimizer = start(level)
    with ampatch.cached_weights(model):
        fresh(model)
        ampatch.deactivate()
        assert torch.equal(fresh(model), Net()(X))
        model(X).sum().backward()
        optimizer.step()


def test_another_level_inside(level):
    model, _ = start(level)
    with ampatch.cached_weights(model):
        fresh(model)
        ampatch.initialize(model, opt_level="O0", verbosity=0)
        add_one(model)
        after = fresh(model)
    assert torch.equal(after, copy.deepcopy(model)(X))


def test_a_generator_that_is_left(level):
    """Streams tokens; whoever drops it ends the block."""
    model, optimizer = start(level)

    def stream():
        with ampatch.cached_weights(model), torch.no_grad():
            while True:
                yield model(X)

    tokens = stream()
    first = next(tokens)
    assert torch.equal(next(tokens), first)
    del tokens
    gc.collect()
    train(model, optimizer)


def test_threads_share_the_copies(level):
    model, _ = start(level)
    expected = fresh(model)
    with ampatch.cached_weights(model):
        fresh(model)
        found = in_threads(*[lambda: [fresh(model) for _ in range(5)]] * 3)
    assert all(torch.equal(one, expected) for each in found for one in each)


@pytest.mark.parametrize("how", ["model", "whole"])
def test_compiled(level, how):
    """A graph has its casts in it: the same results."""
    torch.compiler.reset()
    model, _ = start(level)
    compiled = torch.compile(model, backend="aot_eager")

    @torch.compile(backend="eager")
    def whole():
        with ampatch.cached_weights(model), torch.no_grad():
            return model(X)

    with torch.no_grad():
        expected = compiled(X)
        if how == "model":
            with ampatch.cached_weights(compiled):
                assert torch.equal(compiled(X), expected) and torch.equal(compiled(X), expected)
                assert torch.allclose(fresh(model), expected, atol=1e-2)
        else:
            assert torch.allclose(whole(), expected, atol=1e-2)


def test_traced_transformed_and_fake(level):
    """Nothing of a recording is kept for the forwards after it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, _ = start(level)
    expected = fresh(model)
    with ampatch.cached_weights(model), torch.no_grad():
        make_fx(model)(X)
        torch.func.vmap(model)(X)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(X)
        assert torch.equal(model(X), expected)


def test_functional_calls(level):
    """Other values, given for one call: copies are of the weights that are there."""
    model, _ = start(level)
    other = {name: one.detach() * 2 for name, one in model.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, other, X)
        with ampatch.cached_weights(model):
            before = model(X)
            assert torch.equal(torch.func.functional_call(model, other, X), expected)
            assert torch.equal(model(X), before)


def test_the_loss_is_outside_of_the_model(level):
    """Other calls with weights, between forwards."""
    model, _ = start(level)
    with torch.no_grad():
        expected = F.linear(X, model.first.weight)
        with ampatch.cached_weights(model):
            model(X)
            assert torch.equal(F.linear(X, model.first.weight), expected)


def test_o2_then_calls_what_o3_calls():
    """Half weights that stay, and one look at the input."""
    found = []
    for level in ("O2", "O3"):
        model, _ = start(level)
        with ampatch.cached_weights(model), torch.no_grad():
            model(X)
            with CountCalls() as calls:
                model(X)
        found.append(calls.count)
    assert found[0] == found[1]


class CountCalls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))
