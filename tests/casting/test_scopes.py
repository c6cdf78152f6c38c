"""`patch_scope`: which calls outside managed forwards are cast, and which never are."""

import gc
import inspect

import pytest
import torch
import torch.nn.functional as F
from registrations import forgotten_afterwards
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ampatch
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


def everywhere(way):
    """A session that casts every call."""
    return ampatch.init() if way == "init" else start(patch_scope="process")


@pytest.mark.parametrize(
    "data, workers, way",
    [(Products, 0, "process"), (Stream, 0, "init"), (Stream, 2, "process"), (Products, 1, "init")],
)
def test_a_loader_prepares_data_without_casts(data, workers, way):
    everywhere(way)
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
