"""ignite: `create_supervised_trainer(amp_mode="apex")`.

ignite calls `scale_loss`; `amp.initialize` is the script's, as ignite's documentation says.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from apex import amp
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from matrix_kernels import Kernels
from small_task import (
    assert_close,
    assert_falls,
    float_losses,
    half_parameters,
    loader,
    network,
    optimizer_of,
)


class Run:
    """A trainer, and what it trains."""

    def __init__(self, opt_level: str, **options) -> None:
        model = network()
        self.model, self.optimizer = amp.initialize(
            model, optimizer_of(model), opt_level=opt_level, loss_scale=1024.0, verbosity=0
        )
        self.trainer = create_supervised_trainer(
            self.model, self.optimizer, F.cross_entropy, device="cpu", amp_mode="apex", **options
        )
        self.losses: list[float] = []
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: self.losses.append(engine.state.output)
        )

    def saved(self) -> dict:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "trainer": self.trainer,
            "amp": amp,  # has state_dict and load_state_dict
        }


def test_training(opt_level):
    expected = float_losses(epochs=5)
    run = Run(opt_level)
    with Kernels() as kernels:
        run.trainer.run(loader(), max_epochs=5)
    assert_falls(run.losses)
    assert_close(run.losses, expected, torch.float16)
    assert kernels.dtypes() == {torch.float16}
    assert half_parameters(run.model, torch.float16) == []


def test_bfloat16(opt_level, monkeypatch):
    monkeypatch.setenv("AMPATCH_DTYPE", "bfloat16")
    expected = float_losses(epochs=5)
    run = Run(opt_level)
    with Kernels() as kernels:
        run.trainer.run(loader(), max_epochs=5)
    assert_falls(run.losses)
    assert_close(run.losses, expected, torch.bfloat16)
    assert kernels.dtypes() == {torch.bfloat16}


def test_accumulated_gradients(opt_level):
    """ignite steps at every third batch, on a third of each loss."""
    run = Run(opt_level, gradient_accumulation_steps=3)
    steps = []
    run.optimizer.register_step_post_hook(lambda *_: steps.append(len(run.losses)))
    run.trainer.run(loader(), max_epochs=16)
    assert len(steps) == 16 * 6 // 3
    assert_falls(run.losses)


def test_resuming_goes_on_bit_for_bit(opt_level, tmp_path):
    whole = Run(opt_level)
    checkpoint = Checkpoint(whole.saved(), DiskSaver(str(tmp_path)), filename_pattern="at.pt")
    whole.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=2), checkpoint)
    whole.trainer.run(loader(), max_epochs=4)
    finished = whole.model.state_dict()

    again = Run(opt_level)
    Checkpoint.load_objects(again.saved(), str(tmp_path / "at.pt"))
    again.trainer.run(loader(), max_epochs=4)
    assert again.losses == whole.losses[12:]
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, finished[name]), name


def test_without_apex_ignite_would_refuse(monkeypatch):
    """The tests above would not pass by falling back to FP32."""
    from ampatch.compat import apex

    apex.uninstall()
    try:
        with pytest.raises(ModuleNotFoundError, match="apex"):
            create_supervised_trainer(network(), None, F.cross_entropy, amp_mode="apex")
    finally:
        apex.install()
