"""The messages about skipped steps: of the first ten and each doubling, and of many in a row."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ..log import logger
from .loss_scaler import Scaler
from .optimizer import ManagedOptimizer
from .scale_value import values
from .step_counts import News

_SHOWN = 5  # parameters named
_ENDS = 4  # scales shown from the beginning and from the end of a long history
_SEVERAL = 10  # skipped steps of which one in twenty is too many


def say(
    managed: ManagedOptimizer,
    news: News,
    scalers: list[Scaler],
    names: Callable[[], dict[int, str]],
) -> None:
    """Log the news of an optimizer's counter."""
    if news.is_due:
        is_bad = news.skipped >= _SEVERAL and 20 * news.skipped > news.steps
        advice = f" {_ADVICE}" if is_bad else ""
        level = logging.WARNING if is_bad else logging.INFO
        logger.log(level, "%s%s", overflow_note(managed, news, scalers), advice)
    if news.is_long_row:
        logger.error(skip_report(managed, names(), scalers))


_ADVICE = (
    "A healthy run skips a few steps while the scale comes down, and then about one in 2000. Look "
    "for batches with outliers, or with NaN in the data or the loss, lower the learning rate, or "
    'try dtype=torch.bfloat16, or overrides={"path.*": "float"} for the modules that overflow. '
    "ampatch.step_was_skipped(optimizer) tells which steps."
)


def overflow_note(managed: ManagedOptimizer, news: News, scalers: list[Scaler]) -> str:
    """Say which optimizer skipped, how often, and what became of the loss scale."""
    counts, kind = news.counts, type(managed.optimizer).__name__
    which = "a step was" if news.skipped == 1 else f"{news.skipped} of {news.steps} steps were"
    number = next((n for n, one in enumerate(scalers) if one is news.scaler), None)
    is_known = number is not None and news.scales
    moved = f" Loss scaler {number} {_history(news.scales)}." if is_known else ""
    return (
        f"Gradient overflow: {which} skipped ({kind}; {counts.skipped} of "
        f"{counts.taken + counts.skipped} since initialize).{moved}"
    )


def skip_report(managed: ManagedOptimizer, names: dict[int, str], scalers: list[Scaler]) -> str:
    """Name the first parameters with non-finite gradients, the scale's history, and what to try.

    `names` maps ids of the model's parameters to their module paths.  Waits for the device.
    """
    return (
        f"{managed.counter.read().skipped_in_a_row} steps of {type(managed.optimizer).__name__} "
        "in a row were skipped because gradients held inf or NaN. "
        f"First such gradients: {_offenders(managed, names)}. {_each(scalers)} "
        "At a small scale this is no overflow of float16 any more: look for a NaN in the data, "
        'the loss or the weights, or try dtype=torch.bfloat16, overrides={"path.*": "float"} for '
        'these modules, opt_level="O0" or a lower learning rate.'
    )


def _offenders(managed: ManagedOptimizer, names: dict[int, str]) -> str:
    bad = []
    for group, params in enumerate(group["params"] for group in managed.optimizer.param_groups):
        for index, param in enumerate(params):
            if param.grad is not None and not _is_finite(param.grad):
                bad.append(names.get(id(param)) or f"param_groups[{group}]['params'][{index}]")
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return (", ".join(bad[:_SHOWN]) + more) or "none here now (zeroed since, or on another rank)"


def _is_finite(grad: Tensor) -> bool:
    return bool(torch.isfinite(values(grad)).all())


def _each(scalers: list[Scaler]) -> str:
    """A sentence about the history of each loss scale."""
    several = len(scalers) > 1
    return " ".join(
        f"The loss scale{f' of loss {n}' if several else ''} {_history(scaler.history())}."
        for n, scaler in enumerate(scalers)
    )


def _history(scales: list[float]) -> str:
    shown = [f"{scale:g}" for scale in scales]
    if len(shown) > 2 * _ENDS:
        shown = [*shown[:_ENDS], "...", *shown[-_ENDS:]]
    return f"went {' -> '.join(shown)}" if len(shown) > 1 else f"is at {shown[0]}"
