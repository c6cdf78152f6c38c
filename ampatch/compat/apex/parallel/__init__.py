"""apex.parallel: torch's DistributedDataParallel and SyncBatchNorm under apex's names; LARC."""

from .distributed import DistributedDataParallel, Reducer, create_syncbn_process_group
from .sync_batch_norm import SyncBatchNorm, convert_syncbn_model

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
