"""Lightning 1.9: `Trainer(amp_backend="apex", amp_level=..., precision=16)`.

Lightning calls `amp.initialize`, `scale_loss`, `master_params` (for clipping) and `state_dict`.
It refuses `amp_backend="apex"` on a CPU in `AcceleratorConnector._validate_precision_choice`, which
is taken out where that argument is tested. Its plugin for apex, given as `plugins=`, is not
refused, and runs with Lightning as it is.
"""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from apex import amp
from matrix_kernels import Kernels
from pytorch_lightning.plugins import ApexMixedPrecisionPlugin
from pytorch_lightning.trainer.connectors.accelerator_connector import AcceleratorConnector
from small_task import (
    assert_close,
    assert_falls,
    float_losses,
    half_parameters,
    loader,
    network,
    optimizer_of,
)

import ampatch


class Module(pl.LightningModule):
    """The small network, in Lightning's form.

    `training_step` calls `self(inputs)`: at O2 `amp.initialize` casts what the module that it was
    given is called with, and Lightning gives it the LightningModule. (With apex it was the same.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []

    def on_train_start(self) -> None:
        if isinstance(self.trainer.precision_plugin, ApexMixedPrecisionPlugin):
            amp._amp_state.loss_scalers[0]._loss_scale = 1024.0  # does not overflow

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_index):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return optimizer_of(self)


def trainer(folder, **options) -> pl.Trainer:
    """A quiet one."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(default_root_dir=str(folder), **{"max_epochs": 5, **quiet, **options})


@pytest.fixture(params=["amp_backend", "plugin"])
def backend(request, opt_level, monkeypatch) -> dict:
    """Both ways to ask for apex."""
    if request.param == "plugin":
        return {"plugins": [ApexMixedPrecisionPlugin(opt_level)]}
    monkeypatch.setattr(AcceleratorConnector, "_validate_precision_choice", lambda self: None)
    return {"amp_backend": "apex", "amp_level": opt_level, "precision": 16, "accelerator": "cpu"}


@pytest.fixture(params=["float16", "bfloat16"])
def half(request, monkeypatch) -> torch.dtype:
    """Each of the half types, from the environment."""
    monkeypatch.setenv("AMPATCH_DTYPE", request.param)
    return getattr(torch, request.param)


def test_training(opt_level, backend, half, tmp_path):
    expected = float_losses(5)
    module, fit = Module(), trainer(tmp_path, **backend)
    assert isinstance(fit.precision_plugin, ApexMixedPrecisionPlugin)
    with Kernels() as kernels:
        fit.fit(module, loader())
    assert_falls(module.losses)
    assert_close(module.losses, expected, half)
    assert kernels.dtypes() == {half}
    assert half_parameters(module, half) == []


def test_clipping(opt_level, backend, tmp_path):
    """Lightning clips what `master_params` gives, after it was unscaled."""
    expected = float_losses(5, clip=lambda params: torch.nn.utils.clip_grad_norm_(params, 0.1))
    unclipped = float_losses(5)
    module = Module()
    trainer(tmp_path, **backend, gradient_clip_val=0.1).fit(module, loader())
    assert_close(module.losses, expected, torch.float16)
    assert max(abs(a - b) for a, b in zip(expected, unclipped, strict=True)) > 0.1


def test_accumulated_gradients(opt_level, backend, tmp_path):
    module = Module()
    trainer(tmp_path, **backend, accumulate_grad_batches=3, max_epochs=16).fit(module, loader())
    assert_falls(module.losses)


def test_the_checkpoint_is_plain(opt_level, backend, tmp_path):
    """FP32 weights that Lightning loads without apex, and the loss scale."""
    module, fit = Module(), trainer(tmp_path, **backend)
    fit.fit(module, loader())
    fit.save_checkpoint(tmp_path / "at.ckpt")
    trained = module.state_dict()
    ampatch.deactivate()

    saved = torch.load(tmp_path / "at.ckpt")
    scale = saved["ApexMixedPrecisionPlugin"]["loss_scaler0"]
    assert scale == {"loss_scale": 1024.0, "unskipped": 30}
    assert {value.dtype for value in saved["state_dict"].values() if value.is_floating_point()} == {
        torch.float32
    }
    plain = Module.load_from_checkpoint(tmp_path / "at.ckpt")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, trained[name]), name


def test_lightning_itself_does_not_resume_with_apex(opt_level, backend, tmp_path):
    module, fit = Module(), trainer(tmp_path, **backend, max_epochs=1)
    fit.fit(module, loader())
    fit.save_checkpoint(tmp_path / "at.ckpt")
    ampatch.deactivate()
    if "plugins" in backend:
        backend = {"plugins": [ApexMixedPrecisionPlugin(opt_level)]}
    with pytest.raises(
        RuntimeError, match="Resuming training with APEX is currently not supported"
    ):
        trainer(tmp_path, **backend).fit(Module(), loader(), ckpt_path=str(tmp_path / "at.ckpt"))


class TwoOptimizers(Module):
    """One optimizer for each linear layer."""

    def configure_optimizers(self):
        return [optimizer_of(self.net[0]), optimizer_of(self.net[3])]


class Alternating(TwoOptimizers):
    """Lightning passes each batch once for each optimizer."""

    def training_step(self, batch, batch_index, optimizer_idx):
        return super().training_step(batch, batch_index)


class Manual(TwoOptimizers):
    """`manual_backward` names no optimizer: Lightning gives `scale_loss` all of them."""

    automatic_optimization = False

    def training_step(self, batch, batch_index):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_index))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("kind", [Alternating, Manual])
def test_several_optimizers(kind, opt_level, backend, half, tmp_path):
    expected = kind()
    trainer(tmp_path).fit(expected, loader())
    module = kind()
    trainer(tmp_path, **backend).fit(module, loader())
    assert_falls(module.losses)
    assert_close(module.losses, expected.losses, half)
