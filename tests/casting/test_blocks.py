"""`disable_casts` and `precision` around code that stops half-way: generators, tasks, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading

import pytest
import torch
from torch import nn

import ampatch
from ampatch.casting.stack import FOLLOW

X = torch.randn(4, 4)
H, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def o1():
    ampatch.initialize([], dtype=H, patch_scope="process", verbosity=0)
    yield
    assert ampatch.session.session.registry.state.thread.policy is FOLLOW


def now() -> torch.dtype:
    """What a half function computes in now."""
    return torch.mm(X, X).dtype


def frames() -> list:
    return ampatch.session.session.registry.state.thread.stack


# Decorated generators and coroutines


@ampatch.disable_casts()
def counting(stop: int):
    """Its docstring."""
    found = []
    try:
        for number in range(stop):
            found.append((yield number, now()))
    except KeyError:
        yield "caught", now()
    finally:
        found.append(now())
    return found


def test_a_decorated_generator_runs_without_casts_and_its_caller_with_them():
    for number, (yielded, inside) in enumerate(counting(3)):
        assert (yielded, inside, now()) == (number, FP32, H)
    assert inspect.isgeneratorfunction(counting) and counting.__doc__ == "Its docstring."


def test_a_decorated_generator_is_sent_to_thrown_at_and_closed():
    steps = counting(2)
    assert next(steps) == (0, FP32) and steps.send("a") == (1, FP32)
    with pytest.raises(StopIteration) as end:
        steps.send("b")
    assert end.value.value == ["a", "b", FP32]
    steps = counting(2)
    next(steps)
    assert steps.throw(KeyError()) == ("caught", FP32)
    steps.close()
    assert steps.gi_frame is None and now() is H and not frames()
    with pytest.raises(ZeroDivisionError):
        failing = counting(2)
        next(failing)
        failing.throw(ZeroDivisionError())
    assert now() is H and not frames()


async def seen() -> list:
    found = [now()]
    for _ in range(3):
        await asyncio.sleep(0)
        found.append(now())
    return found


def test_a_decorated_coroutine_leaves_other_tasks_their_casts():
    plain = ampatch.disable_casts()(seen)

    async def fails():
        await asyncio.sleep(0)
        raise KeyError

    async def main():
        failing = asyncio.create_task(ampatch.disable_casts()(fails)())
        found = await asyncio.gather(plain(), seen(), ampatch.precision("half")(seen)(), plain())
        with pytest.raises(KeyError):
            await failing
        return found

    assert asyncio.run(main()) == [[FP32] * 4, [H] * 4, [H] * 4, [FP32] * 4]
    assert inspect.iscoroutinefunction(plain) and now() is H and not frames()


def test_a_cancelled_task_leaves_nothing_behind():
    async def main():
        task = asyncio.create_task(ampatch.disable_casts()(asyncio.sleep)(10))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert now() is H and not frames()


def test_a_decorated_async_generator():
    closed = []

    @ampatch.disable_casts()
    async def rows():
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                yield now()
        finally:
            closed.append(now())

    async def main():
        found = [(inside, now()) async for inside in rows()]
        steps = rows()
        await steps.__anext__()
        await steps.aclose()
        broken = rows()
        await broken.asend(None)
        with pytest.raises(KeyError):
            await broken.athrow(KeyError())
        return found

    assert inspect.isasyncgenfunction(rows)
    assert asyncio.run(main()) == [(FP32, H)] * 3
    assert closed == [FP32] * 3 and now() is H and not frames()


# Blocks that end in another order than they began


def suspended(block):
    with block():
        yield


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (1, 2, 0)])
def test_blocks_in_generators_end_in_any_order(order):
    """As with torch.no_grad the block holds for the thread; here it also ends whole."""
    blocks = [ampatch.disable_casts, ampatch.disable_casts, lambda: ampatch.precision("half")]
    steps = [suspended(block) for block in blocks]
    for step in steps:
        next(step)
    for index in order:
        assert now() is FP32
        with contextlib.suppress(StopIteration):
            next(steps[index])
    assert now() is H and not frames()


def test_the_middle_of_three_ends_first():
    def half():
        return torch.exp(X.to(H)).dtype

    outer, middle, inner = (
        suspended(block)
        for block in (
            lambda: ampatch.precision("half"),
            ampatch.disable_casts,
            lambda: ampatch.precision("half"),
        )
    )
    next(outer), next(middle)
    assert now() is FP32
    assert next(middle, None) is None
    assert now() is H and half() is H  # the outer one's
    middle = suspended(ampatch.disable_casts)
    next(middle), next(inner)
    next(middle, None)
    assert now() is FP32, "chosen when casts were off"
    next(inner, None)
    assert half() is H
    next(outer, None)
    assert half() is FP32 and not frames()


def test_a_block_left_in_another_thread_ends_nothing_there():
    step = suspended(ampatch.disable_casts)
    next(step)
    found = []

    def work():
        next(step, None)
        found.append(now())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [H] and now() is FP32
    frames()[-1].block.leave()  # no other code can
    assert now() is H


# Ctrl-C inside a step's closure


class Interrupted(nn.Linear):
    def forward(self, x):
        raise KeyboardInterrupt


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_ctrl_c_in_a_closure_leaves_no_block_behind(level):
    """The step's own blocks end although the forward's frame, never popped, lies above them."""
    model = Interrupted(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=level, verbosity=0, patch_scope="model")
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(lambda: model(X).float().sum())
    assert len(frames()) <= 1
    with ampatch.scale_loss(torch.ones(1, requires_grad=True).sum(), optimizer):
        assert not frames()
    assert not frames() and not ampatch.session.session.registry.state.per_thread


# Blocks around the beginning of a session


def parts(module, x):
    """What a managed forward computes in: a layer of the model, and a call without weights."""
    return module.layer(x).dtype, torch.mm(x, x).dtype


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    forward = parts


@pytest.mark.parametrize("scope", ["process", "model"])
@pytest.mark.parametrize("how", ["block", "decorator", "in a region"])
def test_casts_that_were_disabled_before_initialize_stay_disabled(scope, how):
    ampatch.deactivate()

    def train():
        model = ampatch.initialize(Parts(), dtype=H, patch_scope=scope, verbosity=0)
        return (*model(X), now())

    block = ampatch.disable_casts()
    around = torch.autocast("cpu", enabled=False) if how == "in a region" else torch.enable_grad()
    with around:
        if how == "decorator":
            found = block(train)()
        else:
            with block:
                found = train()
    assert found == (FP32,) * 3 and now() is (H if scope == "process" else FP32) and not frames()


def test_a_block_of_precision_from_before_a_session_says_nothing_in_it():
    ampatch.deactivate()
    with ampatch.precision("float"):
        model = ampatch.initialize(Parts(), dtype=H, verbosity=0)
        assert model(X) == (H, H) and now() is FP32
        with torch.autocast("cpu", enabled=False):
            assert model(X) == (H, H)
        with ampatch.disable_casts(), ampatch.precision("half"):
            assert model(X) == (FP32, FP32)
    assert model(X) == (H, H) and not frames()


def test_precision_beside_a_session_that_casts_nothing_changes_nothing():
    """An O2 forward gets along with an FP32 buffer, in such a block too."""
    ampatch.deactivate()
    Parts.forward = lambda self, x: (self.layer(x) @ self.shift).dtype
    try:
        model = ampatch.initialize(Parts(), opt_level="O2", dtype=H, verbosity=0, overrides={})
        expected = model(X)
        with ampatch.precision("float"):
            assert model(X) is expected
    finally:
        Parts.forward = parts


def test_without_a_session_torchs_autocast_casts_in_nested_blocks():
    ampatch.deactivate()
    with ampatch.disable_casts(), torch.autocast("cpu", dtype=H), ampatch.disable_casts():
        assert now() is H
