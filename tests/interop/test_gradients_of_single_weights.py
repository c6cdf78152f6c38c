"""Gradients of single weights: a pass for the head reaches the head, as under torch.autocast.

Which gradients these are: `laws/situations_gradients.py`.
"""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from operators import Operators
from small_training import Made, in_threads, managed
from torch import nn
from torch.autograd import grad as grad_by_name
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

H = torch.bfloat16
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
LEVELS = ["O1", "O2"]


class Net(nn.Module):
    """A trunk, and a head whose weights share a node of the graph with it."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head, self.side = nn.Linear(8, 8), nn.Linear(8, 8)
        self.checkpoints = checkpoints
        self.seen: list = []

    def features(self, x):
        for layer in self.trunk:
            if self.checkpoints and self.seen:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = torch.tanh(layer(x))
            self.seen.append(x)
        return x

    def forward(self, x):
        self.seen = []
        x = self.features(x)
        return self.head(x), self.side(x), x


def of(output) -> torch.Tensor:
    return output.float().pow(2).mean()


def trained(level: str, **options) -> Net:
    """A managed model whose last forwards have cast its weights together."""
    model, _ = managed(Net(**options), level)
    for _ in range(2):
        of(model(X)[0]).backward()
    model.zero_grad()
    return model


def asked(level: str, **options) -> Net:
    model = trained(level, **options)
    if not options.get("checkpoints"):
        torch.autograd.grad(of(model(X)[0]), model.head.weight)
    else:
        with pytest.raises(RuntimeError, match="incompatible with .grad"):
            torch.autograd.grad(of(model(X)[0]), model.head.weight)
    return model


def autocast() -> Net:
    class Under(Net):
        @torch.autocast("cpu", dtype=H)
        def forward(self, x):
            return super().forward(x)

    return Under()


def operators_of(pass_) -> list:
    with Operators() as operators:
        pass_()
    names = [str(value) for value in operators.seen]
    return sorted(
        name.replace("_foreach_copy_", "_to_copy")  # natively, into what `empty_like` has made
        for name in names
        if not ("detach" in name or "empty_like" in name)
    )


def products(pass_) -> int:
    return sum("aten.mm" in name or "aten.addmm" in name for name in operators_of(pass_))


def nodes_of(loss) -> int:
    """How many nodes lead straight to weights."""
    seen, waiting, results = set(), [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for before, _ in node.next_functions:
            if before is not None and hasattr(before, "variable"):
                results.add(node)
            waiting.append(before)
    return len(results)


@pytest.mark.parametrize("level", LEVELS)
def test_a_pass_for_the_head_runs_the_operators_that_it_runs_under_autocast(level):
    model, plain = asked(level), autocast()
    loss, expected = of(model(X)[0]), of(plain(X)[0])
    actual = operators_of(lambda: torch.autograd.grad(loss, model.head.weight))
    assert actual == operators_of(lambda: torch.autograd.grad(expected, plain.head.weight))
    assert products(lambda: of(model(X)[0]).backward()) > 5  # a whole pass, beside the one above
    assert sum("aten.mm" in name for name in actual) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_between_run_once_and_retained_gradients_are_those_of_one_pass(level):
    model, plain = asked(level), autocast()
    calls: list = []
    model.trunk[1].register_full_backward_hook(lambda *_: calls.append("module"))
    for net in (model, plain):
        net(X)
        net.zero_grad()
        head = net(X)[0]
        net.seen[2].register_hook(lambda grad: calls.append("tensor"))
        net.seen[2].retain_grad()
        torch.autograd.grad(of(head), net.head.weight, retain_graph=True)
        assert calls == []
        of(head).backward()
        assert calls == (["tensor", "module"] if net is model else ["tensor"])
        calls.clear()
    assert torch.equal(model.seen[2].grad, plain.seen[2].grad)


@pytest.mark.parametrize("level", LEVELS)
def test_reentrant_checkpoints_between_do_not_refuse(level):
    model = asked(level, checkpoints=True)
    head, _, _ = model(X)
    (results,) = torch.autograd.grad(of(head), model.head.weight, retain_graph=True)
    of(head).backward()
    assert torch.equal(results, model.head.weight.grad)


WAYS = {
    "autograd.grad": lambda loss, weight: torch.autograd.grad(loss, weight),
    "a name bound before": lambda loss, weight: grad_by_name(loss, [weight]),
    "keywords": lambda loss, weight: torch.autograd.grad(outputs=[loss], inputs=(weight,)),
    "an iterator": lambda loss, weight: torch.autograd.grad(iter([loss]), iter([weight])),
    "an edge": lambda loss, weight: torch.autograd.grad(loss, get_gradient_edge(weight)),
    "Tensor.backward": lambda loss, weight: loss.backward(inputs=weight),
    "autograd.backward": lambda loss, weight: torch.autograd.backward(
        loss, None, False, False, None, iter([weight])
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask(level, way):
    model = trained(level)
    shared = nodes_of(of(model(X)[0]))
    head, _, hidden = model(X)
    WAYS[way](of(head), model.head.weight)
    of(hidden).backward()  # the first request has left it
    own = nodes_of(of(model(X)[0]))
    assert (shared, own) == (1, 10)
    head, _, hidden = model(X)
    assert products(lambda: WAYS[way](of(head), model.head.weight)) == 1
    of(hidden).backward()
    with pytest.raises(RuntimeError, match="a second time"):  # nothing else is retained
        WAYS[way](of(head), model.head.weight)


def test_the_copy_of_a_weight_inside_a_forward_counts_as_the_weight():
    model = trained("O2")
    own = []

    def forward(self, x):
        y = self.inner.head(torch.tanh(self.inner.trunk[0](x)))
        if self.asks:
            torch.autograd.grad(of(y), self.inner.head.weight, retain_graph=True)
        return y

    outer, _ = managed(Made(forward, inner=Net(), asks=False), "O2")
    for outer.asks in (False, True, False):
        own.append(nodes_of(of(outer(X))))
    assert own == [1, 1, 4]
    assert nodes_of(of(model(X)[0])) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_requests_for_all_weights_or_none_change_nothing(level):
    """As of meta-learning, gradient penalties and Jacobians of activations."""
    model, other = trained(level), nn.Linear(8, 8)
    x = X.clone().requires_grad_()
    for _ in range(2):
        head, side, hidden = model(x)
        loss = of(other(head.float())) + of(side)
        torch.autograd.grad(loss, model.parameters(), retain_graph=True)
        torch.autograd.grad(loss, [x, head, other.weight], retain_graph=True)
        torch.autograd.functional.jacobian(lambda x: of(model(x)[0]), x.detach())
        torch.func.grad(lambda x: of(model(x)[0]))(x.detach())
        torch.autograd.grad(loss, x)
        with pytest.raises(RuntimeError, match="a second time"):
            of(hidden).backward()
    assert nodes_of(of(model(X)[0])) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_weights_are_not_counted(level):
    model = Net()
    for weight in model.trunk.parameters():
        weight.requires_grad_(False)
    managed(model, level)
    for _ in range(3):
        head, side, _ = model(X)
        trained = [*model.head.parameters(), *model.side.parameters()]
        torch.autograd.grad(of(head) + of(side), trained)
    assert nodes_of(of(head) + of(side)) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_only_the_model_that_is_asked_has_nodes_of_its_own(level):
    model, other = trained(level), trained("O1")
    for _ in range(2):
        torch.autograd.grad(of(model(X)[0]), model.head.weight)
    assert [nodes_of(of(net(X)[0])) for net in (model, other)] == [10, 1]
    model.eval()
    with torch.no_grad():
        assert not model(X)[0].requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_requests_in_several_threads(level):
    models = [trained(level) for _ in range(4)]

    def ask(model):
        for _ in range(3):
            head, _, hidden = model(X)
            (grad,) = torch.autograd.grad(of(head), model.head.weight)
            of(hidden).backward()
        return grad

    results = in_threads(*[lambda model=model: ask(model) for model in models])
    assert all(torch.equal(grad, results[0]) for grad in results)


def test_a_weight_with_hooks_and_one_of_another_dtype():
    model = trained("O2")
    seen = []
    model.side.weight.register_hook(lambda grad: seen.append(grad.dtype))
    torch.autograd.grad(of(model(X)[0]), model.head.weight)
    model.head.register_parameter("scale", nn.Parameter(torch.ones(8, dtype=torch.float64)))
    sum(map(of, model(X)[:2])).backward()
    assert seen == [torch.float32] and model.trunk[0].weight.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_part_is_asked_as_it_was(level):
    """What torch compiles may give its buffers to one pass alone, and refuses to retain them."""
    model = Net()
    model.trunk = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
    managed(model, level)
    model.trunk[1].compile(backend="aot_eager")
    for _ in range(2):
        of(model(X)[0]).backward()
    for _ in range(3):
        model.zero_grad()
        head = model(X)[0]
        (results,) = torch.autograd.grad(of(head), model.head.weight)
        of(model(X)[0]).backward()
        assert torch.equal(results, model.head.weight.grad)
    torch.compiler.reset()


@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_function_that_asks(level):
    model, _ = managed(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), level)

    def of_head(x):
        return torch.autograd.grad(of(model(x)), model[2].weight)[0] * 2

    expected = of_head(X)
    traced = hasattr(torch._dynamo.config, "trace_autograd_ops")  # else the graph breaks there
    with torch._dynamo.config.patch(trace_autograd_ops=True) if traced else nullcontext():
        actual = torch.compile(of_head, backend="aot_eager", fullgraph=traced)(X)
    assert torch.equal(actual, expected)
    torch.compiler.reset()


def test_wrong_calls_are_torchs_errors():
    model = trained("O1")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'inputs'"):
        torch.autograd.grad(of(model(X)[0]))
    with pytest.raises(TypeError, match="not iterable"):
        torch.autograd.grad(of(model(X)[0]), 5)
    with pytest.raises(RuntimeError, match="cannot be empty"):
        of(model(X)[0]).backward(inputs=[])


def test_requests_keep_nothing_alive():
    model = asked("O1")
    head = model(X)[0]
    torch.autograd.grad(of(head), model.head.weight)
    watched = weakref.ref(model.seen[0])
    model.seen = []
    del head
    assert watched() is None or (gc.collect() and watched() is None)
