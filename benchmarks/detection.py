"""torchvision's detectors, which call its own operators: RoIAlign and non-maximum suppression."""

from __future__ import annotations

from functools import partial

import torch
from tasks import FULL, TINY, Task
from torch import Tensor, nn


def detector(name: str, images: int, side: int, **sizes: int) -> Task:
    """A detector of 8 classes without pretrained weights, on images with two boxes each.

    In training the loss is the sum of the detector's losses; in evaluation the step is a forward
    alone, whose boxes are no loss.
    """
    from torchvision.models import detection  # only these models need torchvision

    make = getattr(detection, name)
    model = make(weights=None, weights_backbone=None, num_classes=8, **sizes)
    pictures = [torch.rand(3, side, side) for _ in range(images)]
    boxes = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.3, 0.2, 0.9, 0.8]]) * side
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(images)]

    def loss_of(modules: list[nn.Module]) -> Tensor:
        model = modules[0]
        if model.training:
            return torch.stack(list(model(pictures, targets).values())).sum()
        return model(pictures)[0]["scores"]

    return Task([model], [loss_of], images, "images")


TINY_IMAGES = {"images": 2, "side": 64, "min_size": 64, "max_size": 64}
DETECTORS = {
    "Faster R-CNN": {
        FULL: partial(detector, "fasterrcnn_resnet50_fpn", 8, 640),
        TINY: partial(detector, "fasterrcnn_mobilenet_v3_large_320_fpn", **TINY_IMAGES),
    },
    "RetinaNet": {
        FULL: partial(detector, "retinanet_resnet50_fpn", 8, 640),
        TINY: partial(detector, "retinanet_resnet50_fpn", **TINY_IMAGES),
    },
}
