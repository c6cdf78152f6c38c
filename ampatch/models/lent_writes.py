"""What a forward writes into lent copies of a model's weights goes to the weights.

In-place writes raise a copy's version.  Writes through `.data` raise none: who reads that of a copy
has its values noted there, and compared as the forward ends.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..log import logger
from ..torch_private.dtensors import local_of


class LentWrites:
    """Finds what a forward has written into the copies, and writes it into the weights."""

    def __init__(self) -> None:
        self._has_warned = False

    def carry(
        self,
        model: nn.Module,
        parameters: list[Tensor],
        copies: list[Tensor],
        versions: list[int],
        values: dict[int, Tensor],
    ) -> None:
        """Write into parameters what was written into copies that had these versions and values."""
        for parameter, copy, version in zip(parameters, copies, versions, strict=True):
            if copy._version != version:
                self._carry(model, copy, parameter)
        for index in _written_unseen(copies, values) if values else ():
            self._carry(model, copies[index], parameters[index])

    def _carry(self, model: nn.Module, copy: Tensor, parameter: Tensor) -> None:
        """Elements that were not written keep their FP32 values."""
        with torch.no_grad():
            same = parameter.to(copy.dtype) == copy
            parameter.copy_(torch.where(same, parameter, copy.to(parameter.dtype)))
        if not self._has_warned:
            self._has_warned = True
            names = [name for name, one in model.named_parameters() if one is parameter]
            logger.warning(
                "%s writes into its weights in its own forward (%s). At O2 it has half copies "
                "there: what is written is rounded to %s, and small changes, as of an average, are "
                "lost. Write outside of the forward, or keep that part in FP32: "
                'overrides={"name.*": "float"}.',
                type(model).__name__,
                names[0] if names else "a weight",
                copy.dtype,
            )


def _written_unseen(copies: list[Tensor], values: dict[int, Tensor]) -> list[int]:
    """Where copies differ from these values.  Waits once for the device."""
    home = next(iter(values.values())).device
    flags = [
        _differ(before, local_of(copies[index]).detach()).any().to(home)
        for index, before in values.items()
    ]
    return [index for index, flag in zip(values, torch.stack(flags).tolist()) if flag]


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise; a NaN equals any NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())
