"""catalyst 21.12: `APEXEngine(device="cpu", apex_kwargs=...)` under a `SupervisedRunner`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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


class Losses(dl.Callback):
    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.external)
        self.seen = []

    def on_batch_end(self, runner) -> None:
        self.seen.append(runner.batch_metrics["loss"].item())


def test_training(opt_level, tmp_path):
    expected = float_losses(5)
    model = network()
    losses = Losses()
    runner = dl.SupervisedRunner()
    with Kernels() as kernels:
        runner.train(
            engine=dl.APEXEngine("cpu", apex_kwargs={"opt_level": opt_level}),
            model=model,
            criterion=torch.nn.CrossEntropyLoss(),
            optimizer=optimizer_of(model),
            loaders={"train": loader()},
            num_epochs=5,
            logdir=str(tmp_path),
            callbacks=[losses],
        )
    assert_falls(losses.seen)
    assert_close(losses.seen, expected, torch.float16)
    assert kernels.dtypes() == {torch.float16}
