"""Averages of a half model's weights: in FP32, or a warning.

`torch.optim.swa_utils.AveragedModel` copies a managed model in FP32, as every copy is, and
would then be fed the half weights: rounded at best, refused for their dtype in most of its ways.  It
averages FP32 values here, of parts of a model too.  An average that is kept by hand in half
moves no more: its updates are smaller than what half can tell apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ..log import logger

MasterOf = Callable[[Tensor], "Tensor | None"]
HalfOf = Callable[[Tensor], "tuple[str, bool] | None"]
_HALF_TYPES = (torch.float16, torch.bfloat16)


def replacements(
    master_of: MasterOf, half_of: HalfOf
) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """`(owner, name, make)` of what to replace.

    `master_of` gives up to date masters, `half_of(tensor)` the name of a managed half parameter, or
    of the one whose memory it shares, and whether it has a master.
    """
    return [
        (AveragedModel, "update_parameters", lambda original: _update(original, master_of)),
        (AveragedModel, "__init__", lambda original: _init(original, master_of, half_of)),
    ]


def watched(half_of: HalfOf) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """As `replacements`: the functions that averages are written by hand with, watched.

    Optimizers call them too: only to be put in where there are half weights.
    """
    told: list[str] = []
    ways = [
        (torch.Tensor, "add_", lambda args, kwargs: kwargs.get("alpha", 1)),
        (torch.Tensor, "lerp_", lambda args, kwargs: args[1] if len(args) > 1 else 1),
        (torch, "_foreach_add_", lambda args, kwargs: kwargs.get("alpha", 1)),
        (torch, "_foreach_lerp_", lambda args, kwargs: args[1] if len(args) > 1 else 1),
    ]
    return [
        (owner, name, functools.partial(_watched, weight_of=weight_of, half_of=half_of, told=told))
        for owner, name, weight_of in ways
        if hasattr(owner, name)
    ]


def _update(original: Callable, master_of: MasterOf) -> Callable:
    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        original(self, _Widened(model, self.module, master_of))

    return update_parameters


def _init(original: Callable, master_of: MasterOf, half_of: HalfOf) -> Callable:
    """A part of a managed model is copied as it is: the copy of its half weights is widened."""

    @functools.wraps(original)
    def __init__(self: AveragedModel, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, model, *args, **kwargs)
        for copied, own in zip(self.module.parameters(), model.parameters(), strict=True):
            if copied.dtype in _HALF_TYPES and half_of(own) is not None:
                master = master_of(own)
                values = (own if master is None else master).detach()
                copied.data = values.to(copied.device, torch.float32, copy=True)

    return __init__


def _watched(
    original: Callable,
    *,
    weight_of: Callable[[tuple, dict], Any],
    half_of: HalfOf,
    told: list[str],
) -> Callable:
    def look(average: Tensor, args: tuple, kwargs: dict) -> None:
        weight = weight_of(args, kwargs)
        if isinstance(weight, float) and 0 < weight < 0.5:
            source = args[0][0] if type(args[0]) in (list, tuple) and args[0] else args[0]
            if isinstance(source, Tensor) and source.shape == average.shape:
                _tell(average, source, half_of, told)

    @functools.wraps(original)
    def update(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.dtype in _HALF_TYPES and args and not told:
            look(self, args, kwargs)
        return original(self, *args, **kwargs)

    @functools.wraps(original)
    def update_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        average = self[0] if type(self) in (list, tuple) and self else None
        if getattr(average, "dtype", None) in _HALF_TYPES and args and not told:
            look(average, args, kwargs)
        return original(self, *args, **kwargs)

    return update_all if original.__name__.startswith("_foreach") else update


def _tell(average: Tensor, source: Tensor, half_of: HalfOf, told: list[str]) -> None:
    found = half_of(source)
    _, has_master = half_of(average) or ("", False)
    if found is None or has_master:
        return
    name, _ = found
    told.append(name)
    logger.warning(
        "An average of %s is kept in %s, as its half weight is: updates of an average are smaller "
        "than what this type can tell apart, and vanish. Average FP32 values instead: those "
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
