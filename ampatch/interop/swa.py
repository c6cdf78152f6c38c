"""Averages of a half model's weights: in FP32, or with a warning.

`torch.optim.swa_utils.AveragedModel` copies a managed model in FP32, as every copy is.  Without
this replacement its updates would get the half weights: rounded values, which most averaging
functions refuse for their dtype.  With it they get FP32 values, also for a part of a model.  An
average that a script keeps in half does not move: its updates are smaller than the distance of two
half numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..casting.patches import Replacement
from ..log import logger
from ..torch_private.foreach import TORCH_NAMES

MasterOf = Callable[[Tensor], "Tensor | None"]
NameOf = Callable[[Tensor], "tuple[str, bool] | None"]
_HALF_TYPES = (torch.float16, torch.bfloat16)


def replacements(master_of: MasterOf, name_of: NameOf) -> list[Replacement]:
    """What to replace.

    `master_of(half)` gives the master of a half parameter, up to date, or None.  `name_of(tensor)`
    gives the name of the managed half parameter that a tensor is, or shares memory with, and
    whether it has a master; or None.
    """
    return [
        (AveragedModel, "update_parameters", lambda original: _update(original, master_of)),
        (AveragedModel, "__init__", lambda original: _init(original, master_of, name_of)),
    ]


def watched(name_of: NameOf) -> list[Replacement]:
    """What to replace to warn of averages in half: the functions that scripts write them with.

    Optimizers call these functions too, so they are replaced only where there are half weights.
    """
    warned: list[str] = []
    ways = [
        (torch.Tensor, "add_", lambda args, kwargs: kwargs.get("alpha", 1)),
        (torch.Tensor, "lerp_", lambda args, kwargs: args[1] if len(args) > 1 else 1),
        (torch, TORCH_NAMES["add_"], lambda args, kwargs: kwargs.get("alpha", 1)),
        (torch, TORCH_NAMES["lerp_"], lambda args, kwargs: args[1] if len(args) > 1 else 1),
    ]
    return [
        (
            owner,
            name,
            functools.partial(_watched, weight_of=weight_of, name_of=name_of, warned=warned),
        )
        for owner, name, weight_of in ways
        if hasattr(owner, name)
    ]


def _update(original: Callable, master_of: MasterOf) -> Callable:
    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        original(self, _Widened(model, self.module, master_of))

    return update_parameters


def _init(original: Callable, master_of: MasterOf, name_of: NameOf) -> Callable:
    """A part of a managed model is copied as it is: the copy of its half weights is widened."""

    @functools.wraps(original)
    def __init__(self: AveragedModel, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, model, *args, **kwargs)
        for copied, own in zip(self.module.parameters(), model.parameters(), strict=True):
            if copied.dtype in _HALF_TYPES and name_of(own) is not None:
                master = master_of(own)
                values = (own if master is None else master).detach()
                copied.data = values.to(copied.device, torch.float32, copy=True)

    return __init__


def _watched(
    original: Callable,
    *,
    weight_of: Callable[[tuple, dict], Any],
    name_of: NameOf,
    warned: list[str],
) -> Callable:
    def look(average: Tensor, args: tuple, kwargs: dict) -> None:
        weight = weight_of(args, kwargs)
        if isinstance(weight, float) and 0 < weight < 0.5:
            source = args[0][0] if type(args[0]) in (list, tuple) and args[0] else args[0]
            if isinstance(source, Tensor) and source.shape == average.shape:
                _warn(average, source, name_of, warned)

    @functools.wraps(original)
    def update(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype in _HALF_TYPES and args and not warned:
            look(self, args, kwargs)
        return original(self, *args, **kwargs)

    @functools.wraps(original)
    def update_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        average: Any = self[0] if type(self) in (list, tuple) and self else None
        if getattr(average, "dtype", None) in _HALF_TYPES and args and not warned:
            look(average, args, kwargs)
        return original(self, *args, **kwargs)

    return update_all if original.__name__ in TORCH_NAMES.values() else update


def _warn(average: Tensor, source: Tensor, name_of: NameOf, warned: list[str]) -> None:
    found = name_of(source)
    if found is None:  # an optimizer's own average of gradients, mostly
        return
    _, has_master = name_of(average) or ("", False)
    if has_master:
        return
    name, _ = found
    warned.append(name)
    logger.warning(
        "An average of %s is kept in %s, as its half weight is: updates of an average are smaller "
        "than this type can represent, and vanish. Average FP32 values instead: those "
        "of ampatch.master_params(optimizer) or model.state_dict(), into copy.deepcopy(model), or "
        "use torch.optim.swa_utils.AveragedModel(model).",
        name,
        average.dtype,
    )


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
