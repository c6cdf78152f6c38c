"""Gradients that live on in one buffer: whoever holds one keeps its values, and all are right."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch
from ampatch import flat_grads
from ampatch.session import registry

LEVELS = ("O1", "O2")
HELD = {
    "the gradient": lambda grad: grad,
    "detach": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "a part": lambda grad: grad[:1],
    "numpy": lambda grad: grad.numpy(),
    "its storage": lambda grad: torch.tensor((), dtype=grad.dtype).set_(
        grad.untyped_storage(), grad.storage_offset(), grad.shape, grad.stride()
    ),
    "untyped_storage": lambda grad: Offset(grad),
    "dlpack": lambda grad: torch.from_dlpack(grad),
    "another's gradient": lambda grad: Leaf(grad),
    "a graph": lambda grad: Graph(grad),
    "shared memory": lambda grad: Shared(grad),
}


@pytest.fixture(autouse=True)
def _few_weights_suffice(monkeypatch):
    """The models here are smaller than those for which it pays."""
    monkeypatch.setattr(flat_grads, "FEWEST", 2)


class Offset:
    """Reads a gradient from its storage, holding nothing else."""

    def __init__(self, grad):
        self.storage = grad.untyped_storage()
        self.place = grad.dtype, grad.storage_offset(), grad.numel()

    def tolist(self):
        dtype, start, size = self.place
        every = torch.tensor([], dtype=dtype).set_(self.storage)
        return every[start : start + size].tolist()


class Shared(Offset):
    """Reads a gradient in memory that it shares with another process, as that one would."""

    def __init__(self, grad):
        super().__init__(grad)
        self.storage = torch.UntypedStorage._new_shared_fd_cpu(*self.storage._share_fd_cpu_())


class Leaf:
    """Holds a gradient as the `.grad` of another tensor: Python has no reference to it."""

    def __init__(self, grad):
        self.leaf = torch.zeros_like(grad, requires_grad=True)
        self.leaf.grad = grad

    def tolist(self):
        return self.leaf.grad.tolist()


class Graph:
    """Holds a gradient as what a graph has saved for its backward pass."""

    def __init__(self, grad):
        self.leaf = torch.ones_like(grad, requires_grad=True)
        self.product = (self.leaf * grad).sum()

    def tolist(self):
        return torch.autograd.grad(self.product, self.leaf, retain_graph=True)[0].tolist()


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def batch(number: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number)).float().pow(2).sum()


class Training:
    """A model whose weights do not move, so that every pass can be compared with a plain one."""

    def __init__(self, level: str, model: nn.Module | None = None, **options):
        plain = network() if model is None else model
        self.plain = copy.deepcopy(plain)
        self.optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
        options = {"dtype": torch.bfloat16, "loss_scale": "dynamic", **options}
        self.model, self.optimizer = ampatch.initialize(
            plain, self.optimizer, opt_level=level, verbosity=0, **options
        )
        self.masters = list(ampatch.master_params(self.optimizer))

    def backward(self, number: int) -> None:
        with ampatch.scale_loss(loss_of(self.model, number), self.optimizer) as scaled:
            scaled.backward()

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()

    def warm(self, passes: int = 4) -> Training:
        for number in range(passes):
            self.step(number)
        return self

    def grads(self) -> list[torch.Tensor]:
        return [master.grad for master in self.masters]

    def expected(self, *numbers: int) -> list[torch.Tensor]:
        """autocast's gradients (O1), or the half model's: powers of two scale them exactly."""
        self.plain.zero_grad()
        for number in numbers:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(self.plain, number)
            loss.backward()
        return [parameter.grad.clone() for parameter in self.plain.parameters()]

    def check(self, *numbers: int) -> None:
        for found, expected in zip(self.grads(), self.expected(*numbers), strict=True):
            assert found.dtype is torch.float32 and found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)

    @property
    def is_flat(self) -> bool:
        return len({grad.untyped_storage().data_ptr() for grad in self.grads()}) == 1


@pytest.fixture(params=LEVELS)
def training(request) -> Training:
    return Training(request.param).warm()


def test_the_same_tensors_serve_every_pass(training):
    assert training.is_flat
    known = [id(grad) for grad in training.grads()]
    for number in range(3):
        training.step(number)
        training.check(number)
        assert [id(grad) for grad in training.grads()] == known


def test_gradients_are_like_their_weights_and_no_views():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3))
    model = model.to(memory_format=torch.channels_last)
    made = flat_grads.FlatGrads()
    weights = list(model.parameters())
    made.take(weights)
    grads = made.take(weights)
    assert grads[0].is_contiguous(memory_format=torch.channels_last)
    for grad, weight in zip(grads, weights, strict=True):
        assert (grad.shape, grad.stride()) == (weight.shape, weight.stride())
        assert grad.data_ptr() % 64 == 0 and grad._base is None and not grad.requires_grad
    grads[0].zero_()
    assert [grad._version for grad in grads] == [1, 0, 0, 0]


# Whoever holds one


@pytest.mark.parametrize("name", HELD)
def test_a_gradient_that_is_held_is_never_overwritten(training, name):
    training.step(7)
    value = training.grads()[2].flatten().tolist()
    held = HELD[name](training.grads()[2])
    before = held.tolist()
    for number in (8, 9):
        training.step(number)
        training.check(number)
    assert held.tolist() == before
    assert torch.tensor(before).flatten().tolist()[:3] == value[:3]


def test_a_history_of_gradients_keeps_every_step(training):
    history = []
    for number in range(7):
        training.step(number)
        history.append(training.grads())
        assert all(len(flats._buffers) <= 2 for flats in flats_of(training))
    training.optimizer.zero_grad()
    for number, held in enumerate(history):
        for found, expected in zip(held, training.expected(number), strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    del history, held, found
    training.warm()
    assert training.is_flat


def test_a_gradient_held_once_and_let_go_does_no_harm(training):
    held = training.grads()
    training.step(1)
    assert not {id(grad) for grad in training.grads()} & {id(grad) for grad in held}
    del held
    for number in (2, 3, 4):
        training.step(number)
    assert training.is_flat
    training.check(4)


CHANGED = {
    "shape": lambda grad: grad.unsqueeze_(0),
    "transposed": lambda grad: grad.t_() if grad.dim() == 2 else None,
    "requires_grad": lambda grad: grad.requires_grad_(),
}


@pytest.mark.parametrize("number", [1, 4], ids=["one", "all"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_gradient_that_was_made_something_else(training, name, number):
    for index in range(number):
        CHANGED[name](training.grads()[index])
    for step in (5, 6, 7):
        training.step(step)
        training.check(step)
        assert not any(grad.requires_grad for grad in training.grads())


def test_a_gradient_that_was_given_other_data(training):
    """As many hold the buffer as before: one slice has left it, and an alias is kept."""
    alias = training.grads()[0].data
    value = alias.tolist()
    given = torch.full_like(alias, 3.0)
    training.grads()[0].data = given
    for step in (5, 6, 7):
        training.step(step)
        training.check(step)
    assert alias.tolist() == value
    assert given.eq(3).all()


def test_two_lists_are_never_of_the_same_tensors():
    weights = list(network().parameters())
    made = flat_grads.FlatGrads()
    lists = [made.take(weights) for _ in range(5)]
    assert len({id(grad) for grads in lists for grad in grads}) == 5 * len(weights)
    assert len({grad.data_ptr() for grads in lists for grad in grads}) == 5 * len(weights)
    assert len({grad.untyped_storage().data_ptr() for grad in lists[0]}) == len(weights)
    lists.clear()
    lists = [made.take(weights) for _ in range(2)]
    assert not set(map(id, lists[0])) & set(map(id, lists[1]))


def test_only_the_strides_of_a_gradient_tell_that_it_is_another():
    weights = list(network().parameters())
    made = flat_grads.FlatGrads()
    for _ in range(2):
        grads = made.take(weights)
    grads[0].t_()
    known = set(map(id, grads))
    del grads
    again = made.take(weights)
    assert not known & set(map(id, again))
    assert [grad.shape for grad in again] == [weight.shape for weight in weights]


# Which weights, and when


def test_gradients_add_up(training):
    for rounds in range(3):
        training.optimizer.zero_grad()
        numbers = [10 * rounds + number for number in range(3)]
        for number in numbers:
            training.backward(number)
        training.check(*numbers)
        training.optimizer.step()


def test_gradients_zeroed_in_place_stay(training):
    known = training.grads()
    training.optimizer.zero_grad(set_to_none=False)
    training.backward(5)
    training.check(5)
    assert all(found is one for found, one in zip(training.grads(), known, strict=True))


def test_a_graph_that_is_kept_for_a_second_pass(training):
    training.optimizer.zero_grad()
    loss = loss_of(training.model, 5)
    for retain in (True, False):
        with ampatch.scale_loss(loss, training.optimizer) as scaled:
            scaled.backward(retain_graph=retain)
    training.check(5, 5)


def test_weights_that_come_and_go():
    training = Training("O1").warm()
    for frozen in (0, 2, None, 1, None):
        for index, parameter in enumerate(training.model.parameters()):
            parameter.requires_grad_(index != frozen)
        for number in range(4):
            training.step(number)
            for index, expected in enumerate(training.expected(number)):
                grad = training.grads()[index]
                if index == frozen:
                    assert grad is None
                else:
                    torch.testing.assert_close(grad, expected, rtol=2**-6, atol=2**-6)


def test_only_some_weights_have_a_gradient(training):
    for number in range(6):
        training.optimizer.zero_grad()
        training.backward(number)
        training.masters[number % 4].grad = None
        training.backward(number)
        for index, (once, twice) in enumerate(
            zip(training.expected(number), training.expected(number, number), strict=True)
        ):
            wanted = once if index == number % 4 else twice
            torch.testing.assert_close(training.grads()[index], wanted, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("how", ["data", "transposed"])
def test_weights_that_were_put_elsewhere(how):
    training = Training("O1").warm()
    weight = training.model[0].weight
    weight.data = weight.data.clone() if how == "data" else weight.data.t().contiguous().t()
    for number in range(4):
        training.step(number)
        training.check(number)
        assert weight.grad.stride() == weight.stride()


def test_a_weight_in_the_place_of_one_that_died():
    made = flat_grads.FlatGrads()
    first = [nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(3))]
    for _ in range(2):
        made.take(first)
    assert len({grad.untyped_storage().data_ptr() for grad in made.take(first)}) == 1
    first[0] = nn.Parameter(first[0].data.view(8, 4))  # its memory, maybe its id
    assert [grad.shape for grad in made.take(first)] == [(8, 4), (3,)]


@pytest.mark.parametrize(
    "shapes",
    [[(3,), (2**14 + 1,)], [(2**14,)] * 5, [(3,)], [(3,), (0,)]],
    ids=["one is large", "many", "one", "an empty one"],
)
def test_where_it_does_not_pay_nothing_is_kept(shapes):
    made = flat_grads.FlatGrads()
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for _ in range(4):
        grads = made.take(weights)
        assert [grad.shape for grad in grads] == [weight.shape for weight in weights]
        assert not {grad.untyped_storage().nbytes() for grad in grads} - {
            4 * weight.numel() for weight in weights
        }


def test_a_model_of_few_weights_keeps_nothing(monkeypatch):
    monkeypatch.undo()
    assert not Training("O1").warm().is_flat
    torch.manual_seed(0)
    deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    assert Training("O1", deep).warm().is_flat


def test_a_model_that_has_a_larger_weight_keeps_nothing():
    """On the CPU that one has no shadow, and the peak of memory is promised to be autocast's."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 2**13))
    model, optimizer = ampatch.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.0), dtype=torch.bfloat16, verbosity=0
    )
    for _ in range(4):
        optimizer.zero_grad()
        with ampatch.scale_loss(model(batch(0)).float().sum(), optimizer) as scaled:
            scaled.backward()
    own = {parameter.grad.untyped_storage().nbytes() for parameter in model.parameters()}
    assert own == {4 * parameter.numel() for parameter in model.parameters()}


def test_masters_of_other_kinds_are_given_tensors_of_their_kind():
    made = flat_grads.FlatGrads()
    weights = [nn.Parameter(torch.zeros(3, device="meta")) for _ in range(2)]
    for _ in range(3):
        assert all(grad.is_meta for grad in made.take(weights))
    double = [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
    for _ in range(3):
        assert all(grad.dtype is torch.float64 for grad in made.take(double))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_after_ordinary_passes():
    training = Training("O1").warm()
    training.optimizer.zero_grad()
    loss_of(training.model, 5).backward(create_graph=True)
    assert training.model[0].weight.grad.requires_grad
    training.check(5)
    for number in (6, 7):
        training.step(number)
        training.check(number)
        assert not any(grad.requires_grad for grad in training.grads())


def test_a_hook_after_ordinary_passes():
    training = Training("O1").warm()
    seen = []
    handle = training.model[0].weight.register_hook(lambda grad: seen.append(grad) or 0 * grad)
    for number in (5, 6):
        training.step(number)
    assert len(seen) == 2 and not training.model[0].weight.grad.any()
    handle.remove()
    for number in (7, 8, 9):
        training.step(number)
        training.check(number)
    assert training.is_flat


def test_made_in_inference_mode(training):
    """What is made there could not be written to outside."""
    made = flat_grads.FlatGrads()
    with torch.inference_mode():
        for _ in range(2):
            grads = made.take(training.masters)
    for grad in grads:
        assert not grad.is_inference() and grad.add_(1) is grad


def test_threads_with_models_of_their_own():
    def train(training, start):
        for number in range(start, start + 20):
            barrier.wait()
            training.step(number)
        return [grad.clone() for grad in training.grads()]

    both = [Training("O1"), Training("O1")]
    barrier = threading.Barrier(2, timeout=30)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, both, (0, 40)))
    both[0].check(19)
    both[1].check(59)


# Copies


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_have_the_values(training, how):
    grads = training.grads()
    expected = [grad.clone() for grad in grads]
    if how == "deepcopy":
        found = copy.deepcopy(grads)
    elif how == "pickle":
        found = pickle.loads(pickle.dumps(grads))
    else:
        file = io.BytesIO()
        torch.save(grads, file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
    del grads
    training.step(9)
    assert all(map(torch.equal, found, expected))


def test_after_deactivate_gradients_are_plain_tensors():
    training = Training("O1").warm()
    training.step(5)
    training.check(5)
    ampatch.deactivate()
    training.check(5)
    loss_of(training.model, 6).backward()
    training.optimizer.step()
    assert training.is_flat
    for found, once in zip(training.grads(), training.expected(5), strict=True):
        assert not torch.equal(found, once)
    training.optimizer.zero_grad()
    loss_of(training.model, 7).backward()
    assert not training.is_flat


# Unscaled as one


class Unscaled(TorchDispatchMode):
    """How many tensors each unscaling takes, and how often each operator runs."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        if "unscale" in str(function):
            self.sizes.append(len(args[0]))
        return function(*args, **(kwargs or {}))


for _name in ("_amp_foreach_non_finite_check_and_unscale_", "_foreach_copy_"):
    getattr(torch.ops.aten, _name)  # a dispatch mode has torch register it at its first use


def unscaled(step: Callable, *args) -> list[int]:
    with Unscaled() as seen:
        step(*args)
    return seen.sizes


def test_a_step_allocates_no_gradients_and_unscales_one_tensor(training):
    with Unscaled() as seen:
        training.step(5)
    assert seen.sizes == [1]
    assert "aten.empty_like.default" not in seen.names
    assert seen.names.count("aten._foreach_copy_.default") == 2
    training.check(5)


def test_adding_up_allocates_no_gradients_either(training):
    def steps():
        training.optimizer.zero_grad()
        training.backward(5)
        training.backward(6)

    for _ in range(3):
        steps()
    with Unscaled() as seen:
        steps()
    assert seen.sizes == [1, 1]
    assert "aten.empty_like.default" not in seen.names
    training.check(5, 6)


def test_taking_gradients_costs_so_many_frames():
    training = Training("O1").warm()
    training.optimizer.zero_grad()
    loss = loss_of(training.model, 5)
    frames = []

    def profile(frame, event, argument):
        if event == "call":
            frames.append(frame.f_code.co_name)

    backward = torch.autograd.backward
    backward(loss, retain_graph=True)
    training.optimizer.zero_grad()
    sys.setprofile(profile)
    try:
        backward(loss)
    finally:
        sys.setprofile(None)
    taking = frames[frames.index("collect_shadows") + 1 :]
    assert taking == ["collect", "move", "take", "hand_out", "_count"]


def test_gradients_that_lie_elsewhere_are_unscaled_with_them():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.norm(self.linear(x)))

    torch.manual_seed(0)
    training = Training("O1", Two()).warm()
    assert unscaled(training.step, 5) == [3]
    training.check(5)


def test_versions_rise_as_if_each_had_been_written():
    """A graph that has saved a gradient must notice that it was unscaled."""
    training = Training("O1").warm()
    training.optimizer.zero_grad()
    leaf = torch.ones_like(training.masters[0], requires_grad=True)
    with ampatch.scale_loss(loss_of(training.model, 5), training.optimizer) as scaled:
        scaled.backward()
        kept = (leaf * training.grads()[0].detach()).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


def test_a_scale_of_one_writes_nothing():
    training = Training("O1", loss_scale=1.0).warm()
    training.optimizer.zero_grad()
    leaf = torch.ones_like(training.masters[0], requires_grad=True)
    with ampatch.scale_loss(loss_of(training.model, 5), training.optimizer) as scaled:
        scaled.backward()
        kept = (leaf * training.grads()[0]).sum()
    kept.backward()
    assert torch.equal(leaf.grad, training.grads()[0])


def test_a_gradient_whose_data_was_replaced_in_the_block():
    training = Training("O1").warm()
    for number in (5, 6):
        training.optimizer.zero_grad()
        with ampatch.scale_loss(loss_of(training.model, number), training.optimizer) as scaled:
            scaled.backward()
            grad = training.model[0].weight.grad
            grad.data = grad.data.clone()
            del grad
        training.check(number)


@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_for_one_model(level):
    """What the other one holds is not unscaled for it."""
    model = network()
    halves = [model[0].parameters(), model[2].parameters()]
    optimizers = [torch.optim.SGD(half, lr=0.0) for half in halves]
    model, optimizers = ampatch.initialize(
        model,
        optimizers,
        opt_level=level,
        dtype=torch.bfloat16,
        loss_scale="dynamic",
        init_scale=8.0,
        verbosity=0,
    )
    plain = network()
    for number in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        given = optimizers if number < 3 else optimizers[number % 2]
        with ampatch.scale_loss(loss_of(model, number), given) as scaled:
            scaled.backward()
        plain.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(plain, number)
        loss.backward()
        expected = [
            [p.grad for p in plain[0].parameters()],
            [p.grad for p in plain[2].parameters()],
        ]
        for index, optimizer in enumerate(optimizers):
            own = number < 3 or index == number % 2
            if not own and level == "O2":
                continue  # they wait in the half weights, scaled
            for master, wanted in zip(
                ampatch.master_params(optimizer), expected[index], strict=True
            ):
                factor = 1 if own else 8
                torch.testing.assert_close(
                    master.grad, factor * wanted, rtol=2**-6, atol=factor * 2**-6
                )
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_whole_is_only_what_has_every_slice():
    weights = list(network().parameters())
    made = flat_grads.FlatGrads()
    made.take(weights)
    grads, other = made.take(weights), torch.zeros(3)
    given = [
        [],
        grads[1:],
        grads,
        [other, *grads[::-1]],
        [*grads, other],
        grads[:3],
        [other, *grads[1:]],
        [other, *grads[1:]],
        [*grads, other, other],
    ]
    sizes = [[one is other for one in made.whole(some)] for some in given]
    assert sizes == [
        [],
        [False] * 3,
        [False],
        [False, True],
        [False, True],
        [False] * 3,
        [True, False, False, False],
        [True, False, False, False],
        [False, True, True],
    ]
    assert made.whole(grads)[0].numel() == 32 + 16 + 32 + 16
    assert all(a is b for a, b in zip(made.whole(grads[:2]), grads, strict=False))


def test_an_overflow_leaves_nothing_in_the_gaps(training):
    for _ in range(2):
        training.optimizer.zero_grad()
        loss = loss_of(training.model, 5) * float("inf")
        with ampatch.scale_loss(loss, training.optimizer) as scaled:
            scaled.backward()
        training.optimizer.step()
        assert ampatch.step_was_skipped(training.optimizer)
    training.step(6)
    assert not ampatch.step_was_skipped(training.optimizer)
    training.check(6)


def test_clipping_and_fused_steps():
    """Against the same training with tensors of their own."""
    ends = []
    for kept in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flat_grads, "_CAN_COUNT", kept)
            model = network()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            model, optimizer = ampatch.initialize(
                model, optimizer, dtype=torch.bfloat16, loss_scale="dynamic", verbosity=0
            )
            for number in range(6):
                optimizer.zero_grad()
                with ampatch.scale_loss(loss_of(model, number), optimizer) as scaled:
                    scaled.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            is_flat = len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1
            assert is_flat == kept
            ends.append([parameter.detach().clone() for parameter in model.parameters()])
            ampatch.deactivate()
    assert all(map(torch.equal, *ends))


# Devices and versions of torch


def test_memory_that_is_renewed_has_zeroed_gaps(monkeypatch, training):
    """As on CUDA, where the allocator alone knows who still uses a block."""
    monkeypatch.setattr(flat_grads, "RENEWED", {"cpu"})
    for number in range(5):
        training.optimizer.zero_grad()
        for flats in flats_of(training):
            for buffer in flats._buffers:
                buffer._flat.fill_(float("inf"))
        training.step(number)
        assert not ampatch.step_was_skipped(training.optimizer)
        training.check(number)
        assert training.is_flat


def flats_of(training: Training) -> list[flat_grads.FlatGrads]:
    managed = registry.managed(training.optimizer)
    shadows = [shadows.flats for session in registry.sessions for shadows in session.shadows]
    return [managed.masters._flats, *shadows]


@pytest.mark.parametrize("level", LEVELS)
def test_a_torch_that_cannot_count(monkeypatch, level):
    monkeypatch.setattr(flat_grads, "_CAN_COUNT", False)
    training = Training(level).warm()
    assert not training.is_flat
    assert unscaled(training.step, 5) == [4]
    training.check(5)


@pytest.mark.parametrize("level", LEVELS)
def test_a_torch_that_cannot_raise_versions(monkeypatch, level):
    monkeypatch.setattr(flat_grads, "_increment_version", None)
    training = Training(level).warm()
    assert training.is_flat
    assert unscaled(training.step, 5) == [4]
    training.check(5)


def test_a_torch_whose_own_holders_python_does_not_count(monkeypatch):
    """Before it did, `Tensor._use_count` tells of them."""
    if not hasattr(torch.Tensor, "_use_count"):
        pytest.skip("this torch has no _use_count")
    monkeypatch.setattr(flat_grads, "_owners", torch.Tensor._use_count)
    monkeypatch.setattr(sys, "getrefcount", lambda value: 2)
    training = Training("O1").warm()
    assert training.is_flat
    held = Leaf(training.grads()[0])
    before = held.tolist()
    training.step(5)
    training.check(5)
    assert held.tolist() == before
