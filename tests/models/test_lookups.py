"""Embeddings at O2: which copy of a table is made, and when.

What readers of the weight compute and train: laws/situations_lookups.py.
"""

import pytest
import strikes
import torch
import torch.nn.functional as F
from small_training import Made
from torch import nn

import ampatch

H = torch.bfloat16
ROWS, WIDTH = 512, 64
IDS = torch.randint(0, ROWS, (4, 8), generator=torch.Generator().manual_seed(0))


def net(also, embed=None):
    """An embedding and a layer; `also` is called with the model and its hidden values."""
    torch.manual_seed(0)
    return Made(
        lambda self, ids: also(self, self.layer(self.embed(ids))),
        embed=embed or nn.Embedding(ROWS, WIDTH),
        layer=nn.Linear(WIDTH, WIDTH),
    )


def managed(model):
    return ampatch.initialize(model, opt_level="O2", dtype=H, verbosity=0)


def looks_up(model, hidden):
    return hidden


def reads(model, hidden):
    return F.linear(hidden, model.embed.weight)


def is_plain(model):
    return all(type(part._parameters) is dict for part in model.modules()) and {
        param.dtype for param in model.state_dict().values()
    } == {torch.float32}


def test_gradients_of_a_lookup_are_summed_in_fp32():
    model, inputs = managed(net(looks_up)), []
    model.layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
    model(IDS * 0).sum().backward()
    weight = model.layer.weight.detach().to(H).float()
    expected = (weight.sum(0).to(H).float() * IDS.numel())[None]
    torch.testing.assert_close(model.embed.weight.grad[:1], expected)
    assert inputs == [H]


def test_a_bag_with_weights_of_its_own():
    bag, weights = nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), torch.rand(4, 8)
    expected = bag(IDS, per_sample_weights=weights.to(H).float())

    def forward(self, ids, weights):
        assert type(bag._parameters) is not dict
        return self.bag(ids, per_sample_weights=weights)

    model = managed(Made(forward, bag=bag))
    assert torch.equal(model(IDS, weights), expected.to(H).float())
    assert is_plain(model)


@pytest.mark.parametrize("reads_too", [False, True])
def test_a_subclass_that_looks_up_by_its_base(reads_too):
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 2 + (self.weight.sum() * 0 if reads_too else 0)

    model, seen = net(looks_up, Scaled(ROWS, WIDTH)), []
    model.embed.register_forward_hook(
        lambda part, args, output: seen.append((output.dtype, type(part._parameters) is dict))
    )
    managed(model)(IDS)
    assert seen == [(H, reads_too)]


def test_ctrl_c_at_any_line_leaves_the_table_whole():
    """A state dict that is saved then has the FP32 weight."""
    model = managed(net(reads))

    def forward():
        model(IDS)

    files = ("models/embeddings.py",)
    for number in range(1, strikes.lines(forward, files)[0] + 1):
        strikes.lines(forward, files, number)
        assert is_plain(model), number
        forward()
        assert is_plain(model), number


@pytest.mark.parametrize("does", [looks_up, reads])
def test_a_weight_that_is_replaced_in_a_forward_that_raises(does):
    new = nn.Parameter(torch.zeros(ROWS, WIDTH))

    def also(model, hidden):
        does(model, hidden)
        model.embed.weight = new
        raise KeyError

    model = managed(net(also))
    for _ in range(2):
        with pytest.raises(KeyError):
            model(IDS)
        assert is_plain(model) and model.embed.weight is new


@pytest.mark.parametrize("does", [looks_up, reads])
def test_a_compiled_model_is_compiled_once(does):
    model, graphs = managed(net(does)), []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    [expected, _] = [model(IDS).detach() for _ in range(2)]
    for _ in range(3):
        model.zero_grad()
        output = compiled(IDS)
        assert torch.equal(output, expected)
        output.sum().backward()
        assert model.embed.weight.grad.dtype is torch.float32
    assert len(graphs) == 1 and is_plain(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_is_scripted_in_a_session(kind):
    managed(net(looks_up))
    embedding = kind(ROWS, WIDTH)
    assert torch.equal(torch.jit.script(embedding)(IDS), embedding(IDS))
