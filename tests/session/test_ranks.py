"""Ranks of one DistributedDataParallel have the same settings and scales, or each gets an error."""

from functools import partial

import pytest
import small_training
import torch
import torch.distributed as dist
from ddp_training import build
from repository import HELPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warm_python import python

import ampatch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

BF16 = torch.bfloat16
PLAIN = {"opt_level": "O1", "verbosity": 0}
DYNAMIC = {**PLAIN, "dtype": BF16, "loss_scale": "dynamic"}
LOADED = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}}


def told(model, group=None, kind="torch"):
    """What the error says where a rank wraps a model; None without one."""
    wrap = partial(DistributedDataParallel, process_group=group)
    if kind == "apex":
        from ampatch.compat.apex.parallel import DistributedDataParallel as wrap
    try:
        wrap(model)
    except ampatch.AmpatchError as error:
        return str(error)


def managed(settings):
    model, optimizer = build(0)
    ampatch.initialize(model, optimizer, **settings)
    return model


DIFFERENT = {  # what one rank is given, and the other; what is shown of each
    "half dtype": (PLAIN, {**PLAIN, "dtype": BF16}, "dtype=torch.float16", "dtype=torch.bfloat16"),
    "start": (DYNAMIC, {**DYNAMIC, "init_scale": 1024.0}, "65536.0", "init_scale=1024.0"),
    "static scale": ({**PLAIN, "loss_scale": 128.0}, PLAIN, "loss_scale=128.0", "65536.0"),
    # torch's broadcast would mix up the bytes of weights in other types, or wait for more of them
    "level": ({**PLAIN, "opt_level": "O2"}, {**PLAIN, "opt_level": "O3"}, "level=O2", "level=O3"),
    # overrides decide the types of what DDP sends: gloo aborts, or mixes up their bytes
    "overrides": ({**PLAIN, "overrides": {"0": "float"}}, PLAIN, "={'0': 'float'}", "overrides={}"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_each_rank_is_told_what_it_has(ranks, what):
    *settings, first, other = DIFFERENT[what]
    messages = ranks(_told, settings)
    for rank, shown in enumerate((first, other)):
        assert messages[rank].startswith("DistributedDataParallel(Sequential): ranks differ")
        assert f" Rank {rank} has opt_level=" in messages[rank] and shown in messages[rank]


def _told(rank, by_rank, whose="the model"):
    model = managed(by_rank[rank]) if by_rank[rank] else None
    if whose == "another's":
        return told(nn.Linear(3, 3))
    return told(model[0] if whose == "a part" else model)


def test_what_a_rank_may_have_of_its_own_and_parts_of_a_model(ranks):
    settings = [{**PLAIN, "verbosity": n, "max_consecutive_skips": 5 + n} for n in range(2)]
    assert ranks(_told, settings, "a part") == [None, None]


@pytest.mark.parametrize("case", ["never", pytest.param("disabled", marks=pytest.mark.slow)])
def test_no_rank_waits_for_ever(case, tmp_path):
    """For one that has no session, or a disabled one: it gets torch's error."""
    command = [HELPERS / "one_rank_without.py", case, tmp_path / "store"]
    ended = small_training.in_threads(*(partial(python, *command, rank) for rank in range(2)))
    assert all(process.returncode for process in ended)
    assert "Rank 0 has opt_level=O2" in ended[0].stderr, ended[0].stderr
    assert "DDP expects same model across all ranks" in ended[1].stderr, ended[1].stderr


@pytest.mark.parametrize("kind", ["torch", "apex"])
def test_scales_that_one_rank_has_loaded_are_told(ranks, kind):
    """DDP sends the weights that rank 0 has loaded, and not its loss scales."""
    first, second = ranks(_loaded, kind, [0])
    assert "'loss_scale': 512.0" in first and "'loss_scale': 65536.0" in second
    assert ranks(_loaded, kind, [0, 1]) == [None, None]


def _loaded(rank, kind, loading):
    model = managed(DYNAMIC)
    if rank in loading:
        ampatch.load_state_dict(LOADED)
    return told(model, kind=kind)


def test_other_process_groups_have_their_own_settings(four_ranks):
    """Two pairs of ranks train two models; in the second one the ranks differ."""
    messages = four_ranks(_in_pairs)
    assert messages[:2] == [None, None]
    assert "Rank 2 has" in messages[2] and "Rank 3 has" in messages[3]


def _in_pairs(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = {"init_scale": 1024.0} if rank == 3 else {}
    return told(managed({**DYNAMIC, "growth_interval": 5 + rank // 2, **own}), groups[rank // 2])


def test_models_that_ampatch_does_not_manage_are_nobodys_business(ranks):
    """Rank 0 alone has a session, for a model of its own."""
    assert ranks(_told, [PLAIN, None], "another's") == [None, None]
