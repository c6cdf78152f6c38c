"""Ranks of one DistributedDataParallel have the same settings, or an error says which differ."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import small_training
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_training import build
from repository import HELPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warm_python import python

import ampatch
from ampatch.interop import rank_agreement
from ampatch.torch_private.ddp import pass_verification, store_of_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

BF16 = torch.bfloat16
PLAIN = {"opt_level": "O1", "verbosity": 0}
DYNAMIC = {**PLAIN, "dtype": torch.bfloat16, "loss_scale": "dynamic"}
APEX = "apex"


def wrap(model, kind="torch", group=None):
    if kind == APEX:
        from ampatch.compat.apex.parallel import DistributedDataParallel as ApexParallel

        return ApexParallel(model)
    return DistributedDataParallel(model, process_group=group)


def train(model, optimizer, steps):
    for step in range(steps):
        data = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = F.mse_loss(model(torch.randn(4, 6, generator=data)).float(), torch.zeros(4, 3))
        small_training.step(loss, optimizer)


def prepared(kind, settings, group=None):
    """A model and an optimizer under these settings, and its wrapper."""
    model, optimizer = build(0)
    ampatch.initialize(model, optimizer, **settings)
    return wrap(model, kind, group), optimizer


def message_of(call):
    """What the error says; None without one."""
    try:
        call()
    except ampatch.AmpatchError as error:
        return str(error)


def told(rank, kind, by_rank):
    return message_of(lambda: train(*prepared(kind, by_rank[rank]), 1))


def at(level, **settings):
    return {**PLAIN, "opt_level": level, **settings}


DIFFERENT = {  # what one rank is given, and the other; what is shown of each
    "half type": (PLAIN, {**PLAIN, "dtype": BF16}, "dtype=torch.float16", "dtype=torch.bfloat16"),
    "level": ({**PLAIN, "opt_level": "O0"}, PLAIN, "opt_level=O0", "opt_level=O1"),
    "start": (DYNAMIC, {**DYNAMIC, "init_scale": 1024.0}, "init_scale=65536", "init_scale=1024"),
    "growth": (DYNAMIC, {**DYNAMIC, "growth_interval": 10}, "interval=2000", "interval=10"),
    "backoff": (DYNAMIC, {**DYNAMIC, "backoff_factor": 0.25}, "factor=0.5", "factor=0.25"),
    "static scale": ({**PLAIN, "loss_scale": 128.0}, PLAIN, "loss_scale=128.0", "scale=dynamic"),
    "number of losses": (DYNAMIC, {**DYNAMIC, "num_losses": 2}, "=dynamic", "=dynamic, dynamic"),
    # torch's broadcast would mix up the bytes of weights in other types, or wait for more of them
    **{f"{one} {two}": (at(one), at(two), f"opt_level={one}", f"opt_level={two}")
       for one, two in (("O1", "O2"), ("O2", "O3"), ("O3", "O1"))},
    # overrides decide the types of what DDP sends: gloo aborts, or mixes up their bytes
    **{f"overrides at {level}": (at(level, overrides={"0": "float", torch.bmm: "float"}), at(level),
                                 "has overrides={0: float, bmm: float}", "has overrides={}")
       for level in ("O1", "O2", "O3")},
}  # fmt: skip


@pytest.mark.parametrize(
    "what, kind", [*((what, "torch") for what in DIFFERENT), ("number of losses", APEX)]
)
def test_ranks_that_differ_are_told_on_every_rank(ranks, what, kind):
    *settings, one, other = DIFFERENT[what]
    messages = ranks(told, kind, settings)
    for rank, shown in enumerate((one, other)):
        for message in messages:
            assert message.startswith("DistributedDataParallel(Sequential): the ranks average")
            assert f"ank {rank} has " in message and shown in message, message


def test_parts_of_a_model_that_are_wrapped_are_compared(ranks):
    for message in ranks(_told_of_parts):
        assert message.startswith("DistributedDataParallel(Linear): the ranks average gradients")
        assert "Rank 0 has dtype=torch.float16; rank 1 has dtype=torch.bfloat16" in message


def _told_of_parts(rank):
    model, _ = build(0)
    ampatch.initialize(model, **{**DYNAMIC, "dtype": (torch.float16, BF16)[rank]})
    return message_of(lambda: DistributedDataParallel(model[0]))


def test_a_rank_that_finds_a_difference_asks_no_more(ranks):
    """The first rank has found it too, may have ended, and the store with it."""
    first, second = ranks(_told_without_verdict)
    assert first == second and "rank 1 has opt_level=O0" in first


def _told_without_verdict(rank):
    class Ends:
        def __getattr__(self, name):
            return getattr(store, name)

        def get(self, key):
            if key.endswith("/verdict"):
                raise dist.DistNetworkError("the first rank has ended")
            return store.get(key)

    store = store_of_ranks()
    with mock.patch.object(rank_agreement, "store_of_ranks", Ends):
        return told(rank, "torch", [PLAIN, {**PLAIN, "opt_level": "O0"}])


def test_what_a_rank_says_is_in_the_store_before_it_passes_the_verification(ranks):
    """`TCPStore.set` does not wait: another rank, behind the verification, would find nothing."""
    assert ranks(_on_its_way) == [[]] * 2


def _on_its_way(rank):
    """The keys that the store may not have yet when this rank enters torch's verification."""

    class Late:
        def __getattr__(self, name):
            on_its_way.clear()  # one connection: behind an answer all of it has arrived
            return getattr(store, name)

        def set(self, key, value):
            on_its_way.append(key)
            store.set(key, value)

    def verify(*args):
        found.extend(on_its_way)
        return pass_verification(*args)

    store, on_its_way, found = store_of_ranks(), [], []
    with (
        mock.patch.object(rank_agreement, "store_of_ranks", Late),
        mock.patch.object(rank_agreement, "pass_verification", verify),
    ):
        assert told(rank, "torch", [PLAIN, PLAIN]) is None
    return found


@pytest.mark.parametrize("case", ["never", pytest.param("disabled", marks=pytest.mark.slow)])
def test_no_rank_waits_for_ever(case, tmp_path):
    """For one that has no session, or a disabled one: its own collectives end with the job."""
    command = [HELPERS / "one_rank_without.py", case, tmp_path / "store"]
    ended = small_training.in_threads(*(partial(python, *command, rank) for rank in range(2)))
    assert all(one.returncode for one in ended)
    assert "rank 1 has no active ampatch" in ended[0].stderr, ended[0].stderr


LOADED = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 7}}


@pytest.mark.parametrize("kind", ["torch", APEX])
def test_scales_that_one_rank_has_loaded_are_told(ranks, kind):
    """DDP sends the weights that rank 0 has loaded, and not its loss scales."""
    first, second = ranks(_loaded, kind, [0])
    assert first == second and "'loss_scale': 512.0" in first and "'loss_scale': 65536.0" in first
    assert "ampatch.load_state_dict(...) on every rank" in first
    assert ranks(_loaded, kind, [0, 1]) == [None, None]


def _loaded(rank, kind, loading):
    model, _ = build(0)
    ampatch.initialize(model, **DYNAMIC)
    if rank in loading:
        ampatch.load_state_dict(LOADED)
    return message_of(lambda: wrap(model, kind))


def test_a_model_that_was_wrapped_before_is_not_compared(ranks):
    """As under torch.amp, whose ranks compare nothing."""
    assert ranks(_wrapped_before) == [None, None]


def _wrapped_before(rank):
    inner, optimizer = build(0)
    model = wrap(inner)
    ampatch.initialize(model, optimizer, **[PLAIN, {**PLAIN, "opt_level": "O0"}][rank])
    return message_of(lambda: train(model, optimizer, 1))


def test_other_process_groups_have_their_own_settings(four_ranks):
    """Two pairs of ranks train two models; in the second one the ranks differ."""
    messages = four_ranks(_in_pairs)
    assert messages[:2] == [None, None] and messages[2] == messages[3]
    assert "Rank 2 has init_scale=65536.0," in messages[2]
    assert "; rank 3 has init_scale=1024.0," in messages[2]


def _in_pairs(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    settings = {**DYNAMIC, "growth_interval": 5 if rank < 2 else 6}
    if rank == 3:
        settings["init_scale"] = 1024.0
    group = groups[rank // 2]
    return message_of(lambda: train(*prepared("torch", settings, group), 1))


def test_models_that_ampatch_does_not_manage_are_nobodys_business(ranks):
    """Rank 0 alone has a session, for a model of its own."""
    assert ranks(_beside_a_session) == [None, None]


def _beside_a_session(rank):
    own, _ = build(0)
    if rank == 0:
        ampatch.initialize(own, **PLAIN)
    return message_of(lambda: wrap(nn.Linear(3, 3))(torch.ones(1, 3)).sum().backward())
