"""PyTorch's own operators (`op_db`), where nothing may change: the oracle is plain PyTorch.

Every way to reach an operator (function, method, in-place, operator sign,
alias) is called without and with an O1 session, on the samples that PyTorch
tests it with, and everything must be the same bit for bit: calls in no table
in any dtype, listed calls in the dtypes that no rule touches, calls with
`out=`, and the errors that PyTorch expects.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from op_calls import (
    CALLS,
    CASTABLE,
    COMPOSITES,
    MANY,
    OPS,
    RULE_OF,
    Call,
    Raised,
    Sample,
    backward,
    groups,
    look_up,
    outcome,
    plain_sample,
    quietly,
    rules_of,
    same,
    samples,
    under_autocast,
)
from torch import Tensor

import ampatch

FEW_DTYPES = (torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool, torch.float16)
ALL_DTYPES = (
    *FEW_DTYPES,
    torch.bfloat16,
    torch.complex128,
    torch.complex32,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
)
NO_FIXED_VALUES = {
    # Whatever was in memory.
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "resize_", "resize_as_",
    # LAPACK's gelsy: its last bits depend on where in memory the input lies.
    "linalg.lstsq", "linalg.lstsq-grad_oriented",
}  # fmt: skip

few_and_all = pytest.mark.parametrize(
    "limit, tried",
    [
        pytest.param(2, FEW_DTYPES, id="few"),
        pytest.param(None, ALL_DTYPES, id="all", marks=pytest.mark.slow),
    ],
)


class Trial(NamedTuple):
    """A call, and what plain PyTorch makes of it."""

    title: str
    call: Callable
    sample: Sample
    plain: list | Raised


def trial(title: str, call: Callable, sample: Sample) -> Trial:
    return Trial(title, call, sample, outcome(call, sample.fresh()))


def check(trials: list[Trial]) -> None:
    """Open a session, and see that nothing has changed."""
    ampatch.initialize([], opt_level="O1", patch_scope="process", verbosity=0)
    assert trials, "nothing was tried"
    changed = []
    for title, call, sample, plain in trials:
        now = outcome(call, sample.fresh())
        if not same(now, plain, title.split()[0] not in NO_FIXED_VALUES):
            changed.append(f"{title}: {plain}\nnow {now}")
    assert changed == []


def untouched(name: str, limit: int | None, tried: tuple) -> Iterator[Trial]:
    """The calls to which no rule applies, mixed dtypes included."""
    for dtype in tried:
        ways = [call for call in CALLS[name] if not call.is_touched(dtype)]
        for number, sample in enumerate(samples(OPS[name], dtype, limit)):
            titled = [(str(dtype), sample)]
            if dtype is torch.float32:
                titled += [("mixed", mixed) for mixed in sample.mixed(torch.float16)]
            for title, arguments in titled:
                for call in ways:
                    yield trial(f"{name} as {call} on {title} {number}", call, arguments)


@few_and_all
@pytest.mark.parametrize("names", groups(OPS))
def test_what_no_rule_touches_is_bit_identical(names, limit, tried):
    check([trial for name in names for trial in untouched(name, limit, tried)])


def differentiated(name: str, limit: int | None) -> Iterator[Trial]:
    """The gradients of what no rule touches."""
    call = CALLS[name][0]
    for dtype in (torch.float32, torch.float64, torch.complex64):
        if not call.is_touched(dtype):
            inputs = samples(OPS[name], dtype, limit, requires_grad=True)
            for number, sample in enumerate(inputs):
                yield trial(f"{name} backward on {dtype} {number}", backward(call), sample)


@few_and_all
@pytest.mark.parametrize("names", groups(name for name in OPS if OPS[name].supports_autograd))
def test_its_gradients_are_bit_identical(names, limit, tried):
    check([trial for name in names for trial in differentiated(name, limit)])


def test_no_public_function_of_these_kinds_is_missing_in_the_database():
    """A function that a newer torch has is met by some test, or shows here."""
    known = {info.name for op in OPS.values() for info in (op, *op.aliases)}
    known |= {"special.gammainc", "special.gammaincc"}  # as torch.igamma and torch.igammac
    wanted = {
        f"{module.__name__.removeprefix('torch.')}.{name}"
        for module in (torch.linalg, torch.special, torch.nn.functional)
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("_")
        if module is not torch.nn.functional or name.endswith("_loss") or "entropy" in name
    }
    assert len(wanted) > 110 and wanted - known == set()


TAKES_NO_OUT = {"_batch_norm_with_update", "histogramdd"}
"""`op_db` says otherwise."""

WITH_OUT = [name for name, op in OPS.items() if op.supports_out]


def writing(call: Call, sample: Sample, dtype: torch.dtype) -> Callable | None:
    """`call` with an `out=` of zeros, floating ones in `dtype`; returns what was written too."""
    results = outcome(call, sample.fresh())
    if isinstance(results, Raised) or not all(isinstance(leaf, Tensor) for leaf in results):
        return None

    def write(*args: Any, **kwargs: Any) -> Any:
        rooms = tuple(
            torch.zeros_like(leaf, dtype=dtype if leaf.dtype in CASTABLE else None)
            for leaf in results
        )
        return rooms, call(*args, **kwargs, out=rooms if len(rooms) > 1 else rooms[0])

    return write


def written(name: str, limit: int | None) -> Iterator[Trial]:
    """Calls with `out=`, of the dtype of the result and of others."""
    for dtype in (torch.float32, torch.float16, torch.complex64):
        if name in CASTS_BEFORE_OUT and dtype is torch.float16:
            continue
        for number, sample in enumerate(samples(OPS[name], dtype, limit)):
            for wanted in (torch.float32, torch.float16, torch.float64):
                write = writing(CALLS[name][0], sample, wanted)
                if write is not None:
                    yield trial(f"{name} to {wanted} on {dtype} {number}", write, sample)


CASTS_BEFORE_OUT = {"nn.functional.normalize"}
"""Computes the norm, in FP32, before it writes."""


@few_and_all
@pytest.mark.parametrize("names", groups(WITH_OUT))
def test_out_is_written_as_without_us(names, limit, tried):
    """No rule casts where the caller gives the tensor to write into, as in autocast."""
    trials = {name: list(written(name, limit)) for name in names}
    for name, tries in trials.items():
        could = any(not isinstance(trial.plain, Raised) for trial in tries)
        assert could or not tries or name in TAKES_NO_OUT, name
    check([trial for tries in trials.values() for trial in tries])


def refused(name: str, limit: int | None) -> Iterator[Trial]:
    """What PyTorch expects to raise, less what its cast makes legal in autocast too."""
    call = CALLS[name][0]
    with quietly():
        errors = list(islice(OPS[name].error_inputs_func(OPS[name], "cpu"), limit))
    for number, error in enumerate(errors):
        sample = plain_sample(error.sample_input)
        if not call.rules or isinstance(under_autocast(call, sample, torch.float16), Raised):
            yield trial(f"{name} on error input {number}", call, sample)


@few_and_all
@pytest.mark.parametrize(
    "names", groups(name for name in OPS if OPS[name].error_inputs_func is not None)
)
def test_errors_are_those_of_plain_pytorch(names, limit, tried):
    check([trial for name in names for trial in refused(name, limit)])


def test_each_operator_meets_the_rows_it_is_said_to(monkeypatch):
    """What is listed, and through which functions, is counted: no entry is missing or stale."""
    met, inside = set(), []

    def spy(row: str, original: Any) -> Any:
        def spied(*args: Any, **kwargs: Any) -> Any:
            if not inside:
                met.add(row)
            inside.append(row)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        return spied

    by_name = {
        name: samples(op, torch.float32, MANY if name in COMPOSITES else 4)
        or samples(op, torch.float64, 4)  # some take nothing smaller
        for name, op in OPS.items()
    }
    for row in RULE_OF:
        where, _, leaf = row.rpartition(".")
        if not hasattr(look_up(where), leaf):
            continue  # a row for another version of torch
        monkeypatch.setattr(look_up(where), leaf, spy(row, getattr(look_up(where), leaf)))
    wrong = {}
    for name, ways in CALLS.items():
        for call in ways if by_name[name] else ():
            met.clear()
            for sample in by_name[name]:
                outcome(call, sample.fresh())
            other_way = call is not ways[0] and rules_of(met) == call.rules
            if met != set(call.rows) and not other_way:
                wrong[f"{name}: {call}"] = (sorted(met), call.rows)
    assert wrong == {}
