"""`disable_casts` and `precision` around code that stops half-way: generators, tasks, Ctrl-C."""

import contextlib

import pytest
import torch
from engine import FOLLOWS_PROCESS, STATE, thread_calls
from small_training import Made, in_threads
from torch import nn

import ampatch

X = torch.randn(4, 4)
H, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def o1():
    ampatch.initialize([], dtype=H, patch_scope="process", verbosity=0)
    yield
    assert thread_calls.policy is FOLLOWS_PROCESS


def now() -> torch.dtype:
    """What a half function computes in now."""
    return torch.mm(X, X).dtype


def rows():
    yield now()


async def awaited():
    return now()


async def stream():
    yield now()


class Loader:
    def rows(self):
        yield now()


@pytest.mark.parametrize(
    "function, block, written",
    [
        (rows, ampatch.disable_casts, "ampatch.disable_casts()"),
        (awaited, ampatch.disable_casts, "ampatch.disable_casts()"),
        (stream, lambda: ampatch.precision("float"), "ampatch.precision('float')"),
        (Loader.rows, lambda: ampatch.precision("float"), "ampatch.precision('float')"),
    ],
)
def test_what_runs_after_it_has_returned_is_not_decorated(function, block, written):
    with pytest.raises(TypeError) as error:
        block()(function)
    assert str(error.value) == (
        f"{written} cannot decorate {function.__qualname__}: a generator or coroutine function "
        f"returns before it runs. Write `with {written}:` inside the function, around the calls; "
        "no `yield` or `await` belongs inside the block."
    )
    assert now() is H and not thread_calls.stack


def suspended(block):
    with block():
        yield


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (1, 2, 0)])
def test_a_block_ends_with_what_was_entered_in_it(order):
    """As with torch.no_grad a block in a generator holds for the thread."""
    blocks = [ampatch.disable_casts, ampatch.disable_casts, lambda: ampatch.precision("half")]
    steps = [suspended(block) for block in blocks]
    for step in steps:
        next(step)
    assert now() is FP32
    for count, index in enumerate(order):
        with contextlib.suppress(StopIteration):
            next(steps[index])
        assert len(thread_calls.stack) == min(order[: count + 1])
    assert now() is H and not thread_calls.stack


@pytest.mark.parametrize("around", [ampatch.disable_casts, lambda: torch.autocast("cpu", H)])
def test_a_block_whose_exit_was_struck_by_ctrl_c_ends_with_what_is_around(around):
    with around():
        ampatch.disable_casts().__enter__()
        assert now() is FP32
    assert now() is H and not thread_calls.stack

    def struck(module, x):
        with around():
            ampatch.disable_casts().__enter__()
            raise KeyboardInterrupt

    model = ampatch.initialize(model_of(struck), dtype=H, verbosity=0)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    model.does = parts
    assert model(X) == (H, H) and not thread_calls.stack


def test_a_block_left_in_another_thread_ends_nothing_there():
    step = suspended(ampatch.disable_casts)
    next(step)
    assert in_threads(lambda: (next(step, None), now())) == [(None, H)] and now() is FP32
    STATE.exit(thread_calls.stack[-1])  # no other code can
    assert now() is H


def parts(module, x):
    """What a managed forward computes in: a layer of the model, and a call without weights."""
    return module.layer(x).dtype, torch.mm(x, x).dtype


def model_of(does=parts):
    model = Made(does, layer=nn.Linear(4, 4))
    model.register_buffer("shift", torch.ones(4))
    return model


@pytest.mark.parametrize("scope", ["process", "model"])
@pytest.mark.parametrize("how", ["block", "decorator", "in a region"])
def test_casts_that_were_disabled_before_initialize_stay_disabled(scope, how):
    ampatch.deactivate()

    def train():
        model = ampatch.initialize(model_of(), dtype=H, patch_scope=scope, verbosity=0)
        return (*model(X), now())

    block = ampatch.disable_casts()
    around = torch.autocast("cpu", enabled=False) if how == "in a region" else torch.enable_grad()
    with around:
        if how == "decorator":
            dtypes = block(train)()
        else:
            with block:
                dtypes = train()
    assert (
        dtypes == (FP32,) * 3
        and now() is (H if scope == "process" else FP32)
        and not thread_calls.stack
    )


def test_a_block_of_precision_from_before_a_session_says_nothing_in_it():
    ampatch.deactivate()
    with ampatch.precision("float"):
        model = ampatch.initialize(model_of(), dtype=H, verbosity=0)
        assert model(X) == (H, H) and now() is FP32
        with torch.autocast("cpu", enabled=False):
            assert model(X) == (H, H)
        with ampatch.disable_casts(), ampatch.precision("half"):
            assert model(X) == (FP32, FP32)
    assert model(X) == (H, H) and not thread_calls.stack


def test_precision_beside_a_session_that_casts_nothing_changes_nothing():
    """An O2 forward gets along with an FP32 buffer, in such a block too."""
    ampatch.deactivate()
    model = model_of(lambda module, x: (module.layer(x) @ module.shift).dtype)
    ampatch.initialize(model, opt_level="O2", dtype=H, verbosity=0, overrides={})
    expected = model(X)
    with ampatch.precision("float"):
        assert model(X) is expected


def test_without_a_session_torchs_autocast_casts_in_nested_blocks():
    ampatch.deactivate()
    with ampatch.disable_casts(), torch.autocast("cpu", dtype=H), ampatch.disable_casts():
        assert now() is H


@pytest.mark.parametrize("level, dtype", [("O0", FP32), ("O1", H)])
def test_each_forward_keeps_its_own_policy_to_its_end(level, dtype):
    """One that changes nothing pushes nothing; what runs inside must not take that away."""
    seen = []

    def calls(module, x):
        if len(seen) < 2:
            seen.append(now())
            inner(x)
            seen.append(now())
        return now()

    def again(module, x):
        if len(seen) < 2:
            model(x)

    model, inner = model_of(calls), model_of(again)
    ampatch.initialize(inner, opt_level="O1" if level == "O0" else "O0", dtype=H, verbosity=0)
    ampatch.initialize(model, opt_level=level, dtype=H, verbosity=0)
    assert model(X) is dtype and seen == [dtype] * 4
    assert not thread_calls.stack
