"""`add_models` and `add_optimizers`: what comes after `initialize`."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from session_pairs import Slotted, build
from small_training import data, pass_back
from torch import nn

import ampatch
from ampatch.session.session import registry

BF16, FP16 = torch.bfloat16, torch.float16
O2 = {"opt_level": "O2", "dtype": BF16, "verbosity": 0}
TYPES = [("O0", FP16), ("O1", FP16), ("O2", FP16), ("O2", BF16), ("O3", FP16)]


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


def pair():
    model = build()
    return model, adam(model)


def train(models, optimizers):
    """Losses of some steps, on the sum of the models' losses."""
    losses, (inputs, targets) = [], data()
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(F.mse_loss(model(inputs), targets) for model in models)
        pass_back(loss, optimizers)
        for optimizer in optimizers:
            nn.utils.clip_grad_norm_(ampatch.master_params(optimizer), 1.0)
            optimizer.step()
        losses.append(loss.item())
    return losses


def level_of(member):
    return registry.objects.session_of(member).properties.opt_level


@pytest.mark.parametrize("level, dtype", TYPES)
@pytest.mark.parametrize("count", [1, 2])
def test_the_same_as_with_all_at_once(level, dtype, count):
    """A model, or a second one too, and then the optimizers of both."""
    settings = {"opt_level": level, "dtype": dtype, "verbosity": 0}
    models, optimizers = map(list, zip(*[pair() for _ in range(count)], strict=True))
    ampatch.initialize(models, optimizers, **settings)
    expected = train(models, optimizers)
    weights = [value.clone() for model in models for value in model.state_dict().values()]
    ampatch.deactivate()
    models = [build() for _ in range(count)]
    ampatch.initialize(models[0], **settings)
    if count == 2:
        assert ampatch.add_models(models[1]) is models[1]
    optimizers = [adam(model) for model in models]
    assert ampatch.add_optimizers(optimizers) is optimizers
    assert train(models, optimizers) == expected
    actual = [value for model in models for value in model.state_dict().values()]
    assert all(map(torch.equal, actual, weights))
    assert list(ampatch.state_dict()) == ["loss_scaler0"]


def test_they_join_the_session_of_what_they_are_added_to():
    first, optimizer = pair()
    ampatch.initialize(first, optimizer, **O2)
    other = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    for to in (first, optimizer):
        assert level_of(ampatch.add_models(build(), to=to)) == "O2"
    assert level_of(ampatch.add_models(build())) == level_of(other) == "O1"
    hooks = len(first._forward_hooks)
    ampatch.add_models(first, to=first)
    assert len(first._forward_hooks) == hooks  # nothing happens twice
    later = ampatch.add_optimizers(adam(first))
    assert level_of(later) == "O2"
    groups = later.param_groups
    assert ampatch.add_optimizers(later).param_groups is groups


def test_what_cannot_join_is_refused_and_nothing_has_changed():
    first, optimizer = pair()
    with pytest.raises(ampatch.AmpatchError, match=r"add_optimizers\(\.\.\.\): no ampatch session"):
        ampatch.add_optimizers(optimizer)
    ampatch.initialize(first, optimizer, **O2)
    elsewhere = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    good, sharded, failing = build(), build(), build()
    sharded[0].weight._st_info = object()  # as DistributedDataParallel(device_mesh=...) leaves it
    out_of_memory = mock.Mock(side_effect=RuntimeError("out of memory"))
    failing.__class__ = type("Failing", (nn.Sequential,), {"forward": property(out_of_memory)})
    part = torch.optim.SGD(first[0].parameters(), lr=0.1)
    models, optimizers = partial(ampatch.add_models, to=first), ampatch.add_optimizers
    for error, says, add, members in (
        (ampatch.AmpatchError, "belongs to another call", models, [good, elsewhere]),
        (ampatch.AmpatchError, "lazy module", models, [good, nn.LazyLinear(3)]),
        (ampatch.AmpatchError, r"'0\.weight', a shard of a DTensor", models, [good, sharded]),
        (RuntimeError, "out of memory", models, [good, failing]),
        (TypeError, r"ampatch\.add_models\(models=\.\.\.\)", models, optimizer),
        (ampatch.AmpatchError, "has this Seq", partial(ampatch.add_models, to=build()), good),
        (ampatch.AmpatchError, "of 2 calls", optimizers, [adam(first), adam(elsewhere)]),
        (ValueError, r"\.add_optimizers.*none of the model's param", optimizers, adam(good)),
        (TypeError, r"ampatch\.add_optimizers\(optimizers=\.\.\.\)", optimizers, first),
        (TypeError, "__dict__", optimizers, [part, Slotted(first[3].parameters())]),
    ):
        with pytest.raises(error, match=says):
            add(members)
        for model in (good, sharded, failing):
            assert model[0].weight.dtype is torch.float32 and "forward" not in vars(model)
        assert "step" not in vars(part) and registry.objects.session_of(part) is None
    train([first], [optimizer])


@pytest.mark.parametrize("as_list", [True, False])
def test_disabled_sessions_take_optimizers_and_pass_a_loss_through_for_any(as_list):
    """Beside one that is enabled its own must be named, as ever."""
    model = ampatch.initialize(build(), opt_level="O2", enabled=False)
    own = ampatch.add_optimizers(adam(model))
    losses = train([model], [own])
    assert ampatch.step_counts(own) == (0, 0, 0) and not ampatch.step_was_skipped(own)
    assert losses[-1] < losses[0] and model[0].weight.dtype is torch.float32
    foreign = adam(build())
    loss = model(torch.ones(2, 4)).sum()
    with ampatch.scale_loss(loss, [foreign] if as_list else foreign) as scaled:
        assert scaled is loss
    with ampatch.scale_loss(loss, [own, foreign]) as scaled:
        assert scaled is loss
    other = ampatch.initialize(build(), opt_level="O1", verbosity=0)
    with pytest.raises(ampatch.AmpatchError, match="was not given to"):
        ampatch.scale_loss(other(torch.ones(2, 4)).sum(), foreign)
