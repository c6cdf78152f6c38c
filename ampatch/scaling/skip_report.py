"""The messages about skipped steps: many in a row, many of the last ones, and a sum at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..log import logger
from .loss_scaler import Scaler
from .optimizer import ManagedOptimizer
from .scale_value import values
from .step_counts import News, StepCounter

_SHOWN = 5  # parameters named
_ENDS = 4  # scales shown from the beginning and from the end of a long history


class SkipReports:
    """What one session says of skipped steps: while it trains, and once when that is over."""

    def __init__(self, growth_interval: int) -> None:
        self._growth_interval = growth_interval
        self._counters: list[tuple[str, StepCounter]] = []  # they outlive their optimizers

    def follow(self, managed: ManagedOptimizer) -> None:
        """An optimizer joins the session."""
        self._counters.append((type(managed.optimizer).__name__, managed.counter))

    def report(
        self, managed: ManagedOptimizer, news: News, names: dict[int, str], scalers: list[Scaler]
    ) -> None:
        """Log the news of an optimizer's counter."""
        if news.in_a_row:
            logger.error(skip_report(managed, names, scalers))
        else:
            logger.warning(rate_report(managed, news, scalers))

    def close(self) -> None:
        """The session closes, its objects are gone, or the process ends."""
        counters, self._counters = self._counters, []
        for kind, counter in counters:
            said = closing_report(kind, counter, self._growth_interval)
            if said is not None:
                logger.warning(said)


def skip_report(managed: ManagedOptimizer, names: dict[int, str], scalers: list[Scaler]) -> str:
    """Name the first parameters with non-finite gradients, the scale's history, and what to try.

    `names` maps ids of the model's parameters to their module paths.  Waits for the device.
    """
    return (
        f"{managed.counter.read().skipped_in_a_row} steps of {type(managed.optimizer).__name__} "
        "in a row were skipped because gradients held inf or NaN. "
        f"First such gradients: {_offenders(managed, names)}. {_each(scalers, _history)} "
        "At a small scale this is no overflow of float16 any more: look for a NaN in the data, "
        'the loss or the weights, or try dtype=torch.bfloat16, overrides={"path.*": "float"} for '
        'these modules, opt_level="O0" or a lower learning rate.'
    )


def rate_report(managed: ManagedOptimizer, news: News, scalers: list[Scaler]) -> str:
    """Say how many of the last steps were skipped, where the scale was meanwhile, and what to try.

    Waits for the device.
    """
    counts = managed.counter.read()
    return (
        f"{news.skipped} of the last {news.steps} steps of {type(managed.optimizer).__name__} were "
        f"skipped because gradients held inf or NaN ({counts.skipped} of "
        f"{counts.skipped + counts.taken} since initialize). {_each(scalers, _range)} "
        "A healthy run skips a few steps while the scale comes down, and then about one in 2000. "
        "Look for batches with outliers, or with NaN in the data or the loss, lower the learning "
        'rate, or try dtype=torch.bfloat16, or overrides={"path.*": "float"} for the modules that '
        "overflow. ampatch.step_was_skipped(optimizer) tells which steps."
    )


def closing_report(kind: str, counter: StepCounter, growth_interval: int) -> str | None:
    """How many steps of an optimizer of a `kind` were skipped, at the end; None: hardly any.

    Those in front of the first taken one, while the scale comes down, and those by which a
    growing scale finds its limit are as they should be.  Waits for the device.
    """
    skipped = counter.skipped_in_training()
    counts = counter.read()
    steps = counts.taken + counts.skipped
    if skipped <= steps * 2 // growth_interval:
        return None
    return (
        f"{counts.skipped} of {steps} steps of {kind} were skipped because gradients held inf or "
        f"NaN, {skipped} of them after the loss scale was found at first."
        if counts.taken
        else f"All {steps} steps of {kind} were skipped because gradients held inf or NaN."
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


def _each(scalers: list[Scaler], say: Callable[[list[float]], str]) -> str:
    """A sentence about the history of each loss scale."""
    return " ".join(
        f"The loss scale{f' of loss {number}' if len(scalers) > 1 else ''} {say(scaler.history())}."
        for number, scaler in enumerate(scalers)
    )


def _range(scales: list[float]) -> str:
    return f"went between {min(scales):g} and {max(scales):g} and is {scales[-1]:g}"


def _history(scales: list[float]) -> str:
    shown = [f"{scale:g}" for scale in scales]
    if len(shown) > 2 * _ENDS:
        shown = [*shown[:_ENDS], "...", *shown[-_ENDS:]]
    return f"went {' -> '.join(shown)}"
