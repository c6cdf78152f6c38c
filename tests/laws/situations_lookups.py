"""Situations: embeddings at O2, looked up in FP32, and half for what else reads their weights."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from situations import PLAIN, situation
from small_training import in_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 512, 64  # smaller ones have half copies, as other weights
IDS = torch.randint(0, ROWS, (4, 8), generator=torch.Generator().manual_seed(0))


class Reading(nn.Module):
    """An embedding and a layer; `also` is called with the model and its hidden values."""

    def __init__(self, also, embed=nn.Embedding, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.embed = embed(ROWS, WIDTH, **settings)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.also = also

    def forward(self, ids):
        return self.also(self, self.layer(self.embed(ids)))


def product(model, hidden):
    assert model.embed.weight.dtype is hidden.dtype
    return F.linear(hidden, model.embed.weight)


def read_without_a_graph(model, hidden, mode=torch.no_grad):
    with mode():
        model.embed.weight.norm()
    return product(model, hidden)


def among_all(model, hidden):
    return F.linear(hidden, dict(model.named_parameters())["embed.weight"])


def by_c_code(model, hidden):
    tables = dict(model.embed._parameters), {**model.embed._parameters}
    assert {table["weight"].dtype for table in tables} == {hidden.dtype}
    return product(model, hidden)


def looked_up_again(model, hidden):
    again = model.embed(IDS).mean() + F.embedding(IDS, model.embed.weight).mean()
    return product(model, hidden) + again


def recomputed(model, hidden):
    return checkpoint(lambda x: product(model, x), hidden, use_reentrant=False)


def recomputed_by_reentry(model, hidden):
    return checkpoint(lambda x: product(model, x + model.embed(IDS)), hidden, use_reentrant=True)


def written(model, hidden, through_data=False):
    weight = model.embed.weight
    with torch.no_grad():
        (weight.data if through_data else weight)[0] = 2
    assert (model.embed(torch.zeros(1, dtype=torch.long)) == 2).all()
    return hidden


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda embed: pickle.loads(pickle.dumps(embed)),
    "a_replica": lambda embed: embed._replicate_for_data_parallel(),
}


def copied(model, hidden, how):
    """Copies have weights of their own, and all but shallow ones are whole."""
    twin = COPIES[how](model.embed)
    if how in ("deepcopy", "pickle"):
        assert type(twin._parameters) is dict and twin.weight.dtype is torch.float32
        with torch.no_grad():
            twin.weight.zero_()
        assert not twin(IDS).any()
    twin._parameters = dict(twin._parameters)
    twin.weight = nn.Parameter(torch.zeros(ROWS, WIDTH))
    assert not twin(IDS).any() and "forward" not in vars(twin)
    return product(model, hidden)


def saved_in_a_thread(model, hidden):
    (state,) = in_threads(model.state_dict)
    assert state["embed.weight"].dtype is torch.float32
    return product(model, hidden)


def in_branches(model, hidden):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = [future.result() for future in [pool.submit(model.embed, IDS)] * 20]
    finally:
        sys.setswitchinterval(interval)
    assert {values.dtype for values in results} == {hidden.dtype}
    return product(model, hidden)


def by_a_forward_of_the_scripts(model, hidden):
    model.embed.forward = lambda ids: F.embedding(ids, model.embed.weight)
    return hidden


def by_a_sparse_function(model, hidden):
    return hidden + F.embedding(IDS, model.embed.weight, sparse=True)


class Projected(nn.Embedding):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.out = nn.Parameter(torch.randn(WIDTH, ROWS))


READERS = {
    "the_lookup_alone": partial(Reading, lambda model, hidden: hidden),
    "a_product": partial(Reading, product),
    "a_read_without_a_graph": partial(Reading, read_without_a_graph),
    "a_read_in_inference_mode": partial(
        Reading, partial(read_without_a_graph, mode=torch.inference_mode)
    ),
    "named_parameters": partial(Reading, among_all),
    "c_code": partial(Reading, by_c_code),
    "more_lookups": partial(Reading, looked_up_again),
    "a_recompute": partial(Reading, recomputed),
    "a_recompute_by_reentry": partial(Reading, recomputed_by_reentry),
    "a_write": partial(Reading, written),
    "a_write_through_data": partial(Reading, partial(written, through_data=True)),
    "a_thread_that_saves": partial(Reading, saved_in_a_thread),
    "branches_in_threads": partial(Reading, in_branches),
    "a_forward_of_the_scripts": partial(Reading, by_a_forward_of_the_scripts),
    "a_limit_of_norms": partial(Reading, lambda model, hidden: hidden, max_norm=0.5),
    "sparse_gradients": partial(Reading, lambda model, hidden: hidden, sparse=True),
    "a_sparse_function": partial(Reading, by_a_sparse_function, sparse=True),
    **{f"a_copy_by_{how}": partial(Reading, partial(copied, how=how)) for how in COPIES},
    "another_parameter_beside_it": partial(
        Reading, lambda model, hidden: hidden @ model.embed.out, Projected
    ),
}


def unit(grad):
    """A gradient by its norm: half rounds large and small ones alike."""
    return (grad.to_dense() if grad.is_sparse else grad) / grad.norm()


@situation("O2", cases=READERS, halves="bf16", against="FP32", within=3e-3)
def an_embedding_is_read_by(amp, case):
    """Of gradients by their norms: a part that is lost or counted twice is more than 0.01 away."""
    model, optimizer = amp.start(case(), PLAIN)
    for _ in range(2):
        optimizer.zero_grad()
        amp.backward(model(IDS).float().square().mean() / 10, optimizer)
        amp.record(*(unit(param.grad) for param in model.parameters()))
        for module in model.modules():
            assert type(module._parameters) is dict
            assert {param.dtype for param in module.parameters(recurse=False)} <= {torch.float32}
        optimizer.step()


@situation("O2", halves="bf16", against="FP32", within=3e-3)
def an_embedding_of_two_models(amp):
    inner = Reading(product)
    outer = Reading(lambda model, hidden: inner(IDS) + product(inner, model.layer(hidden)))
    outer.embed = inner.embed
    (outer, _), (optimizer, _) = amp.start([outer, inner], [PLAIN, None])
    amp.backward(outer(IDS).float().square().mean() / 10, optimizer)
    amp.record(*(unit(param.grad) for param in outer.parameters()))
    optimizer.step()
