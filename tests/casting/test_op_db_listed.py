"""PyTorch's own operators (`op_db`) that the tables list, against autocast and FP32.

Autocast for CUDA says which dtypes come out and which mixtures are refused:
inside a FakeTensorMode tensors may claim to be on CUDA.  Plain PyTorch in FP32
says which values and gradients.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from autocast_oracle import DRIVERLESS
from op_calls import (
    CALLS,
    COMPOSITES,
    OPS,
    Call,
    Raised,
    Sample,
    backward,
    groups,
    on_fake_cuda,
    outcome,
    same,
    samples,
    under_autocast,
)
from torch._subclasses.fake_tensor import DataDependentOutputException

import ampatch
from ampatch.casting.tables import BANNED, BLACKLIST, PROMOTE, WHITELIST, Rule
from ampatch.casting.tables import BEYOND as BEYOND_TABLE
from ampatch.diagnose.tables import differences

LISTED = [name for name in OPS if any(call.rules for call in CALLS[name])]
EXACT = {Rule.FLOAT, Rule.FLOAT_UNLESS_DTYPE, Rule.BANNED}
PROMOTES = {Rule.PROMOTE}
TOLERANCE = {torch.float16: 0.03, torch.bfloat16: 0.15}  # inputs up to 9 make steep softmaxes

LOW_RANK = {"svd_lowrank", "pca_lowrank", "linalg.pinv-singular"}
"""Products in half, then a decomposition in FP32: of other matrices than in FP32."""

REFUSED_MIXED = {
    "nn.functional.linear_cross_entropy-chunked",
    "nn.functional.linear_cross_entropy-chunked_none",
}
"""A custom operator that multiplies with `out=`, where autocast casts nothing.

Its fake version compares no dtypes.  (Targets of several dimensions go another way.)
"""

OURS_ALONE = {
    # Runs in FP32, with a warning.
    "nn.functional.binary_cross_entropy",
    # An inverse, in FP32.
    "linalg.matrix_power",
    # Singular values, in FP32.
    "linalg.matrix_norm",
    "linalg.norm",
    "linalg.norm-subgradients_at_zero",
    "norm-nuc",
}
"""Autocast refuses some half inputs that we take."""

WIDER = {
    "inner",  # beside a tensor of no dimension
    "linalg.matrix_power",  # with a negative exponent, after the inverse
    "sum_to_size",  # of a tensor that has the size
}
"""Autocast has half where our rule has FP32."""

ILL_CONDITIONED = {
    "nn.functional.multi_head_attention_forward",
    "nn.functional.grid_sample",
    *LOW_RANK,
}
"""A softmax of hundreds and a choice of the nearest pixel: one rounding, another result."""

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


def tried(name: str, limit: int | None, half: torch.dtype) -> Iterator[tuple[str, Call, Sample]]:
    """Each call of an operator on each sample in each mixture of dtypes, with a title."""
    for number, plain in enumerate(samples(OPS[name], torch.float32, limit)):
        for title, sample in variants(plain, half):
            for call in CALLS[name]:
                yield f"{name} as {call} on sample {number} in {title}", call, sample


def trials(name: str, limit: int | None, half: torch.dtype) -> Iterator[Trial]:
    for title, call, sample in tried(name, limit, half):
        theirs = under_autocast(call, sample, half) if has_oracle(call) else None
        if theirs is not None and not asks_the_driver(theirs):
            reference = outcome(call, sample.in_dtype(torch.float32))
            yield Trial(title, name, call, sample, theirs, reference)


def has_oracle(call: Call) -> bool:
    """Whether autocast for CUDA has the same rule: it has no part in what lies beyond it.

    The others are compared with autocast for the CPU, and at every level, in tests of their own.
    """
    others = {Rule.CONTRACTION, Rule.FLOAT_ON_CPU}
    return bool(call.rules) and not call.is_beyond and others.isdisjoint(call.rules)


def asks_the_driver(theirs: list | Raised) -> bool:
    """Builds for CUDA ask the driver for some functions, even of fake tensors."""
    return DRIVERLESS and isinstance(theirs, Raised) and "driver" in str(theirs.error)


def word(rules: set[Rule], sample: Sample, half: torch.dtype) -> torch.dtype:
    """The dtype that the rule of a call asks for."""
    if rules == {Rule.HALF}:
        return half
    if rules == {Rule.POWER} and sample.args[1] not in (0, 1):
        return torch.float32 if sample.args[1] < 0 else half
    dtypes = {tensor.dtype for tensor in sample.castable()}
    if rules <= PROMOTES | {Rule.POWER}:
        return dtypes.pop() if len(dtypes) == 1 else torch.float32
    assert rules <= EXACT | {Rule.FLOAT_ON_CPU}
    return torch.float32


def has_no_answer(autocast: list | Raised) -> bool:
    """Whether autocast asks for values, or for a GPU."""
    error = getattr(autocast, "error", None)
    return isinstance(error, DataDependentOutputException) or "support for cuda" in str(error)


def has_dtypes(outputs: list, trial: Trial, half: torch.dtype) -> bool:
    """Those of autocast; where it has no answer, or refuses, those of the rule."""
    if not isinstance(trial.autocast, Raised) and trial.name not in WIDER:
        return same(outputs, trial.autocast, values=False)
    wanted = word(trial.call.rules, trial.sample, half)
    return all(leaf.dtype is wanted for leaf in outputs if leaf.is_floating_point())


def is_refused(trial: Trial) -> bool:
    return isinstance(trial.autocast, Raised) and not has_no_answer(trial.autocast)


def near(new: list, old: list, tolerance: float) -> bool:
    """Within `tolerance` of the largest value of all; a tolerance of 0 asks for equality.

    What overflows a half dtype has to be infinite.
    """
    old = [y.to(x.dtype) for x, y in zip(new, old, strict=True)]
    new, old = ([leaf.detach().to_dense().double() for leaf in leaves] for leaves in (new, old))
    finite = [leaf[leaf.isfinite()].abs().amax() for leaf in old if leaf.isfinite().any()]
    room = tolerance * max((1.0, *finite))
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=room, equal_nan=True)
        for x, y in zip(new, old, strict=True)
    )


def brief(outputs: list | Raised) -> str:
    return repr(outputs) if isinstance(outputs, Raised) else str([leaf.dtype for leaf in outputs])


def complaint(trial: Trial, half: torch.dtype) -> str | None:
    outputs = outcome(trial.call, trial.sample.fresh())
    if isinstance(outputs, Raised):
        is_mixed = trial.title.endswith("in float, half")
        fits = is_refused(trial) or (is_mixed and trial.name in REFUSED_MIXED)
    else:
        may = not is_refused(trial) or trial.name in OURS_ALONE
        fits = may and has_dtypes(outputs, trial, half)
    if not fits:
        return f"{trial.title}: {brief(outputs)}, autocast has {brief(trial.autocast)}"
    if isinstance(outputs, Raised) or trial.name in ILL_CONDITIONED:
        return None
    is_near = near(outputs, trial.reference, tolerance(trial.name, trial.call, half))
    return None if is_near else f"{trial.title}: {outputs}, in FP32 {trial.reference}"


def check(trials: list[Trial], complaint: Callable, half: torch.dtype) -> None:
    """Open a session, and see that there is nothing to complain of."""
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    assert trials
    assert [text for trial in trials if (text := complaint(trial, half))] == []


def tolerance(name: str, call: Call, half: torch.dtype) -> float:
    """Nothing, if the rule is to compute in FP32."""
    return 0 if call.rules <= EXACT and name not in COMPOSITES else TOLERANCE[half]


@few_and_all
@pytest.mark.parametrize(
    "names", groups(name for name in LISTED if any(map(has_oracle, CALLS[name])))
)
def test_dtypes_are_autocasts_and_values_near_those_of_fp32(names, limit, half):
    """Mixtures of half and FP32 included, which raise only where autocast does."""
    check([trial for name in names for trial in trials(name, limit, half)], complaint, half)


def beyond(name: str, limit: int | None, half: torch.dtype) -> Iterator[Trial]:
    """Calls that autocast leaves as they are, in half and in two dtypes, and the same in FP32."""
    for title, call, sample in tried(name, limit, half):
        if call.is_beyond:
            reference = outcome(call, sample.in_dtype(torch.float32).fresh())
            yield Trial(title, name, call, sample, reference, reference)


def beyond_complaint(trial: Trial, half: torch.dtype) -> str | None:
    """What is wrong with a call that has to go on as in FP32, in the dtype that its rule says."""
    outputs = outcome(trial.call, trial.sample.fresh())
    if isinstance(outputs, Raised) or isinstance(trial.reference, Raised):
        both = isinstance(outputs, Raised) and isinstance(trial.reference, Raised)
        text = f"{trial.title}: {brief(outputs)}, in FP32 {brief(trial.reference)}"
        return None if both else text
    if trial.name in LOW_RANK:
        return None
    if Rule.LIKE_FIRST in trial.call.rules:
        expected = trial.sample.castable()[0].dtype
    else:
        expected = word(trial.call.rules, trial.sample, half)
    tensors = [leaf for leaf in outputs if leaf.is_floating_point()]
    if any(leaf.dtype is not expected for leaf in tensors):
        return f"{trial.title}: {brief(outputs)}, expected {expected}"
    room = 1e-3 if trial.call.rules <= EXACT else TOLERANCE[half]
    is_near = near(in_real(outputs), in_real(trial.reference), room)
    return None if is_near else f"{trial.title}: {outputs}, in FP32 {trial.reference}"


def in_real(outputs: list) -> list:
    """Complex tensors as pairs of numbers."""
    return [
        torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in outputs
    ]


BEYOND = [name for name in LISTED if any(call.is_beyond for call in CALLS[name])]


@few_and_all
@pytest.mark.parametrize("names", groups(BEYOND))
def test_what_lies_beyond_autocast_goes_on_as_in_fp32(names, limit, half):
    check([trial for name in names for trial in beyond(name, limit, half)], beyond_complaint, half)


@few_and_all
@pytest.mark.parametrize("names", groups(name for name in LISTED if OPS[name].supports_autograd))
def test_gradients_are_near_those_of_fp32_and_have_the_inputs_dtypes(names, limit, half):
    trials = []
    for name in names:
        for sample in samples(OPS[name], torch.float32, limit, requires_grad=True):
            call = CALLS[name][0]
            trials.append((name, call, sample, outcome(backward(call), sample.fresh())))
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    for name, call, sample, reference in trials:
        outputs = outcome(backward(call), sample.fresh())
        if isinstance(outputs, Raised):
            assert isinstance(reference, Raised), (name, outputs)
            continue
        assert [getattr(new, "dtype", None) for new in outputs] == [
            getattr(old, "dtype", None) for old in reference
        ], name
        pairs = [leaves for leaves in zip(outputs, reference, strict=True) if leaves[1] is not None]
        new, old = ([pair[side] for pair in pairs] for side in (0, 1))
        fits = near(new, old, tolerance(name, call, half))
        assert fits or name in ILL_CONDITIONED, (name, outputs, reference)


@few_and_all
@pytest.mark.parametrize("names", groups(OPS, 100))
def test_whatever_autocast_casts_is_listed(names, limit, half):
    """Where autocast gives other dtypes than plain PyTorch, there is a row."""
    missing = set()
    for name in names:
        for title, call, sample in tried(name, limit and 1, half):
            if call.rules or call.in_place or name in BELOW:
                continue
            without = on_fake_cuda(call, sample)
            if not same(under_autocast(call, sample, half), without, values=False):
                missing.add(title)
    assert missing == set()


TO_FP32 = EXACT | {Rule.FLOAT_ON_CPU, Rule.POWER}
NEEDLESS = {
    ("complex", torch.float16): "few functions take its results",
    ("view_as_complex", torch.float16): "few functions take its results",
    ("nn.functional.rrelu", torch.bfloat16): "it is for float16",
}
"""Rows that say there is no half kernel, whose operators PyTorch's first samples run in half."""
SINCE = {"sparse.sampled_addmm"}
"""What has a kernel in half on CUDA in some versions of torch, and is in FP32 in all of them."""


def lacks_half(name: str, limit: int | None, half: torch.dtype) -> bool:
    """Whether PyTorch refuses in half, on the CPU, what it takes in FP32."""
    call = CALLS[name][0]
    return any(
        not isinstance(outcome(call, sample.fresh()), Raised)
        and isinstance(outcome(call, sample.in_dtype(half)), Raised)
        for sample in samples(OPS[name], torch.float32, limit)
    )


@few_and_all
@pytest.mark.parametrize("names", groups(OPS, 100))
def test_what_has_no_half_kernel_goes_to_fp32_and_nothing_else_says_so(names, limit, half):
    """Where CUDA has a kernel in half, FP32 is for the CPU alone."""
    missing, needless, everywhere = set(), set(), set()
    for name in names:
        call, op = CALLS[name][0], OPS[name]
        if lacks_half(name, limit, half) and name not in BELOW:
            if not call.rules & TO_FP32:
                missing.add(name)
            elif says_so(call) and half in op.dtypesIfCUDA and Rule.FLOAT in call.rules:
                everywhere.add(name)
        elif says_so(call):
            needless.add((name, half))
    assert missing == everywhere - SINCE == set()
    assert limit is not None or needless - NEEDLESS.keys() == set()


def says_so(call: Call) -> bool:
    """Whether all rows of a call give the lack of a half kernel as their reason."""
    return bool(call.rows) and SAY_SO.issuperset(call.rows)


SAY_SO = {
    f"{row.where}.{name}"
    for row in BEYOND_TABLE
    for name in row.names
    if row.rule in TO_FP32 and row.why.startswith("PyTorch has")
}
BELOW = {"_upsample_bilinear2d_aa"}
"""Called as `torch.ops.aten`, below the functions that can be patched."""


HALF, OTHER_HALF = torch.float16, torch.bfloat16
SAID = {
    f"{row.where}.{name}": differences.from_autocast(row, False)
    for row in (*WHITELIST, *BLACKLIST, *PROMOTE, *BANNED)
    for name in row.names
    if not row.done_by_torch
}
UNSEEN = {f"{where}.{name}" for where in ("torch", "torch.Tensor") for name in ("cov", "corrcoef")}
"""The product inside is half: no dtype that comes out shows it."""
MATRIX_NORM = "torch.linalg.matrix_norm"
"""Autocast refuses half inputs that we take: test_op_db_listed.py."""


def mixtures_of_one_row() -> Iterator[tuple[str, Call, Sample]]:
    """Calls that meet one row, in FP32 and half in turns, in the other half, and in both."""
    for name, calls in CALLS.items():
        limit = 12 if name == "sum_to_size" else 4  # a late sample of it has its own size
        for call in (call for call in calls if len(call.rows) == 1 and not call.in_place):
            for sample in samples(OPS[name], torch.float32, limit) if call.rows[0] in SAID else ():
                for mixture in (
                    sample.in_dtype(OTHER_HALF),
                    *sample.mixed(HALF),
                    *sample.mixed(HALF, OTHER_HALF),
                ):
                    yield call.rows[0], call, mixture


def test_autocast_differs_where_we_say_so_and_nowhere_else():
    calls = list(mixtures_of_one_row())
    theirs = [under_autocast(call, sample, HALF) for _, call, sample in calls]
    ampatch.initialize([], opt_level="O1", dtype=HALF, patch_scope="process", verbosity=0)
    met, differing = {row for row, *_ in calls}, set()
    for (row, call, sample), expected in zip(calls, theirs, strict=True):
        if not same(on_fake_cuda(call, sample), expected, values=False):
            differing.add(row)
    assert differing - {MATRIX_NORM} == {row for row in met if SAID[row]} - UNSEEN
    assert len(met) > 150
