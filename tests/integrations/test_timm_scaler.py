"""`AmpatchScaler` in the order of timm's train.py, with timm's own tools around it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampatch

pytest.importorskip("timm")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of what timm does at import
    from timm.models import model_parameters, resume_checkpoint
    from timm.models.vision_transformer import VisionTransformer
    from timm.utils import CheckpointSaver, NativeScaler, dispatch_clip_grad

    from ampatch.integrations.timm import AmpatchScaler

CLASSES = 4
BOUNDS = {"float16": 0.02, "bfloat16": 0.1}
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def transformer() -> nn.Module:
    """Two blocks on images of 8 x 8, four patches each."""
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=CLASSES
    )


def _images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(8):
        targets = torch.randint(CLASSES, (12,), generator=generator)
        channel = 4.0 * F.one_hot(targets, CLASSES)[:, :3, None, None]  # a class is a colour
        found.append((channel + torch.randn(12, 3, 8, 8, generator=generator), targets))
    return found


IMAGES = _images()


def in_float32(loss, optimizer, clip_grad, clip_mode, parameters) -> None:
    loss.backward()
    if clip_grad is not None:
        dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
    optimizer.step()


class Training:
    def __init__(self, level: str | None = None, half: str = "float16") -> None:
        self.model = transformer()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scaler: Any = in_float32
        if level is not None:
            settings = {"opt_level": level, "dtype": half, "init_scale": 1024.0, "verbosity": 0}
            ampatch.initialize(self.model, self.optimizer, **settings)
            self.scaler = AmpatchScaler()

    def train(self, clip: float | None = None, mode: str = "norm") -> list[float]:
        losses = []
        for inputs, targets in IMAGES:
            loss = F.cross_entropy(self.model(inputs), targets)
            parameters = model_parameters(self.model, exclude_head="agc" in mode)
            self.scaler(loss, self.optimizer, clip, mode, parameters)
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("half", BOUNDS)
@LEVELS
@pytest.mark.parametrize("mode, bound", [("norm", 0.3), ("value", 0.01), ("agc", 0.01)])
def test_clipping_is_that_of_fp32_weights(level, half, mode, bound):
    expected = Training().train(bound, mode)
    found = Training(level, half).train(bound, mode)
    assert found == pytest.approx(expected, rel=BOUNDS[half], abs=BOUNDS[half])
    unclipped = Training().train()
    assert max(abs(a - b) for a, b in zip(expected, unclipped, strict=True)) > 0.15


@LEVELS
def test_the_head_is_left_out_and_no_parameters_means_all(level):
    for exclude, parameters in ((2, lambda model: list(model.parameters())[:-2]), (0, None)):
        training = Training(level)
        given = parameters and parameters(training.model)
        loss = F.cross_entropy(training.model(IMAGES[0][0]), IMAGES[0][1])
        training.scaler(loss, training.optimizer, 1e-3, "value", given)
        largest = [p.grad.abs().max() for p in ampatch.master_params(training.optimizer)]
        assert sum(bool(one > 1.01e-3) for one in largest) == exclude
        ampatch.deactivate()


def test_a_checkpoint_of_native_amp_goes_on(tmp_path):
    native = Training()
    native.scaler = NativeScaler(device="cpu")
    native.scaler._scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    saver = CheckpointSaver(
        native.model, native.optimizer, amp_scaler=native.scaler, checkpoint_dir=str(tmp_path)
    )
    native.train()
    saver.save_checkpoint(epoch=0)
    again = Training("O2")
    path = str(tmp_path / "last.pth.tar")
    resume_checkpoint(again.model, path, again.optimizer, again.scaler)
    assert ampatch.loss_scale() == 512.0
