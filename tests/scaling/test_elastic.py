"""Restarts: a training that goes on from its checkpoint is the undisturbed one, bit for bit."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import elastic_training as script
import pytest
import torch
import torch.distributed as dist
from ranks import slow
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

STEPS, KILLED_AT = 8, 4
LEVELS = [("O0", "float16"), ("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")]
LEVELS += [("O3", "bfloat16")]


def same(one, other) -> bool:
    """Whether two checkpoints are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def go_on(rank: int, ranks: int, level: str, dtype: str, state: dict | None, until: int) -> dict:
    model, optimizer = script.managed(level, dtype, seed=rank + until)
    step = 0
    if state is not None:
        step = script.load(copy.deepcopy(state), model, optimizer)
    elif rank == 0:
        model.load_state_dict(script.build(0)[0].state_dict())  # DDP makes ranks equal
    parallel = DistributedDataParallel(model) if ranks > 1 else model
    for number in range(step, until):
        script.one_step(parallel, optimizer, number, rank, ranks)
    file = io.BytesIO()
    torch.save(script.state_of(model, optimizer, until), file)
    amp.deactivate()
    return torch.load(io.BytesIO(file.getvalue()))


def interrupted(rank: int, level: str, dtype: str) -> list[dict]:
    """At once; in two parts; and the first part, for another number of ranks to go on from."""
    at_once = go_on(rank, 2, level, dtype, None, STEPS)
    part = go_on(rank, 2, level, dtype, None, KILLED_AT)
    return [at_once, go_on(rank, 2, level, dtype, part, STEPS), part]


@pytest.mark.parametrize(
    "level, dtype", [case if case == ("O2", "float16") else slow(*case) for case in LEVELS]
)
def test_a_restart_on_two_ranks_changes_no_bit(ranks, level, dtype):
    for at_once, restarted, part in ranks(interrupted, level, dtype):
        assert same(at_once, restarted) and at_once["ampatch"] != part["ampatch"]
    # one process goes on from the checkpoint of two
    model, optimizer = script.managed(level, dtype, seed=5)
    script.load(part, model, optimizer)
    assert same(part["model"], model.state_dict()) and same(part["ampatch"], amp.state_dict())
    amp.deactivate()
    alone = go_on(0, 1, level, dtype, part, STEPS)
    assert alone["ampatch"] == at_once["ampatch"]
    assert_near(alone, at_once, level)


def assert_near(one: dict, other: dict, level: str) -> None:
    """Weights, but for the order of sums."""
    wide = 0.1 if level == "O3" else 0.01
    for name, value in other["model"].items():
        torch.testing.assert_close(one["model"][name], value, atol=wide, rtol=wide)


def torchrun(folder: Path, count: int, *arguments: object) -> dict:
    path = os.pathsep.join([str(Path(amp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "--max-restarts", "1"]
    subprocess.run(
        [*command, script.__file__, str(folder), *map(str, arguments)],
        env={
            **os.environ,
            **{"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # gloo would find the dead workers' places
        },
        check=True,
        timeout=300,
        capture_output=True,
    )
    return torch.load(folder / "result.pt")


@pytest.mark.slow
@pytest.mark.parametrize("count, how", [(2, "exit"), (4, "exception")])
@pytest.mark.parametrize("level, dtype", [("O1", "float16"), ("O2", "float16"), ("O3", "bfloat16")])
def test_torchrun_restarts_dead_workers(tmp_path, level, dtype, count, how):
    for name in ("undisturbed", "restarted", "others"):
        (tmp_path / name).mkdir()
    expected = torchrun(tmp_path / "undisturbed", count, level, dtype, STEPS)
    found = torchrun(tmp_path / "restarted", count, level, dtype, STEPS, KILLED_AT, how)
    assert expected.pop("attempt") == 0 and found.pop("attempt") == 1
    assert same(expected, found)
    # and with another number of ranks
    torchrun(tmp_path / "others", count, level, dtype, KILLED_AT)
    kept = torch.load(tmp_path / "others" / "checkpoint.pt")
    other = torchrun(tmp_path / "others", 1 if count == 4 else 4, level, dtype, STEPS)
    assert other["ranks"] != count and kept["step"] == KILLED_AT
    assert other["ampatch"] == expected["ampatch"]
    assert_near(other, expected, level)
