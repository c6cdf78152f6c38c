"""Every situation of the table, under ampatch and under its oracle."""

import importlib
import logging
import re

import pytest
import torch
from drivers import INIT_SCALE, SGD, Ampatch, ByHand, differ
from situations import HALVES, TABLE, Situation, batches, mlp, mse

TOPICS = (
    *("calls", "amp_examples", "graphs", "hooks", "weights", "parameters", "saved"),
    *("gradients", "optimizers", "models", "dtypes", "lookups"),
)
MODULES = [importlib.import_module(f"situations_{topic}") for topic in TOPICS]

UNSCALED = ("O0", "O3")
"""Levels with one scale in both types: one type of half is enough, but where FP32 is asked about
what half can hold."""

ROWS = [
    pytest.param(row, level, half, id=f"{row.name}-{level}-{half}")
    for row in TABLE
    for level in row.levels.split()
    for half in row.halves.split()
    if level not in UNSCALED or (half, row.against) != ("fp16", "by hand") or row.halves == half
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("row", "level", "half"), ROWS)
def test_situation(row: Situation, level: str, half: str, caplog) -> None:
    check(row, level, half, caplog)


def check(row: Situation, level: str, half: str, caplog: pytest.LogCaptureFixture) -> None:
    """Losses, recorded values and final weights are the oracle's."""
    ours = Ampatch(level, HALVES[half])
    if row.refuses:
        with pytest.raises(Exception, match=row.refuses):
            row.run(ours)
        return
    oracle = ByHand("O0" if row.against == "FP32" else level, HALVES[half])
    expected = everything(row, oracle)
    if row.says:
        caplog.set_level(logging.INFO, logger="ampatch")
    actual = everything(row, ours)
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        case = "".join(f"{name}: " for name in oracle.met[index : index + 1])
        what = f"{case}number {index} of {len(oracle.seen)} recorded and {len(expected)} in all"
        assert (want.shape, want.device) == (have.shape, have.device), what
        gap = (want - have).abs().nan_to_num().max().item() if want.numel() else 0.0
        if row.within:
            assert gap <= row.within, f"{what}: {gap} apart"
        else:
            equal = not differ(want, have).any()
            assert equal, f"{what}: up to {gap} apart\nexpected {want}\nfound {have}"
    if row.says:
        assert re.search(row.says, caplog.text), caplog.text or "nothing was logged"


def everything(row: Situation, driver: Ampatch | ByHand) -> list[torch.Tensor]:
    """What a run of the situation recorded, and its final weights; they must have moved."""
    start, begun = driver.start, []

    def remembering(*args, **kwargs):
        result = start(*args, **kwargs)
        begun.append(driver.weights())
        return result

    driver.start = remembering
    torch.manual_seed(0)
    row.run(driver)
    results = driver.weights()
    assert begun or not driver.by_hand, "the situation starts no training"
    if begun and row.changes_weights:
        before = begun[-1]
        moved = [a.shape != b.shape or differ(a, b).any() for a, b in zip(before, results)]
        whose = "the situation tests nothing" if driver.by_hand else "ampatch has not trained"
        assert any(moved), f"no weight has moved: {whose}"
    return driver.seen + results


# The oracle itself


def grad_scaler_loop(half, clip, accumulate, bad):
    """As PyTorch's page of AMP examples has it."""
    model = mlp()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, enabled=half is torch.float16)
    for number, (x, y) in enumerate(batches(6)):
        with torch.autocast("cpu", half):
            out = model(x)
        loss = mse(out, y) * (float("inf") if number == bad else 1.0)
        scaler.scale(loss).backward()
        if (number + 1) % accumulate == 0:
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_oracle_at_o1_is_torch_amp(half, clip, accumulate):
    bad = None if half is torch.bfloat16 else 3  # there is no scaler to skip the step
    expected = grad_scaler_loop(half, clip, accumulate, bad)
    oracle = ByHand("O1", half)
    model, optimizer = oracle.start(mlp())
    for number, (x, y) in enumerate(batches(6)):
        loss = mse(model(x), y) * (float("inf") if number == bad else 1.0)
        oracle.backward(loss, optimizer)
        if (number + 1) % accumulate == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), expected))
    assert any(differ(p, q).any() for p, q in zip(model.parameters(), mlp().parameters()))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_oracle_of_half_models_is_the_textbooks(level, half):
    """Half numbers; at O2 gradients go to FP32 weights, which are rounded again after the step."""
    model = mlp()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(half)
    stepped = masters if level == "O2" else list(model.parameters())
    optimizer = SGD(stepped)
    oracle = ByHand(level, half)
    by_hand, by_hand_optimizer = oracle.start(mlp(), loss_scale=128.0)
    for x, y in batches(4):
        model.zero_grad()
        (mse(model(x.to(half)), y) * 128.0).backward()
        for param, master in zip(model.parameters(), stepped, strict=True):
            master.grad = param.grad.float() / 128.0 if level == "O2" else param.grad / 128.0
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), stepped, strict=True):
                param.copy_(master)
        oracle.step(mse(by_hand(x), y), by_hand_optimizer)
    assert all(map(torch.equal, by_hand.parameters(), stepped))
