"""`AmpatchScaler` in the order of timm's train.py, with timm's own tools around it."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from framework_runs import batches, network, optimizer_of

import ampatch

pytest.importorskip("timm")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of what timm does at import
    from runs_with_timm import without_scaler
    from timm.models import model_parameters, resume_checkpoint
    from timm.utils import CheckpointSaver, NativeScaler

    from ampatch.integrations.timm import AmpatchScaler

BOUNDS = {"float16": 0.02, "bfloat16": 0.1}
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


class Training:
    def __init__(self, level: str | None = None, half: str = "float16") -> None:
        self.model = network()
        self.optimizer = optimizer_of(self.model)
        self.scaler: Any = without_scaler
        if level is not None:
            settings = {"opt_level": level, "dtype": half, "init_scale": 1024.0, "verbosity": 0}
            ampatch.initialize(self.model, self.optimizer, **settings)
            self.scaler = AmpatchScaler()

    def train(self, clip: float | None = None, mode: str = "norm") -> list[float]:
        losses = []
        for inputs, targets in batches():
            loss = F.cross_entropy(self.model(inputs), targets)
            parameters = model_parameters(self.model, exclude_head="agc" in mode)
            self.scaler(loss, self.optimizer, clip, mode, parameters, need_update=True)
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("half", BOUNDS)
@LEVELS
@pytest.mark.parametrize("mode, bound", [("norm", 0.3), ("value", 0.01), ("agc", 0.01)])
def test_clipping_is_that_of_fp32_weights(level, half, mode, bound):
    expected = Training().train(bound, mode)
    actual = Training(level, half).train(bound, mode)
    assert actual == pytest.approx(expected, rel=BOUNDS[half], abs=BOUNDS[half])
    unclipped = Training().train()
    assert max(abs(a - b) for a, b in zip(expected, unclipped, strict=True)) > 0.15


@LEVELS
def test_the_head_is_left_out_and_no_parameters_means_all(level):
    for exclude, parameters in ((2, lambda model: list(model.parameters())[:-2]), (0, None)):
        training = Training(level)
        clipped = parameters and parameters(training.model)
        inputs, targets = next(iter(batches()))
        loss = F.cross_entropy(training.model(inputs), targets)
        training.scaler(loss, training.optimizer, 1e-3, "value", clipped)
        largest = [p.grad.abs().max() for p in ampatch.master_params(training.optimizer)]
        assert sum(bool(value > 1.01e-3) for value in largest) == exclude
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
