"""PyTorch's own operators (`op_db`) that the tables list, against autocast and FP32.

Autocast for CUDA says which dtypes come out and which mixtures are refused:
inside a FakeTensorMode tensors may claim to be on CUDA.  Plain PyTorch in FP32
says which values and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from op_calls import (
    CALLS,
    CASTABLE,
    OPS,
    Call,
    Raised,
    Sample,
    backward,
    groups,
    outcome,
    same,
    samples,
    under_autocast,
)
from op_composites import COMPOSITES
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

import ampatch
from ampatch.casting.tables import Rule

LISTED = [name for name in OPS if any(call.rules for call in CALLS[name])]
EXACT = {Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE, Rule.BANNED}
TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.1}

REFUSED_IN_HALF = {"svd_lowrank", "pca_lowrank", "linalg.pinv-singular"}
"""Products in half, then a decomposition that PyTorch has in no half type, on no device.

Fake tensors do not know all of that, and pass.
"""

NO_CUDA_HERE = {"nn.functional.grid_sample"}
"""Its autocast kernel asks for a real CUDA device."""

OURS_ALONE = {
    # Run in FP32, with a warning; autocast refuses (README).
    "nn.functional.binary_cross_entropy",
    # torch.norm by name of a norm; autocast knows torch.linalg.norm only, and refuses half.
    "norm-nuc",
}

few_and_all = pytest.mark.parametrize(
    "limit, half",
    [
        pytest.param(2, torch.float16, id="few"),
        pytest.param(None, torch.float16, id="all-fp16", marks=pytest.mark.slow),
        pytest.param(None, torch.bfloat16, id="all-bf16", marks=pytest.mark.slow),
    ],
)


class Trial(NamedTuple):
    """A listed call, what autocast makes of it, and its results in FP32."""

    title: str
    name: str
    call: Call
    sample: Sample
    autocast: list | Raised
    reference: list | Raised


def variants(sample: Sample, half: torch.dtype) -> Iterator[tuple[str, Sample]]:
    yield "float", sample
    yield "half", sample.in_dtype(half)
    for number, mixed in enumerate(sample.mixed(half)):
        yield ("half, float", "float, half")[number], mixed


def trials(name: str, limit: int | None, half: torch.dtype) -> Iterator[Trial]:
    for number, plain in enumerate(samples(OPS[name], torch.float32, limit)):
        for title, sample in variants(plain, half):
            for call in CALLS[name]:
                if call.rules:
                    yield Trial(
                        f"{name} as {call} on sample {number} in {title}",
                        name,
                        call,
                        sample,
                        under_autocast(call, sample, half),
                        outcome(call, sample.in_dtype(torch.float32)),
                    )


def word(rules: set[Rule], sample: Sample, half: torch.dtype) -> torch.dtype:
    """The dtype that the rule of a call asks for."""
    if rules == {Rule.HALF}:
        return half
    if rules == {Rule.PROMOTE}:
        given = {tensor.dtype for tensor in sample.castable()}
        return given.pop() if len(given) == 1 else torch.float32
    assert rules <= EXACT
    return torch.float32


def has_dtypes(found: list, trial: Trial, half: torch.dtype) -> bool:
    """Those of autocast; where it has no answer without a GPU, or refuses, those of the rule."""
    answer = trial.autocast
    if not isinstance(answer, Raised):
        return same(found, answer, values=False)
    wanted = word(trial.call.rules, trial.sample, half)
    return all(leaf.dtype is wanted for leaf in found if leaf.is_floating_point())


def may_raise(trial: Trial) -> bool:
    if trial.name in REFUSED_IN_HALF:
        return True
    error = getattr(trial.autocast, "error", None)
    known = isinstance(error, DataDependentOutputException) or trial.name in NO_CUDA_HERE
    return error is not None and not known


def near(new: list, old: list, tolerance: float) -> bool:
    """Each tensor within `tolerance` of its largest value; a tolerance of 0 asks for equality."""
    return len(new) == len(old) and all(
        _near(one, other, tolerance) if isinstance(other, Tensor) else one == other
        for one, other in zip(new, old, strict=True)
    )


def _near(new: Tensor | None, old: Tensor, tolerance: float) -> bool:
    if new is None or new.shape != old.shape:
        return False
    new, old = new.detach().double(), old.detach().double()
    largest = old[old.isfinite()].abs().amax() if old.isfinite().any() else 0.0
    return torch.allclose(new, old, rtol=0, atol=tolerance * max(1.0, largest), equal_nan=True)


def complaint(trial: Trial, half: torch.dtype) -> str | None:
    found = outcome(trial.call, trial.sample.fresh())
    if isinstance(found, Raised):
        return None if may_raise(trial) else f"{trial.title}: {found}, not {trial.autocast}"
    if may_raise(trial) and trial.name not in OURS_ALONE:
        return f"{trial.title}: not refused as in autocast, {trial.autocast}"
    if not has_dtypes(found, trial, half):
        return f"{trial.title}: {[leaf.dtype for leaf in found]}, not {trial.autocast}"
    exact = trial.call.rules <= EXACT and trial.name not in COMPOSITES
    if not near(found, trial.reference, 0 if exact else TOLERANCE[half]):
        return f"{trial.title}: {found}, not {trial.reference}"
    return None


@few_and_all
@pytest.mark.parametrize("names", groups(LISTED))
def test_dtypes_are_autocasts_and_values_near_those_of_fp32(names, limit, half):
    """Mixtures of half and FP32 included, which raise only where autocast does."""
    made = [trial for name in names for trial in trials(name, limit, half)]
    ampatch.initialize(torch.nn.Linear(2, 2), opt_level="O1", dtype=half, verbosity=0)
    assert [text for trial in made if (text := complaint(trial, half))] == []
    assert made


@few_and_all
@pytest.mark.parametrize("names", groups(name for name in LISTED if OPS[name].supports_autograd))
def test_gradients_are_near_those_of_fp32_and_have_the_inputs_dtypes(names, limit, half):
    made = []
    for name in names:
        for sample in samples(OPS[name], torch.float32, limit, requires_grad=True):
            call = CALLS[name][0]
            made.append((name, call, sample, outcome(backward(call), sample.fresh())))
    ampatch.initialize(torch.nn.Linear(2, 2), opt_level="O1", dtype=half, verbosity=0)
    for name, call, sample, reference in made:
        found = outcome(backward(call), sample.fresh())
        if isinstance(found, Raised):
            assert name in REFUSED_IN_HALF, (name, found)
            continue
        wanted = [None if old is None else old.dtype for old in reference]
        assert [None if new is None else new.dtype for new in found] == wanted, name
        exact = call.rules <= EXACT and name not in COMPOSITES
        tolerance = 0 if exact else TOLERANCE[half]
        given = [(new, old) for new, old in zip(found, reference, strict=True) if old is not None]
        assert near([new for new, _ in given], [old for _, old in given], tolerance), (
            name,
            found,
            reference,
        )
