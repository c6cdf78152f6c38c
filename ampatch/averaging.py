"""`torch.optim.swa_utils.AveragedModel` averages FP32 values at O2 and O3 too.

It copies a managed model in FP32, as every copy is, and would then be fed the
half weights: rounded at best, refused for their dtype in most of its ways.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

MasterOf = Callable[[Tensor], "Tensor | None"]


def replacement(master_of: MasterOf) -> tuple[Any, str, Callable[[Any], Any]]:
    """`(owner, name, make)` of the method to replace; `master_of` gives up to date masters."""

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def update_parameters(self: AveragedModel, model: nn.Module) -> None:
            original(self, _Widened(model, self.module, master_of))

        return update_parameters

    return AveragedModel, "update_parameters", make


class _Widened:
    """A model's parameters and buffers in the dtypes of its average, from masters if it has any."""

    def __init__(self, model: nn.Module, average: nn.Module, master_of: MasterOf) -> None:
        self._model = model
        self._average = average
        self._master_of = master_of

    def parameters(self) -> Iterator[Tensor]:
        return self._like(self._average.parameters(), self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return self._like(self._average.buffers(), self._model.buffers())

    def _like(self, averages: Iterable[Tensor], tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        averages = iter(averages)
        for tensor in tensors:  # each of them, so that the caller sees a count that does not fit
            master = self._master_of(tensor)
            value = tensor if master is None else master
            yield value.detach().to(next(averages, value).dtype)
