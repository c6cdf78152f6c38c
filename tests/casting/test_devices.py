"""Where there are several kinds of device, rules act where a managed model lives.

CI has no accelerator; that one is there is simulated, and tensors on `meta`
stand for those on the other device.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch
from ampatch.session import policies


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
