"""Which calls outside managed forwards are cast (`patch_scope`), on which devices, and which never.

CI has no accelerator; that one is there is simulated, and tensors on `meta` stand for those on the
other device.
"""

import gc
import inspect

import pytest
import torch
import torch.nn.functional as F
from registrations import forgotten_afterwards
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ampatch
from ampatch.session import policies
from ampatch.session.facade import session_of

H, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(4, 4)


def start(level="O1", dtype=H, model=None, **options):
    model = nn.Linear(4, 4) if model is None else model
    return ampatch.initialize(model, opt_level=level, dtype=dtype, verbosity=0, **options)


def product():
    """The dtype of a product of FP32 matrices, here and now."""
    return torch.mm(X, X).dtype


# Only the models, unless asked otherwise


def test_casts_outside_forwards_have_to_be_asked_for():
    assert inspect.signature(ampatch.initialize).parameters["patch_scope"].default == "model"
    model = start()
    assert product() is FP32 and nn.Linear(4, 4)(X).dtype is FP32
    assert model(X).dtype is F.linear(X, model.weight).dtype is H
    assert F.softmax(X.to(H), -1).dtype is FP32
    ampatch.deactivate()
    start(patch_scope="process")
    assert product() is H


def test_parts_of_every_model_are_cast_outside_its_forward():
    """With several sessions too: which was opened last says nothing of whose weight it is."""
    first, second = start(), start()
    assert F.linear(X, first.weight).dtype is F.linear(X, second.weight).dtype is H
    assert F.linear(X, start("O0").weight).dtype is FP32
    assert F.linear(X, first.weight).dtype is H


def test_the_weights_of_a_model_that_is_gone_say_nothing_of_others():
    """Ids come again: whoever gets one is no parameter of the model."""
    models = [start(model=nn.Linear(4, 4)), nn.Linear(4, 4)]
    keeper = start()  # its session stays open
    del models[0]
    gc.collect()
    others = [nn.Parameter(torch.ones(4, 4)) for _ in range(1000)]
    assert {F.linear(X, other).dtype for other in others} == {FP32}
    assert F.linear(X, keeper.weight).dtype is H


def test_registered_functions_of_torch_follow_the_scope():
    with forgotten_afterwards():
        ampatch.register_half_function(torch, "dot")
        start()
        assert torch.dot(X[0], X[0]).dtype is FP32
        ampatch.deactivate()
        start(patch_scope="process")
        assert torch.dot(X[0], X[0]).dtype is H
        ampatch.deactivate()


# The session opened last decides for the process


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_newer_session_without_casts_ends_those_of_the_process(level):
    """A sweep by hand: the baseline's contrastive product is FP32, until the baseline closes."""
    older = start(patch_scope="process")
    assert product() is H
    newer = start(level, patch_scope="process")
    outputs = newer(X)
    assert (outputs @ outputs.t()).dtype is product() is FP32
    assert older(X).dtype is F.linear(X, older.weight).dtype is H
    session_of(newer).close()
    assert product() is H


def test_a_newer_session_that_is_off_ends_nothing():
    start(patch_scope="process")
    start("O0", enabled=False)
    assert product() is H


def test_a_handle_s_casts_end_too():
    ampatch.init()
    assert torch.mm(X, X).dtype is FP16
    model = start("O0")
    assert product() is FP32
    session_of(model).close()
    assert torch.mm(X, X).dtype is FP16


# What is left alone also where every call is cast


class Products(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.mm(X * 1000, X * 1000)


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(4):
            yield Products()[index]


class Indices:
    """A batch sampler that computes, when it starts and for each batch."""

    def __iter__(self):
        self.seen = [product()]
        return self

    def __next__(self):
        self.seen.append(product())
        return [0, 1]


def collated(items):
    stacked = torch.stack(items)
    return stacked, torch.bmm(stacked, stacked), INITIAL[-1]


INITIAL = [None]


def note_start(worker):
    INITIAL.append(product())


@pytest.mark.parametrize(
    "data, workers, way",
    [(Products, 0, "process"), (Stream, 0, "init"), (Stream, 2, "process"), (Products, 1, "init")],
)
def test_a_loader_prepares_data_without_casts(data, workers, way):
    ampatch.init() if way == "init" else start(patch_scope="process")
    options = {"worker_init_fn": note_start} if workers else {}
    loader = DataLoader(data(), 2, collate_fn=collated, num_workers=workers, **options)
    for items, products, at_start in loader:
        assert items.dtype is products.dtype is FP32
        assert at_start is (FP32 if workers else None)
        assert product() is not FP32
    sampler = Indices()
    assert next(iter(DataLoader(Products(), batch_sampler=sampler))).dtype is FP32
    assert sampler.seen == [FP32, FP32]


def test_a_managed_model_in_a_dataset_casts():
    model = start(patch_scope="process")

    class Features(Products):
        def __getitem__(self, index):
            return model(X).detach()

    assert next(iter(DataLoader(Features(), 2))).dtype is H


HOOKS = {
    "of a tensor": lambda model, output, hook: output.register_hook(lambda grad: hook()),
    "of a module": lambda model, output, hook: model.register_full_backward_hook(lambda *_: hook()),
    "of a parameter": lambda model, output, hook: model.weight.register_post_accumulate_grad_hook(
        lambda _: hook()
    ),
    "of a node": lambda model, output, hook: output.grad_fn.register_hook(lambda *_: hook()),
}


@pytest.mark.parametrize("way", ["process", "model", "init"])
@pytest.mark.parametrize("title", HOOKS)
def test_a_backward_hook_computes_as_it_is_written(title, way):
    """Also with a weight at hand: K-FAC multiplies FP32 copies, and products overflow in half."""
    model, seen = nn.Linear(4, 4), []
    if way == "init":
        ampatch.init()
    else:
        start(model=model, patch_scope=way)

    def hook():
        seen.append((product(), torch.mm(X, model.weight).dtype))

    if title == "of a module":
        HOOKS[title](model, None, hook)
    output = model(X.clone().requires_grad_())
    if title != "of a module":
        HOOKS[title](model, output, hook)
    output.float().sum().backward()
    assert seen == [(FP32, FP32)]
    assert product() is (FP32 if way == "model" else torch.mm(X, X).dtype)


def test_a_managed_model_in_a_backward_hook_casts():
    model, seen = start(patch_scope="process"), []
    y = torch.ones(4, 4, requires_grad=True) * 1
    y.register_hook(lambda grad: seen.append(model(X).dtype))
    y.sum().backward()
    assert seen == [H]


@pytest.fixture
def accelerator(monkeypatch):
    """As on a machine where models may live on the CPU or elsewhere."""
    monkeypatch.setattr(policies, "initial_cast_devices", lambda: set())


def test_only_tensors_where_the_model_lives_are_cast(accelerator):
    model = nn.Linear(4, 4, device="meta")
    ampatch.initialize(model, patch_scope="process", verbosity=0)
    on_cpu, elsewhere = torch.ones(2, 4), torch.ones(2, 4, device="meta")
    assert F.linear(on_cpu, torch.ones(3, 4)).dtype is torch.float32
    assert F.linear(elsewhere, torch.ones(3, 4, device="meta")).dtype is torch.float16


def test_a_model_that_moves_takes_the_rules_along(accelerator):
    model = nn.Linear(4, 4, device="meta")
    ampatch.initialize(model, verbosity=0)
    model.to_empty(device="cpu")
    assert model(torch.ones(2, 4)).dtype is torch.float16


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_only_the_cpu_computes_wrongly_stays_half_elsewhere(level, accelerator, half):
    def call(device: str) -> list[torch.dtype]:
        picture, volume = (torch.ones(1, 1, *[4] * n, device=device, dtype=half) for n in (2, 3))
        grid = torch.zeros(1, 2, 2, 2, device=device, dtype=half)
        weight = torch.ones(4, device=device, dtype=half)
        calls = [F.grid_sample(picture, grid), F.embedding(grid.long(), picture[0, 0])]
        calls += (
            [F.avg_pool3d(volume, 2)] if level == "O1" else [F.layer_norm(weight, (4,), weight)]
        )
        return [found.dtype for found in calls]

    ampatch.initialize(
        [nn.Linear(4, 4), nn.Linear(4, 4, device="meta")],
        opt_level=level,
        dtype=half,
        patch_scope="process",
        verbosity=0,
    )
    assert call("meta") == [half] * 3
    assert call("cpu") == ([torch.float32, half, torch.float32] if level == "O1" else [half] * 3)


FLOAT_BY_ITSELF = {
    "softmax": (torch, lambda x: F.softmax(x, 1)),
    "log_softmax": (torch.Tensor, lambda x: x.log_softmax(1)),
    "sum": (torch, lambda x: torch.sum(x, 1, keepdim=True)),
    "vector_norm": (torch.linalg, lambda x: torch.linalg.vector_norm(x, 2, dim=1)),
}


@pytest.mark.parametrize("name", FLOAT_BY_ITSELF)
def test_an_accelerator_makes_float_results_from_half_without_a_copy(
    name, accelerator, monkeypatch
):
    """As under autocast; on the CPU, where torch copies too, and with `out=` or FP32, as ever."""
    owner, call = FLOAT_BY_ITSELF[name]
    if name == "softmax":
        owner = torch.Tensor  # which F calls
    seen, original = [], getattr(owner, name)

    def watched(*args, **kwargs):
        seen.append((args[0].dtype, kwargs.get("dtype")))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)
    models = [nn.Linear(4, 4), nn.Linear(4, 4, device="meta")]
    ampatch.initialize(models, patch_scope="process", verbosity=0)
    for device in ("meta", "cpu"):
        for dtype in (torch.float16, torch.float32):
            assert call(torch.ones(3, 4, device=device, dtype=dtype)).dtype is torch.float32
    assert seen == [(torch.float16, torch.float32), *[(torch.float32, None)] * 3]
    seen.clear()
    with ampatch.disable_casts():
        assert call(torch.ones(3, 4, device="meta", dtype=torch.float16)).dtype is torch.float16
    assert seen == [(torch.float16, None)]


def test_cross_entropy_of_classes_makes_no_copy_of_half_logits(accelerator, monkeypatch):
    seen, original = [], torch._C._nn.cross_entropy_loss
    monkeypatch.setattr(
        *(torch._C._nn, "cross_entropy_loss"),
        lambda *args: seen.append(args[0].dtype) or original(*args),
    )
    models = [nn.Linear(4, 4), nn.Linear(4, 4, device="meta")]
    ampatch.initialize(models, patch_scope="process", verbosity=0)
    for device in ("meta", "cpu"):
        logits = torch.ones(3, 4, device=device, dtype=torch.float16, requires_grad=True)
        classes = torch.zeros(3, device=device, dtype=torch.long)
        weight = torch.ones(4, device=device)
        losses = [F.cross_entropy(logits, classes), F.cross_entropy(logits, classes, weight)]
        losses += [F.cross_entropy(logits, classes, label_smoothing=0.1)]
        losses += [F.cross_entropy(logits, weight.expand(3, 4))]
        assert {loss.dtype for loss in losses} == {torch.float32}
        assert seen == [torch.float32] * (3 if device == "meta" else 4)
        losses[0].backward()
        assert logits.grad.dtype is torch.float16
        seen.clear()
