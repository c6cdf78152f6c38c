"""A model and its optimizer copied together, in whatever holds them: the copies belong together.

How such a pair trains on at O0 to O2: `tests/laws/situations_saved.py`.
"""

import copy
import pickle
import types

import pytest
import torch
from session_pairs import build, one_step
from small_training import managed

import ampatch


def start(level, model=None):
    return managed(build() if model is None else model, level, kind=torch.optim.AdamW, lr=0.05)


@pytest.mark.parametrize("protocol", [None, 2], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_copied_optimizer_holds_the_parameters_of_the_copied_model(level, protocol):
    """With their state, in the dtype of the weights."""
    model = build()
    model[3].bias.requires_grad_(False)
    model, optimizer = start(level, model)
    for number in range(3):
        one_step(model, optimizer, number)
    held = types.SimpleNamespace(trainer={"optimizer": optimizer}, model=model)
    twin = pickle.loads(pickle.dumps(held, protocol)) if protocol else copy.deepcopy(held)
    copied, its_optimizer = twin.model, twin.trainer["optimizer"]
    params, own = its_optimizer.param_groups[0]["params"], list(copied.parameters())
    assert all(a is b for a, b in zip(params, own, strict=True))
    assert set(its_optimizer.state) == set(own[:-1]) and not own[-1].requires_grad
    kept = torch.bfloat16 if level == "O3" else torch.float32
    of_state = [state["exp_avg"] for state in its_optimizer.state.values()]
    assert {value.dtype for value in (*own, *of_state)} == {kept}
    assert not {"step", "zero_grad", "__deepcopy__", "__reduce_ex__"} & set(vars(its_optimizer))
    assert all(map(torch.equal, own, model.parameters()))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_shallow_copy_of_an_optimizer_shares_its_parameters(level):
    _, optimizer = start(level)
    twin = copy.copy(optimizer)
    assert twin.param_groups is optimizer.param_groups and twin.state is optimizer.state


def test_two_models_and_one_optimizer():
    models = [build(0), build(1)]
    params = [param for model in models for param in model.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    ampatch.initialize(models, optimizer, opt_level="O2", verbosity=0)
    (first, second), copied = copy.deepcopy((models, optimizer))
    held = copied.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, [*first.parameters(), *second.parameters()]))
