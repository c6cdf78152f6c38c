"""`ZeroRedundancyOptimizer`: one decision of all ranks.

Each rank steps its own part of the weights with its own part of the optimizer's state, and then
sends them to the other ranks, by torch's own code.  A rank that left a step out while others make
theirs would wait for them for ever.  Without DistributedDataParallel ranks have gradients of their
own, and in `Join` some have none, so the ranks share the overflow flag at each step.
"""

from __future__ import annotations

from typing import Any

from ...errors import AmpatchError
from ...torch_private import zero_redundancy


def group_of(optimizer: Any) -> Any:
    """The process group whose ranks step together; None for another optimizer."""
    return optimizer.process_group if zero_redundancy.is_zero(optimizer) else None


def refuse_lead(optimizer: Any) -> None:
    """Raise `AmpatchError` where the ranks are asked only later who of them still has data."""
    if zero_redundancy.leads_join(optimizer):
        raise AmpatchError(
            "ZeroRedundancyOptimizer.step(): this optimizer is the first in Join([...]), and under "
            "a dynamic loss scale its ranks share a flag before Join asks who still has data. "
            "Expected the DistributedDataParallel model first: Join([model, optimizer]); or "
            "loss_scale=1.0."
        )


def settle(optimizer: Any) -> None:
    """Its parameters may have other memory than before: its buckets hold them again.

    Raises `AmpatchError` if buckets cannot hold them.
    """
    if not (
        zero_redundancy.is_zero(optimizer)
        and getattr(optimizer, "parameters_as_bucket_view", False)
        and not zero_redundancy.steps_in_backward(optimizer)
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
    zero_redundancy.build_buckets(optimizer)
