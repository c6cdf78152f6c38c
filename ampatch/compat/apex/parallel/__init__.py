"""apex.parallel: torch's DistributedDataParallel and SyncBatchNorm under apex's names; LARC."""

from .distributed import DistributedDataParallel, Reducer
from .sync_batch_norm import SyncBatchNorm, convert_syncbn_model

__all__ = ["DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model"]
