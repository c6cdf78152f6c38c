"""The law of frameworks: each of them trains under each opt level as in FP32.

The same network, data and steps run with every framework, at every opt level, in both half dtypes:
plainly, with clipping, with accumulation, stopped and resumed, and on two ranks.  They are held
against the same framework in FP32 and against its own AMP.

The bounds are those of a half dtype: two or three digits for bfloat16, three for float16.  At O3
the weights are in half too, so rounding adds up from step to step.  At O0 every bit is FP32's.
"""

import copy
import functools
import importlib.util
import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from framework_runs import BATCHES, Plan
from page_readers import beginning
from pages import snippets
from repository import DOCS
from torch import nn
from watched_runs import Watched, watched, watched_on_rank

import ampatch

FRAMEWORKS = ("accelerate", "fabric", "ignite", "lightning", "timm", "transformers")
BOUNDS = {"float16": 0.02, "bfloat16": 0.1}
"""Of losses and weights, relative and absolute; twice as much at O3."""

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.1},
    "accumulate": {"accumulate": 2},
}
STOP = 6  # batches

IN_HALF = {"O0": (), "O1": (), "O2": ("Linear",), "O3": ("Linear", "BatchNorm1d")}
"""The layers whose weights in the model are half."""

NO_OWN_FLOAT16 = ("accelerate", "transformers")
"""The frameworks whose own AMP has no float16 on a CPU; all have bfloat16."""

SLOW_HALF = "The model is on the CPU, where float16 products are often many times slower"
"""What ampatch says of float16 here, rightly."""

BY_DEFAULT = [("O0", "float16"), ("O1", "bfloat16"), ("O2", "float16"), ("O3", "bfloat16")]
"""The cases in the default tests (several runs or ranks: at O1 and O2 alone); others are slow."""


def cases(*kinds: str) -> pytest.MarkDecorator:
    listed = []
    for kind, *case in product(kinds, IN_HALF, ("float16", "bfloat16")):
        of_kind = BY_DEFAULT[1:3] if kind in ("ranks", "resume") else BY_DEFAULT
        marks = () if tuple(case) in of_kind else pytest.mark.slow
        listed.append(pytest.param(kind, *case, marks=marks, id="-".join([kind, *case])))
    return pytest.mark.parametrize("kind, level, half", listed)


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request) -> str:
    package = "lightning" if request.param == "fabric" else request.param
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says at import is not about ampatch
        importlib.import_module(f"runs_with_{request.param}")  # Lightning changes torch.compile
    return request.param


@pytest.fixture(scope="module")
def runs(framework, tmp_path_factory):
    folder = tmp_path_factory.mktemp(framework)

    @functools.cache
    def run(precision: str, **plan: Any) -> Watched:
        return watched(framework, Plan(folder, precision, **plan))

    return run


def assert_near(actual: Watched, expected: Watched, level: str, half: str) -> None:
    """Loss by loss, and weight by weight, which at O3 may be in half."""
    bound = BOUNDS[half] * (2 if level == "O3" else 1)
    close = functools.partial(torch.testing.assert_close, rtol=bound, atol=bound)
    close(torch.tensor(actual.run.losses), torch.tensor(expected.run.losses))
    wanted = expected.run.weights
    close(
        {name: weight.to(wanted[name].dtype) for name, weight in actual.run.weights.items()}, wanted
    )


def assert_same(actual: Watched, losses: list[float], expected: Watched) -> None:
    assert actual.run.losses == losses
    assert actual.run.weights.keys() == expected.run.weights.keys()
    for name, value in actual.run.weights.items():
        assert torch.equal(value, expected.run.weights[name]), name


def assert_computed_in(results: Watched, level: str, half: str) -> None:
    """A cast that is lost, or another level, shows here."""
    dtype = getattr(torch, half)
    assert results.kernels == {torch.float32 if level == "O0" else dtype}
    for layer, dtypes in results.weights.items():
        assert dtypes == {dtype if layer in IN_HALF[level] else torch.float32}, layer
    assert results.weights.keys() == {"Linear", "BatchNorm1d"}


def assert_quiet(results: Watched, beside: Watched) -> None:
    """Nothing is said that the framework does not say in FP32."""
    said = {line for line in results.said if SLOW_HALF not in line}
    assert said - set(beside.said) == set()


def assert_trained(actual: Watched, expected: Watched, level: str, half: str, count: int) -> None:
    """As in FP32, with `count` batches, in the dtypes of the level and at its loss scale."""
    assert len(actual.run.losses) == count
    if level == "O0":
        assert_same(actual, expected.run.losses, expected)
    else:
        assert_near(actual, expected, level, half)
    assert_computed_in(actual, level, half)
    assert_quiet(actual, expected)
    is_scaled = half == "float16" and level in ("O1", "O2")
    assert actual.run.loss_scale == (1024.0 if is_scaled else 1.0)


@cases(*KINDS)
def test_training(runs, framework, kind, level, half):
    expected = runs("float32", **KINDS[kind])
    actual = runs("ampatch", opt_level=level, dtype=half, **KINDS[kind])
    assert_trained(actual, expected, level, half, BATCHES)
    if level != "O0" and (half == "bfloat16" or framework not in NO_OWN_FLOAT16):
        assert_near(actual, runs("amp", dtype=half, **KINDS[kind]), level, half)


def test_switched_off_it_is_the_framework_in_fp32(runs, framework, tmp_path, monkeypatch):
    expected = runs("float32")
    monkeypatch.setenv("AMPATCH_ENABLED", "0")
    actual = watched(framework, Plan(tmp_path, "ampatch", opt_level="O2", dtype="float16"))
    assert_same(actual, expected.run.losses, expected)
    assert_computed_in(actual, "O0", "float16")


@pytest.fixture(scope="module")
def in_two_parts(framework, tmp_path_factory):
    """`in_two_parts(precision, **plan)`: a run that stops, and one that goes on from there."""

    @functools.cache
    def run(precision: str, **plan: Any) -> tuple[Watched, Watched]:
        first = Plan(tmp_path_factory.mktemp(framework), precision, **plan, stop_after=STOP)
        second = replace(first, stop_after=None, resume=True, init_scale=2.0)
        return watched(framework, first), watched(framework, second)

    return run


@cases("resume")
def test_resuming(runs, in_two_parts, kind, level, half):
    """The loss scale is the checkpoint's, whatever the new run would begin with."""
    whole = runs("ampatch", opt_level=level, dtype=half)
    first, second = in_two_parts("ampatch", opt_level=level, dtype=half)
    assert first.run.losses == whole.run.losses[:STOP]
    assert_same(second, whole.run.losses[STOP:], whole)
    assert second.run.loss_scale == whole.run.loss_scale
    for results, in_float32 in zip((first, second), in_two_parts("float32"), strict=True):
        assert_computed_in(results, level, half)
        assert_quiet(results, in_float32)


@pytest.fixture(scope="module")
def pairs(framework, ranks, tmp_path_factory):
    """`pairs(precision, **plan)`: the same run on two ranks, under DDP."""
    folder = tmp_path_factory.mktemp(framework)
    ranks.load(f"runs_with_{framework}")

    @functools.cache
    def run(precision: str, **plan: Any) -> list[Watched]:
        return ranks(watched_on_rank, framework, Plan(folder, precision, **plan))

    return run


@cases("ranks")
def test_two_ranks(pairs, kind, level, half):
    """Each trains on its part of the data; their weights are the same, and those of FP32."""
    expected = pairs("float32")
    actual = pairs("ampatch", opt_level=level, dtype=half)
    for mine, in_float32 in zip(actual, expected, strict=True):
        assert_trained(mine, in_float32, level, half, BATCHES // 2)
    first, other = (mine.run for mine in actual)
    assert first.losses != other.losses
    trained = [name for name in first.weights if "running" not in name]  # DDP leaves BatchNorm's be
    assert all(torch.equal(first.weights[name], other.weights[name]) for name in trained)


def test_the_runs_tell_their_kinds_apart(runs):
    """A run that did not clip, or took a step at each batch, would be out of bounds."""
    plain, clipped, accumulated = (runs("float32", **KINDS[kind]).run.losses for kind in KINDS)
    for other in (clipped, accumulated):
        assert max(abs(a - b) for a, b in zip(plain, other, strict=True)) > 0.3


def test_the_snippet_of_the_page_trains(framework, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # there it writes its checkpoints
    page = "lightning" if framework == "fabric" else framework
    snippet = snippets(DOCS / "frameworks" / f"{page}.md")[framework == "fabric"]
    names = beginning(framework)
    modules = [value for value in names.values() if isinstance(value, nn.Module)]
    before = [copy.deepcopy(module.state_dict()) for module in modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, about few batches and small models
        exec(compile(snippet.text, str(snippet), "exec"), names)
        if framework == "timm":  # train.py has the rest
            inputs, targets = names["loader"][0]
            loss = names["criterion"](names["model"](inputs), targets)
            names["loss_scaler"](loss, names["optimizer"])
    ampatch.deactivate()
    changed = [
        not torch.equal(values[name], value)
        for module, values in zip(modules, before, strict=True)
        for name, value in module.state_dict().items()
    ]
    assert any(changed)
