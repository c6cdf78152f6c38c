"""timm: `ApexScaler` with every way of clipping, `CheckpointSaver`, `resume_checkpoint`, and the
optimizers it takes from `apex.optimizers`, in the order of timm's own train.py.

torchvision, which timm imports, comes from the package index built for CUDA. Beside a torch
without CUDA its library of operators does not load, and its import stops at the first operator it
misses. Their names are declared here in that case; nothing in these tests calls them.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from apex import amp
from matrix_kernels import Kernels
from small_task import (
    CLASSES,
    assert_close,
    assert_falls,
    float_losses,
    half_parameters,
    optimizer_of,
)

if torch.version.cuda is None:
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from timm.models import resume_checkpoint
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.utils import ApexScaler, CheckpointSaver, dispatch_clip_grad


def transformer() -> VisionTransformer:
    """Two blocks on images of 8 x 8, four patches each."""
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=CLASSES
    )


def _images(batches: int = 4, rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(batches):
        targets = torch.randint(CLASSES, (rows,), generator=generator)
        channel = 4.0 * F.one_hot(targets, 3)[:, :, None, None]  # a class is a colour
        found.append((channel + torch.randn(rows, 3, 8, 8, generator=generator), targets))
    return found


IMAGES = _images()


class Run:
    """What timm's train.py makes before its loop."""

    def __init__(self, opt_level: str, optimizer: str | None = None, lr: float = 0.0) -> None:
        model = transformer()
        if optimizer is None:
            chosen = optimizer_of(model)
        else:
            with pytest.MonkeyPatch.context() as patch:  # timm: "CUDA required for APEX optimizers"
                patch.setattr(torch.cuda, "is_available", lambda: True)
                chosen = create_optimizer_v2(model, opt=optimizer, lr=lr, weight_decay=0.01)
        self.model, self.optimizer = amp.initialize(model, chosen, opt_level=opt_level, verbosity=0)
        amp._amp_state.loss_scalers[0]._loss_scale = 1024.0  # does not overflow
        self.scaler = ApexScaler()
        self.losses: list[float] = []

    def train(self, epochs: int, **clipping) -> None:
        for _ in range(epochs):
            for inputs, targets in IMAGES:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(inputs), targets)
                parameters = self.model.parameters()
                self.scaler(loss, self.optimizer, parameters=parameters, **clipping)
                self.losses.append(loss.item())


@pytest.fixture(params=["float16", "bfloat16"])
def half(request, monkeypatch) -> torch.dtype:
    monkeypatch.setenv("AMPATCH_DTYPE", request.param)
    return getattr(torch, request.param)


def test_training(opt_level, half):
    expected = float_losses(6, transformer, IMAGES)
    run = Run(opt_level)
    with Kernels() as kernels:
        run.train(6)
    assert_falls(run.losses)
    assert_close(run.losses, expected, half)
    assert kernels.dtypes() == {half}
    assert half_parameters(run.model, half) == []


@pytest.mark.parametrize("mode, bound", [("norm", 0.5), ("value", 0.01), ("agc", 0.01)])
def test_clipping(opt_level, mode, bound):
    """The step sees the gradients that timm clips in FP32, not their multiples by the scale."""
    expected = float_losses(
        4, transformer, IMAGES, clip=lambda params: dispatch_clip_grad(params, bound, mode)
    )
    unclipped = float_losses(4, transformer, IMAGES)
    run = Run(opt_level)
    run.train(4, clip_grad=bound, clip_mode=mode)
    assert_close(run.losses, expected, torch.float16)
    assert max(abs(a - b) for a, b in zip(expected, unclipped, strict=True)) > 0.1


def test_accumulation(opt_level):
    """`need_update=False` leaves the step to a later call."""
    run = Run(opt_level)
    before = copy.deepcopy(run.model.state_dict())
    loss = F.cross_entropy(run.model(IMAGES[0][0]), IMAGES[0][1])
    run.scaler(loss, run.optimizer, need_update=False)
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    run.scaler(F.cross_entropy(run.model(IMAGES[1][0]), IMAGES[1][1]), run.optimizer)
    assert not torch.equal(before["head.weight"], run.model.state_dict()["head.weight"])


def test_resuming_goes_on_bit_for_bit(opt_level, tmp_path):
    whole = Run(opt_level)
    saver = CheckpointSaver(
        whole.model, whole.optimizer, amp_scaler=whole.scaler, checkpoint_dir=str(tmp_path)
    )
    whole.train(2, clip_grad=1.0)
    saver.save_checkpoint(epoch=1, metric=0.0)
    saved = torch.load(tmp_path / "last.pth.tar")
    assert saved["amp"] == {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 8}}
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    whole.train(2, clip_grad=1.0)

    torch.manual_seed(9)  # whatever the new model starts from is replaced
    again = Run(opt_level)
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0
    resume_checkpoint(again.model, str(tmp_path / "last.pth.tar"), again.optimizer, again.scaler)
    assert amp._amp_state.loss_scalers[0]._loss_scale == 1024.0
    again.train(2, clip_grad=1.0)
    assert again.losses == whole.losses[8:]
    finished = whole.model.state_dict()
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, finished[name]), name


RATES = {
    "fusedsgd": 0.05,
    "fusedadam": 0.01,
    "fusedadamw": 0.01,
    "fusedlamb": 0.15,
    "fusednovograd": 0.05,
}


@pytest.mark.parametrize("name", RATES)
def test_optimizers_from_apex(opt_level, name):
    run = Run(opt_level, optimizer=name, lr=RATES[name])
    assert type(run.optimizer).__module__.startswith("ampatch.compat.apex")
    run.train(6)
    assert_falls(run.losses)
