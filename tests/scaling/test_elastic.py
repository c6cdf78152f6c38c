"""Restarts: a training that goes on from its checkpoint is the undisturbed one, bit for bit."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from native_runs import different
from ranks import slow
from small_training import pass_back
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampatch as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

STEPS, INTERRUPTED_AT = 8, 4
POISONED = 2  # at this step the last rank's loss is infinite
ROWS = 16  # of all ranks together
LEVELS = [("O0", "float16"), ("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")]
LEVELS += [("O3", "bfloat16")]


def managed(level: str, dtype: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, with a loss scale that grows every third step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    settings = {"loss_scale": "dynamic", "init_scale": 256.0, "growth_interval": 3, "verbosity": 0}
    return amp.initialize(model, optimizer, opt_level=level, dtype=dtype, **settings)


def load(state: dict, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["ampatch"])


def go_on(rank: int, ranks: int, level: str, dtype: str, state: dict | None, until: int) -> dict:
    """The checkpoint after training from another one; any number of ranks has the same rows."""
    model, optimizer = managed(level, dtype, seed=rank + until if state else 0)
    if state is not None:
        load(copy.deepcopy(state), model, optimizer)
    parallel = DistributedDataParallel(model) if ranks > 1 else model
    for step in range(0 if state is None else state["step"], until):
        data = torch.Generator().manual_seed(step)
        inputs = torch.randn(ROWS, 6, generator=data)[rank::ranks]
        targets = torch.randint(0, 4, (ROWS,), generator=data)[rank::ranks]
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(inputs).float(), targets)
        is_bad = step == POISONED and rank == ranks - 1
        pass_back(loss * float("inf") if is_bad else loss, optimizer)
        optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    torch.save({**saved, "ampatch": amp.state_dict(), "step": until}, file)
    amp.deactivate()
    return torch.load(io.BytesIO(file.getvalue()))


def interrupted(rank: int, level: str, dtype: str) -> list[dict]:
    """At once; in two parts; and the first part, for another number of ranks to go on from."""
    at_once = go_on(rank, 2, level, dtype, None, STEPS)
    part = go_on(rank, 2, level, dtype, None, INTERRUPTED_AT)
    return [at_once, go_on(rank, 2, level, dtype, part, STEPS), part]


@pytest.mark.parametrize(
    "level, dtype", [case if case == ("O2", "float16") else slow(*case) for case in LEVELS]
)
def test_a_restart_on_two_ranks_changes_no_bit(ranks, level, dtype):
    for at_once, restarted, part in ranks(interrupted, level, dtype):
        assert not different(at_once, restarted) and at_once["ampatch"] != part["ampatch"]
    # one process goes on from the checkpoint of two
    model, optimizer = managed(level, dtype, seed=5)
    load(part, model, optimizer)
    assert not different(part["model"], model.state_dict())
    assert part["ampatch"] == amp.state_dict()
    amp.deactivate()
    alone = go_on(0, 1, level, dtype, part, STEPS)
    assert alone["ampatch"] == at_once["ampatch"]
    wide = 0.1 if level == "O3" else 0.01  # the order of sums
    for name, value in at_once["model"].items():
        torch.testing.assert_close(alone["model"][name], value, atol=wide, rtol=wide)
