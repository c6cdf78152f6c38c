"""Embeddings at O2: looked up in FP32, and half for whatever else reads their weights."""

from __future__ import annotations

import concurrent.futures
import copy
import pickle
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampatch

H = torch.bfloat16
ROWS, WIDTH = 512, 64
IDS = torch.randint(0, ROWS, (4, 8), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """An embedding and a layer; `also` is called with the model and its hidden values."""

    def __init__(self, also=None, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(ROWS, WIDTH, **settings)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.also = also

    def forward(self, ids):
        hidden = self.layer(self.embed(ids))
        return hidden if self.also is None else self.also(self, hidden)


def managed(model, **settings):
    return ampatch.initialize(model, opt_level="O2", dtype=H, verbosity=0, **settings)


def is_plain(model):
    return all(type(part._parameters) is dict for part in model.modules()) and {
        parameter.dtype for parameter in model.parameters()
    } == {torch.float32}


def product(model, hidden):
    assert model.embed.weight.dtype is hidden.dtype
    return F.linear(hidden, model.embed.weight)


def read_without_a_graph(model, hidden):
    with torch.no_grad():
        model.embed.weight.norm()
    return product(model, hidden)


def read_in_inference_mode(model, hidden):
    with torch.inference_mode():
        model.embed.weight.norm()
    return product(model, hidden)


def among_all(model, hidden):
    weights = dict(model.named_parameters())
    return F.linear(hidden, weights["embed.weight"])


def looked_up_again(model, hidden):
    return (
        product(model, hidden) + model.embed(IDS).sum() + F.embedding(IDS, model.embed.weight).sum()
    )


def recomputed(model, hidden):
    return checkpoint(lambda x: product(model, x), hidden, use_reentrant=False)


def recomputed_by_reentry(model, hidden):
    return checkpoint(lambda x: product(model, x + model.embed(IDS)), hidden, use_reentrant=True)


READERS = [
    *(None, product, read_without_a_graph, read_in_inference_mode, among_all, looked_up_again),
    *(recomputed, recomputed_by_reentry),
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("also", READERS)
def test_values_and_gradients_are_those_of_fp32(also):
    plain, model = Net(also), managed(Net(also))
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            one(IDS).float().square().mean().backward()
        assert is_plain(model)
        for expected, found in zip(plain.parameters(), model.parameters()):
            assert found.grad.dtype is torch.float32
            assert (found.grad - expected.grad).norm() < 0.01 * expected.grad.norm()
        with torch.no_grad():
            torch.testing.assert_close(model(IDS), plain(IDS), atol=0.2, rtol=0.05)


def test_gradients_of_a_lookup_are_summed_in_fp32():
    model = managed(Net(lambda _, hidden: hidden))
    hidden = {}
    model.layer.register_forward_pre_hook(lambda _, args: hidden.update(given=args[0]))
    model(IDS * 0).sum().backward()
    assert hidden["given"].dtype is H
    weight = model.layer.weight.detach().to(H).float()
    expected = (weight.sum(0).to(H).float() * IDS.numel())[None]
    torch.testing.assert_close(model.embed.weight.grad[:1], expected)


def test_a_bag_with_weights_of_its_own():
    bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
    weights = torch.rand(4, 8)
    expected = bag(IDS, per_sample_weights=weights.to(H).float())

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = bag

        def forward(self, ids, weights):
            assert type(bag._parameters) is not dict
            found = self.bag(ids, per_sample_weights=weights)
            assert found.dtype is H
            return found

    model = managed(Bags())
    assert torch.equal(model(IDS, weights), expected.to(H).float())
    assert is_plain(model)


@pytest.mark.parametrize("write", ["in place", "data"])
def test_what_a_forward_writes_is_read_by_the_lookup_and_kept(write):
    def also(model, hidden):
        weight = model.embed.weight
        with torch.no_grad():
            (weight.data if write == "data" else weight)[0] = 2
        return model.embed(torch.zeros(1, dtype=torch.long))

    model = managed(Net(also))
    assert (model(IDS) == 2).all()
    assert is_plain(model)
    assert (model.embed.weight[0] == 2).all()


def test_norms_are_kept_small_in_the_weight_itself():
    model = managed(Net(max_norm=0.5))
    model(IDS)
    assert (model.embed.weight[IDS].norm(dim=-1) < 0.51).all()


def test_sparse_gradients():
    model = managed(Net(sparse=True))
    model(IDS).sum().backward()
    assert model.embed.weight.grad.is_sparse
    assert model.embed.weight.grad.dtype is torch.float32


def test_a_copy_made_in_the_forward_is_whole():
    found = []
    model = managed(Net(lambda model, hidden: found.append(copy.deepcopy(model.embed)) or hidden))
    model(IDS)
    [embed] = found
    assert type(embed._parameters) is dict
    assert torch.equal(embed.weight, model.embed.weight)
    with torch.no_grad():
        embed.weight.zero_()
    assert (embed(IDS) == 0).all()


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "replica"])
def test_copies_made_in_the_forward_have_weights_of_their_own(how):
    makes = {
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "pickle": lambda part: pickle.loads(pickle.dumps(part)),
        "replica": lambda part: part._replicate_for_data_parallel(),
    }
    found = []

    def also(model, hidden):
        made = makes[how](model.embed)
        made._parameters = dict(made._parameters)
        made.weight = nn.Parameter(torch.zeros(ROWS, WIDTH))
        found.append((made, made(IDS)))
        return product(model, hidden)

    model = managed(Net(also))
    model(IDS)
    [(made, output)] = found
    assert (output == 0).all() and "forward" not in vars(made)


def test_branches_in_threads_within_the_forward():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:

        def also(model, hidden):
            parts = [one.result() for one in [pool.submit(model.embed, IDS) for _ in range(20)]]
            assert {part.dtype for part in parts} == {hidden.dtype}
            return product(model, hidden)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            model = managed(Net(also))
            for _ in range(10):
                model(IDS)
        finally:
            sys.setswitchinterval(interval)


def test_tables_read_by_c_code_have_half_copies():
    def also(model, hidden):
        assert dict(model.embed._parameters)["weight"].dtype is hidden.dtype
        return product(model, hidden)

    managed(Net(also))(IDS)

    def again(model, hidden):
        assert {**model.embed._parameters}["weight"].dtype is hidden.dtype
        return product(model, hidden)

    managed(Net(again))(IDS)


def test_an_embedding_with_another_parameter():
    class Projected(nn.Embedding):
        def __init__(self):
            super().__init__(ROWS, WIDTH)
            self.out = nn.Parameter(torch.randn(WIDTH, ROWS))

    model = Net(lambda model, hidden: hidden @ model.embed.out)
    model.embed = Projected()
    managed(model)(IDS).sum().backward()
    assert model.embed.out.grad.dtype is model.embed.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("reads", [False, True])
def test_a_subclass_that_looks_up_by_its_base(reads):
    class Scaled(nn.Embedding):
        def forward(self, ids):
            found = super().forward(ids)
            return found * 2 + (self.weight.sum() * 0 if reads else 0)

    model = Net()
    model.embed = Scaled(ROWS, WIDTH)
    seen = []
    model.embed.register_forward_hook(
        lambda part, args, output: seen.append((output.dtype, type(part._parameters) is dict))
    )
    managed(model)(IDS)
    assert seen == [(H, reads)]


def test_ctrl_c_while_the_copy_is_made(monkeypatch):
    """A state dict that is saved then has the FP32 weight."""
    model = managed(Net(product))

    def stop(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "_note_copy":
            raise KeyboardInterrupt

    sys.setprofile(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
    finally:
        sys.setprofile(None)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    model(IDS)
    assert is_plain(model)


def test_a_weight_that_the_forward_replaces_stays():
    new = nn.Parameter(torch.zeros(ROWS, WIDTH))

    def also(model, hidden):
        model.embed.weight = new
        return hidden

    model = managed(Net(also))
    model(IDS)
    assert model.embed.weight is new


@pytest.mark.parametrize("reads", [False, True])
def test_a_forward_that_raises(reads):
    def also(model, hidden):
        if reads:
            product(model, hidden)
        raise KeyError

    model = managed(Net(also))
    for _ in range(2):
        with pytest.raises(KeyError):
            model(IDS)
        assert is_plain(model)


def test_a_script_with_a_forward_of_its_own_in_the_module():
    model = Net()
    model.embed.forward = lambda ids: F.embedding(ids, model.embed.weight)
    managed(model)
    assert model(IDS).dtype is torch.float32
    assert "forward" in vars(model.embed)


def test_models_that_share_an_embedding():
    """The one runs within the other."""
    inner = Net(product)
    outer = Net(lambda model, hidden: inner(IDS) + product(inner, model.layer(hidden)))
    outer.embed = inner.embed
    managed([inner, outer])
    outer(IDS).sum().backward()
    assert is_plain(inner) and is_plain(outer)
    assert inner.embed.weight.grad.isfinite().all()


def test_another_thread_reads_the_weights_meanwhile():
    seen = []

    def also(model, hidden):
        thread = threading.Thread(target=lambda: seen.append(model.state_dict()))
        thread.start()
        thread.join()
        return product(model, hidden)

    model = managed(Net(also))
    model(IDS).sum().backward()
    assert torch.equal(seen[0]["embed.weight"], model.embed.weight)
    assert seen[0]["embed.weight"].dtype is torch.float32
    assert model.embed.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("also", [None, product])
def test_a_compiled_model_is_compiled_once(also):
    model = managed(Net(also))
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    expected = [model(IDS).detach() for _ in range(2)]
    for _ in range(3):
        model.zero_grad()
        found = compiled(IDS)
        assert torch.equal(found, expected[0])
        found.sum().backward()
        assert model.embed.weight.grad.dtype is torch.float32
    assert len(graphs) == 1
    assert is_plain(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_is_scripted_in_a_session(kind):
    managed(Net())
    embedding = kind(ROWS, WIDTH)
    assert torch.equal(torch.jit.script(embedding)(IDS), embedding(IDS))
