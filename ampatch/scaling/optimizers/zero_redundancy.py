"""`ZeroRedundancyOptimizer`: `Join` is refused, and buckets are rebuilt after casts.

Each rank updates one shard of the weights, and then torch sends the shard to the other ranks.  If
only one rank skipped a step, the other ranks would wait forever.  DistributedDataParallel averages
gradients, so an inf on one rank reaches all ranks.  But in `Join` some ranks have no gradients.
"""

from __future__ import annotations

from typing import Any

from ...errors import AmpatchError
from ...torch_private import optimizers


def refuse_join(optimizer: Any) -> None:
    """Raise `AmpatchError` inside `Join`, because a rank without data does not see an overflow."""
    if optimizers.is_in_join(optimizer):
        raise AmpatchError(
            "ZeroRedundancyOptimizer.step() in Join([...]) under a dynamic loss scale: a rank "
            "without data would make a step that the others skip. Nothing was changed. Use "
            "loss_scale=1.0, or dtype=torch.bfloat16."
        )


def rebuild_buckets(optimizer: Any) -> None:
    """Rebuild the optimizer's buckets, because the parameters may have new memory.

    Raises `AmpatchError` if the parameters have several dtypes, since a bucket holds one dtype.
    """
    if not (
        optimizers.is_zero_redundancy(optimizer)
        and getattr(optimizer, "parameters_as_bucket_view", False)
        and not optimizers.steps_in_backward(optimizer)
    ):
        return
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    if len(dtypes) > 1:
        raise AmpatchError(
            "ZeroRedundancyOptimizer(parameters_as_bucket_view=True) has parameters in "
            f"{', '.join(sorted(map(str, dtypes)))} at this opt level, and its buckets hold one "
            "dtype. Expected parameters_as_bucket_view=False, or a level with one dtype for all "
            "parameters that the optimizer was given: O0, O1 or O2."
        )
    optimizers.build_buckets(optimizer)
