"""catalyst 21.12: `APEXEngine` under a `SupervisedRunner`.

The engine reads the signature of `amp.initialize`, passes every default on, and calls `scale_loss`,
`state_dict` and `load_state_dict`. It takes any device; "cpu" is all that is said here.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from apex import amp
from catalyst import dl
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
from torch.nn.utils import clip_grad

import ampatch


class Losses(dl.Callback):
    """Every step's loss."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.external)
        self.seen: list[float] = []

    def on_batch_end(self, runner) -> None:
        self.seen.append(runner.batch_metrics["loss"].item())


class Run:
    """A runner, what it trains, and its losses."""

    def __init__(self) -> None:
        self.model = network()
        self.losses: list[float] = []

    def train(self, folder: Path, opt_level: str, epochs: int, optimizing=None, **options) -> Run:
        losses = Losses()
        optimizer = dl.OptimizerCallback(metric_key="loss", **(optimizing or {}))
        self.runner = dl.SupervisedRunner()
        self.runner.train(
            engine=dl.APEXEngine("cpu", apex_kwargs={"opt_level": opt_level}),
            model=self.model,
            criterion=torch.nn.CrossEntropyLoss(),
            optimizer=optimizer_of(self.model),
            loaders=OrderedDict(train=loader()),
            num_epochs=epochs,
            logdir=str(folder),
            callbacks=[optimizer, losses],
            **options,
        )
        self.losses = losses.seen
        return self


@pytest.fixture(params=["float16", "bfloat16"])
def half(request, monkeypatch) -> torch.dtype:
    """Each of the half types, from the environment."""
    monkeypatch.setenv("AMPATCH_DTYPE", request.param)
    return getattr(torch, request.param)


def test_training(opt_level, half, tmp_path):
    expected = float_losses(5)
    with Kernels() as kernels:
        run = Run().train(tmp_path, opt_level, epochs=5)
    assert_falls(run.losses)
    assert_close(run.losses, expected, half)
    assert kernels.dtypes() == {half}
    assert half_parameters(run.model, half) == []


def test_clipping(opt_level, tmp_path):
    """The function is looked up when it is called: see docs/clients.md."""
    expected = float_losses(5, clip=lambda params: clip_grad.clip_grad_norm_(params, 0.1))
    unclipped = float_losses(5)
    clip = {"grad_clip_fn": lambda params: clip_grad.clip_grad_norm_(params, 0.1)}
    run = Run().train(tmp_path, opt_level, epochs=5, optimizing=clip)
    assert_close(run.losses, expected, torch.float16)
    assert max(abs(a - b) for a, b in zip(expected, unclipped, strict=True)) > 0.1


def test_accumulated_gradients(opt_level, tmp_path):
    optimizing = {"accumulation_steps": 3}
    assert_falls(Run().train(tmp_path, opt_level, epochs=8, optimizing=optimizing).losses)


def test_resuming_goes_on_bit_for_bit(opt_level, tmp_path):
    whole = Run().train(tmp_path / "whole", opt_level, epochs=4)
    finished = {name: value.clone() for name, value in whole.model.state_dict().items()}
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    ampatch.deactivate()  # as if in another process: state_dict() has the scales of all sessions

    saving = {"valid_loader": "train", "valid_metric": "loss", "minimize_valid_metric": True}
    Run().train(tmp_path / "first", opt_level, epochs=2, **saving)
    path = tmp_path / "first" / "checkpoints" / "last_full.pth"
    saved = torch.load(path)
    assert saved["amp"] == {"loss_scaler0": {"loss_scale": scale, "unskipped": 12}}
    weights = {name: saved["model_state_dict"][name] for name, _ in network().named_parameters()}
    assert {value.dtype for value in weights.values()} == {torch.float32}

    again = Run().train(tmp_path / "again", opt_level, epochs=2, resume=str(path), **saving)
    assert again.losses == whole.losses[12:]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": scale, "unskipped": 24}
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, finished[name]), name
