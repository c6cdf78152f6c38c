"""Import this before timm: it needs torchvision, which the package index has built for CUDA.

Beside a torch without CUDA torchvision's library of operators does not load, and its import stops
at the first operator that it misses.  Their names are declared here in that case; nothing in the
tests calls them.
"""

from __future__ import annotations

import torch

if torch.version.cuda is None:
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
