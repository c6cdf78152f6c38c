"""torchvision's detectors, which call operators with kernels of their own, on a small backbone."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

import ampatch
from ampatch import auto

H = torch.bfloat16
SIZE = {"min_size": 32, "max_size": 48}
IMAGES = [torch.rand(3, 32, 40, generator=torch.Generator().manual_seed(n)) for n in range(2)]


class Backbone(nn.Module):
    out_channels = 32

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 4, 1), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, x):
        return {"0": self.body(x)}


def anchors():
    return AnchorGenerator(((8, 16),), ((0.5, 1.0),))


def of_regions(kind, **heads):
    pools = {
        name: MultiScaleRoIAlign(["0"], size, 2)
        for name, size in {"box_roi_pool": 3, **heads}.items()
    }
    proposals = {"rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20}
    return kind(
        Backbone(), num_classes=2, rpn_anchor_generator=anchors(), **pools, **proposals, **SIZE
    )


def one_stage(kind):
    anchors = AnchorGenerator(((8,),), ((1.0,),))
    return kind(Backbone(), num_classes=2, anchor_generator=anchors, score_thresh=0.0, **SIZE)


def ssd():
    backbone = Backbone()
    backbone.out_channels = [32]
    return SSD(backbone, DefaultBoxGenerator([[2]]), (32, 32), 2, score_thresh=0.0)


DETECTORS = {
    "Faster R-CNN": lambda: of_regions(detection.FasterRCNN),
    "Mask R-CNN": lambda: of_regions(detection.MaskRCNN, mask_roi_pool=4),
    "Keypoint R-CNN": lambda: of_regions(detection.KeypointRCNN, keypoint_roi_pool=4),
    "FCOS": lambda: one_stage(detection.FCOS),
    "RetinaNet": lambda: one_stage(detection.RetinaNet),
    "SSD": ssd,
}


def targets():
    boxes = torch.tensor([[5.3, 6.1, 20.7, 24.2], [10.1, 2.9, 30.6, 25.4]])
    points = torch.tensor([[[9.0, 9.0, 1.0]] * 17, [[20.0, 12.0, 1.0]] * 17])
    masks = torch.ones(2, 32, 40, dtype=torch.uint8)
    labels = torch.tensor([1, 1])
    return [
        {"boxes": boxes.clone(), "labels": labels, "masks": masks, "keypoints": points}
        for _ in IMAGES
    ]


def ran(detector, level):
    """The losses of two steps and the scores of an evaluation."""
    around, automatic = contextlib.nullcontext, None
    if level == "auto":
        automatic = auto.start({"dtype": H})
    torch.manual_seed(0)
    model = DETECTORS[detector]().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if level == "autocast":
        around = lambda: torch.autocast("cpu", H)  # noqa: E731
    elif automatic is None:
        ampatch.initialize(model, optimizer, opt_level=level, dtype=H, verbosity=0)
    losses, labels = [], targets()
    for step in range(2):
        torch.manual_seed(step)  # regions are sampled
        with around():
            loss = sum(model(IMAGES, labels).values())
        optimizer.zero_grad()
        if level in ("autocast", "auto"):
            loss.backward()
        else:
            with ampatch.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(labels, targets()))
    with torch.no_grad(), around():
        detections = model.eval()(IMAGES)
    ampatch.deactivate()
    return losses, [detection["scores"].float() for detection in detections]


@functools.cache
def under_autocast(detector):
    return ran(detector, "autocast")


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("detector", DETECTORS)
def test_a_detector_trains_and_detects_as_under_autocast(detector, level):
    losses, scores = under_autocast(detector)
    actual, scores_found = ran(detector, level)
    assert actual == pytest.approx(losses, rel=0.1)
    for expected, actual_scores in zip(scores, scores_found, strict=True):
        assert abs(len(expected) - len(actual_scores)) <= 0.3 * len(expected) + 2
        if len(expected) and len(actual_scores):
            assert actual_scores.max().item() == pytest.approx(expected.max().item(), abs=0.05)
