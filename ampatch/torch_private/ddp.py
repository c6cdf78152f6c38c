"""What `DistributedDataParallel` keeps to itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from .dtensors import local_of


def store_of_ranks() -> Any:
    """The store by which the ranks found each other; None where this torch does not give it.

    The ranks of torch's fake backend do not exist, and their store refuses every call.
    """
    if torch.distributed.get_backend() == "fake":
        return None
    module = getattr(torch.distributed, "distributed_c10d", None)
    give = getattr(module, "_get_default_store", None)
    return None if give is None else give()


def parameters_of_ranks(model: nn.Module) -> list[Tensor]:
    """The parameters whose gradients DDP will average."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def pass_verification(group: Any, parameters: list[Tensor]) -> bool:
    """Take part in DDP's verification of shapes, in which each rank waits for all others.

    It raises torch's error where they differ.  False where this torch has it under another name.
    """
    verify = getattr(torch.distributed, "_verify_params_across_processes", None)
    if verify is None:
        return False
    group = torch.distributed.group.WORLD if group is None else group
    verify(group, [local_of(one) for one in parameters], None)
    return True
