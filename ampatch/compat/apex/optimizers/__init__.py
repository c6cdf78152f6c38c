"""apex.optimizers: apex's names, arguments and defaults, on torch's own optimizers and kernels.

On CUDA parameters Adam, SGD and Adagrad use torch's fused kernels.
"""

from ..fp16_utils import FP16_Optimizer
from .adam import FusedAdam
from .lamb import FusedLAMB, FusedMixedPrecisionLamb
from .novograd import FusedNovoGrad
from .sgd import FusedAdagrad, FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
