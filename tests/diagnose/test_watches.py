"""What `ampatch.debug`, `report` and `gradient_range` share: they come, go, and change nothing."""

import copy

import pytest
import torch
from engine import registry
from operators import Operators
from small_training import managed, pass_back
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ampatch

WATCHES = {  # each with what it has found
    "debug": lambda watch: watch.report,
    "report": str,
    "gradient_range": lambda watch: str(watch.report()),
}


@pytest.fixture(params=WATCHES)
def kind(request):
    return request.param


def in_place(model: nn.Module) -> list:
    """Hooks, modes and observers that a watch may put in."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    modules = nn.modules.module
    return [
        *(list(vars(module)) for module in model.modules()),
        *(len(getattr(module, table)) for module in model.modules() for table in tables),
        *(len(parameter._backward_hooks or ()) for parameter in model.parameters()),
        *(len(getattr(modules, f"_global_forward{name}_hooks")) for name in ("", "_pre")),
        *(len(getattr(optimizers, f"_global_optimizer_{name}_hooks")) for name in ("pre", "post")),
        *(len(_get_current_dispatch_mode_stack()), len(registry.observers.registered)),
    ]


def step(model: nn.Module, size: float = 1.0) -> None:
    model(torch.full((3, 2), size)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("end", ["remove", "deactivate"])
def test_nothing_is_left_behind(kind, end):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.BatchNorm1d(2))
    before = in_place(model)
    watch = getattr(ampatch, kind)(model)
    assert in_place(model) != before
    step(model)
    copy.deepcopy(model)(torch.randn(3, 2))
    (watch.remove if end == "remove" else ampatch.deactivate)()
    assert in_place(model) == before
    result = WATCHES[kind](watch)
    step(model, float("inf"))
    assert WATCHES[kind](watch) == result
    watch.remove()


def test_a_mode_that_was_entered_later_stays():
    debugger = ampatch.debug(nn.Linear(2, 2))
    with Operators() as above:
        debugger.remove()  # not the innermost
        assert _get_current_dispatch_mode_stack() == [above]


def test_training_is_the_same_with_it(kind):
    def losses(watches: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
        model, optimizer = managed(model, "O2", kind=torch.optim.Adam, lr=0.01)
        watch = getattr(ampatch, kind)(model) if watches else None
        values = []
        for _ in range(5):
            loss = model(torch.ones(4, 8)).pow(2).mean()
            pass_back(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        assert kind != "debug" or watch is None or watch.report is None
        ampatch.deactivate()
        return values

    assert losses(True) == losses(False)


def test_a_watch_of_every_model_outlives_deactivate():
    """A script may deactivate and initialize again; a watch of its models goes on."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampatch.debug() as debugger, ampatch.gradient_range() as gradients:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        with ampatch.report() as casts:
            ampatch.deactivate()
            ampatch.initialize(model, optimizer, opt_level="O1", dtype="bfloat16", verbosity=0)
            pass_back(model(torch.ones(1, 8)).sum(), optimizer)
            optimizer.step()
    assert debugger.step == 2 and gradients.steps == 2  # a plain one, and a managed one
    assert casts.functions["torch.nn.functional.linear"].calls == 1


def test_what_is_no_model_is_refused(kind):
    with pytest.raises(TypeError, match=rf"ampatch.{kind}\(model=...\): expected"):
        getattr(ampatch, kind)("model")
