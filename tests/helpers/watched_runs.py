"""Runs of frameworks, and what was computed in which dtype and said meanwhile."""

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import framework_runs
import torch
from framework_runs import Plan, Run
from matrix_kernels import Kernels


@dataclass(frozen=True)
class Watched:
    run: Run
    kernels: set[torch.dtype]  # of what was multiplied
    weights: dict[str, set[torch.dtype]]  # in the model, by kind of layer
    said: list[str]  # warnings, and what was logged as one


def watched(framework: str, plan: Plan) -> Watched:
    run = importlib.import_module(f"runs_with_{framework}").run
    framework_runs.WEIGHTS_SEEN.clear()
    torch.manual_seed(0)
    # A driver may name the rank for its framework; the next framework's run must not find that.
    with mock.patch.dict(os.environ), _listening() as said, Kernels() as kernels:
        result = run(plan)
    weights: dict[str, set[torch.dtype]] = {}
    for layer, dtype in framework_runs.WEIGHTS_SEEN:
        weights.setdefault(layer, set()).add(dtype)
    said = [line.replace(str(plan.folder), "FOLDER") for line in said]
    return Watched(result, kernels.dtypes(), weights, said)


def watched_on_rank(rank: int, framework: str, plan: Plan) -> Watched:
    return watched(framework, plan)


@contextmanager
def _listening() -> Iterator[list[str]]:
    said: list[str] = []
    ear = _Ear(said)
    loggers = [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate
    ]
    for logger in (logging.root, *loggers):
        logger.addHandler(ear)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield said
    finally:
        for logger in (logging.root, *loggers):
            logger.removeHandler(ear)
        said += [f"{warning.category.__name__}: {warning.message}" for warning in warned]


class _Ear(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(f"{record.name}: {record.getMessage()}")
