"""`ZeroRedundancyOptimizer`: masters in all its places, and one decision of all ranks.

Each rank steps its own part of the masters with its own part of the optimizer's state, and then
sends these masters to the other ranks, in FP32, by torch's own code.  Every rank has all masters:
`state_dict()` of the model, which one rank alone may ask for, has their values, and so has
`deactivate()`.

A rank that left a step out while others make theirs would wait for them for ever.  Without
DistributedDataParallel ranks have gradients of their own, and in `Join` some have none, so the
ranks share the overflow flag at each step.
"""

from __future__ import annotations

from typing import Any

from ...errors import AmpatchError
from ...torch_private import zero_redundancy


def group_of(optimizer: Any) -> Any:
    """The process group whose ranks step together; None for another optimizer."""
    return optimizer.process_group if zero_redundancy.is_zero(optimizer) else None


def takes_masters(optimizer: Any) -> bool:
    """Whether an optimizer's places for parameters are known; other optimizers' always are."""
    return not zero_redundancy.is_zero(optimizer) or zero_redundancy.takes_other_parameters(
        optimizer
    )


def forget_keys(optimizer: Any) -> None:
    """Its parameters are about to be exchanged: tables with them as keys are made anew."""
    if zero_redundancy.is_zero(optimizer):
        zero_redundancy.forget_parameters(optimizer)


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
    """Its parameters, or their memory, may be others than before: its buckets hold them again.

    Raises `AmpatchError` if buckets cannot hold them.
    """
    if not getattr(optimizer, "parameters_as_bucket_view", False):
        return
    if not zero_redundancy.is_zero(optimizer) or zero_redundancy.steps_in_backward(optimizer):
        return
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    if len(dtypes) > 1:
        named = ", ".join(sorted(map(str, dtypes)))
        raise AmpatchError(
            "ZeroRedundancyOptimizer(parameters_as_bucket_view=True) has parameters in "
            f"{named} at this opt level, and its buckets hold one dtype. Expected "
            "parameters_as_bucket_view=False, or a level with one dtype for all parameters that "
            "the optimizer was given: O0, O1, or O2 without frozen weights."
        )
    zero_redundancy.build_buckets(optimizer)
