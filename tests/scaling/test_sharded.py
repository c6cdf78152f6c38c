"""FSDP2 (`fully_shard`): beside FSDP2's own policy, and beside one process.  FSDP1."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from ranks import slow
from torch import nn

import ampatch as amp

pytest.importorskip("torch.distributed.fsdp", reason="torch without FSDP")

import sharded_training as training
import small_training
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as states

ORDERS = ("sharded first", "initialized first")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(
    params=[(2,), slow((4,)), slow((2, 2))], ids=["two ranks", "four ranks", "HSDP on four"]
)
def on_mesh(request):
    count = 2 if request.param == (2,) else 4
    return request.getfixturevalue("ranks" if count == 2 else "four_ranks"), request.param


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


# Equal to FSDP2's own policy, and to one process


def by_own_policy(rank: int, dtype: torch.dtype, kind: str, parts: int, shape: tuple) -> dict:
    """What FSDP2 alone makes of the same training; the loss scale is written out."""
    model, scale = training.Net(), scale_of(dtype)
    for block in model.blocks:
        block.before.__class__ = training.NormInFloat
    training.shard(model, **training.policy_of("O2", dtype), mesh=training.mesh(shape))
    optimizer = training.MAKE[kind](model.parameters())

    def unscale(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(1 / scale)

    optimizer.register_step_pre_hook(unscale)

    def scaled(loss: torch.Tensor) -> Any:
        return contextlib.nullcontext(loss * scale)

    losses = training.steps(model, optimizer, training.of_rank(rank), parts=parts, scale=scaled)
    return {"losses": losses, "weights": training.whole(model)}


def scale_of(dtype: torch.dtype) -> float:
    return 256.0 if dtype is FP16 else 1.0


def by_ampatch(rank, order, kind, settings, options, norm=False, parts=1, shape=(2,), sync=False):
    model = training.Net(norm)
    options = {**options, "mesh": training.mesh(shape)}
    optimizer = training.managed(model, kind, order, options, **settings)
    losses = training.steps(model, optimizer, training.of_rank(rank), parts=parts, sync=sync)
    results = {
        "losses": losses,
        "weights": training.whole(model),
        "dtypes": {tensor.dtype for p in model.parameters() for tensor in (p, p.grad)},
        "skips": amp.step_counts(optimizer).skipped,
    }
    state = [value for value in model.state_dict().values() if value.is_floating_point()]
    amp.deactivate()
    results["dtypes"] |= {value.dtype for value in (*state, *model.parameters())}
    return results


def in_one_process(model, make, ranks, parts=1, **settings: Any) -> list[torch.Tensor]:
    """The same under ampatch without shards; each step has the batches of all ranks."""
    optimizer = training.MAKE.get(make, make)(model.parameters())
    amp.initialize(model, optimizer, verbosity=0, **settings)
    training.steps(model, optimizer, training.of_ranks(ranks, parts), parts=ranks * parts)
    amp.deactivate()
    return training.whole(model)


@pytest.mark.parametrize(
    "order, dtype, kind, parts, options",
    [
        (ORDERS[0], BF16, "AdamW", 1, {}),
        (ORDERS[1], FP16, "SGD", 3, {"reshard_after_forward": True}),
        slow(ORDERS[0], FP16, "AdamW", 2, {}),
        slow(ORDERS[1], BF16, "AdamW", 2, {"reshard_after_forward": False}),
    ],
)
def test_o2_is_fsdp2s_own_policy(on_mesh, order, dtype, kind, parts, options):
    """To the bit: the same shards, the same collectives, the same casts of weights.

    Several parts are accumulated without communication (`set_requires_gradient_sync(False)`).
    """
    ranks, shape = on_mesh
    settings = {"opt_level": "O2", "dtype": dtype, "loss_scale": scale_of(dtype)}
    own = ranks(by_own_policy, dtype, kind, parts, shape)
    ours = ranks(by_ampatch, order, kind, settings, options, False, parts, shape)
    for mine, theirs in zip(ours, own, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=2e-3)
        assert all(map(torch.equal, mine["weights"], theirs["weights"]))
        assert mine["dtypes"] == {FP32} and mine["skips"] == 0


@pytest.mark.parametrize(
    "level, dtype, kind, norm, parts, sync",
    [
        ("O1", FP16, "SGD", False, 2, True),
        slow("O1", FP16, "AdamW", False, 1, False),
        ("O1", FP16, "AdamW fused", False, 2, False),
        ("O2", FP16, "SGD", True, 1, False),
        ("O3", BF16, "SGD", True, 1, False),
    ],
)
def test_as_one_process(on_mesh, level, dtype, kind, norm, parts, sync):
    """O1 is FP32; others are as without shards: norms are FP32 at O2, sharded by themselves."""
    ranks, shape = on_mesh
    settings = {"opt_level": level, "dtype": dtype, "loss_scale": scale_of(dtype)}
    kept = dtype if level == "O3" else FP32
    count = 2 if shape == (2,) else 4
    plain = {"opt_level": "O0"} if level == "O1" else settings
    reference = in_one_process(training.Net(norm), kind, count, parts, **plain)
    results = [
        ranks(by_ampatch, order, kind, settings, {}, norm, parts, shape, sync)
        for order in (ORDERS if level == "O2" else ORDERS[:1])
    ]
    bound = {"O1": 0.01, "O2": 2e-3, "O3": 0.02}[level]
    for rank in itertools.chain(*results):
        assert rank["dtypes"] == {kept}
        for ours, theirs in zip(rank["weights"], reference, strict=True):
            torch.testing.assert_close(ours, theirs, atol=bound, rtol=0.02)
    assert all(map(torch.equal, results[0][0]["weights"], results[-1][0]["weights"]))


def overflow(rank: int, shape: tuple, level: str, kind: str, group: bool) -> tuple:
    """An inf in the last element of one rank's shard, in the second step."""
    model, options = training.Net(), {"mesh": training.mesh(shape)}
    shared = torch.distributed.group.WORLD if group else None
    settings = {"init_scale": 256.0, "growth_interval": 3, "process_group": shared}
    optimizer = training.managed(model, kind, ORDERS[0], options, opt_level=level, **settings)
    skipped, scales, weights = [], [], []
    for step in range(5):
        optimizer.zero_grad()
        with amp.scale_loss(training.loss_of(model, 1000 * rank + step), optimizer) as scaled:
            scaled.backward()
            if (rank, step) == (1, 1):
                model.last.weight.grad.to_local().view(-1)[-1] = float("inf")
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
        scales.append(amp.loss_scale())
        weights.append(training.whole(model))
    assert all(map(torch.equal, weights[0], weights[1]))
    return skipped, scales, weights[-1]


@pytest.mark.parametrize(
    ("level", "kind", "group"), [("O1", "AdamW fused", True), ("O2", "SGD", False)]
)
def test_an_overflow_in_one_shard_is_decided_by_all_ranks(on_mesh, level, kind, group):
    ranks, shape = on_mesh
    results = ranks(overflow, shape, level, kind, group)
    for skipped, scales, weights in results:
        assert skipped == [False, True, False, False, False]
        assert scales == [256.0, 128.0, 128.0, 128.0, 256.0]
        assert all(map(torch.equal, weights, results[0][2]))


class Tied(nn.Module):
    """An embedding that is the last layer too, a frozen layer, and checkpointed blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(training.Block(8, False) for _ in range(2))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 12, bias=False)
        self.last.weight = self.words.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.words((inputs > 0).long() + 2 * torch.arange(6))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(self.frozen(x).mean(1))


def train_tied(rank: int, order: str, compiled: bool) -> tuple[list[torch.Tensor], bool]:
    model = Tied()
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    optimizer = training.managed(model, "SGD", order, {}, opt_level="O2", dtype=BF16)
    training.steps(model, optimizer, training.of_rank(rank))
    return training.whole(model), model.last.weight is model.words.weight


@pytest.mark.parametrize(
    "order, compiled", [(ORDERS[1], False), slow(ORDERS[0], False), slow(ORDERS[1], True)]
)
def test_tied_frozen_and_checkpointed(ranks, order, compiled):
    reference = in_one_process(Tied(), "SGD", 2, opt_level="O0")
    for weights, are_tied in ranks(train_tied, order, compiled):
        assert are_tied
        for ours, plain in zip(weights, reference, strict=True):
            torch.testing.assert_close(ours, plain, atol=5e-3, rtol=0.05)


def from_meta(rank: int, order: str) -> dict:
    """A model that is made without memory, sharded, and filled then; its buffer is FP32."""
    with torch.device("meta"):
        model = training.Net(norm=True)
        model.register_buffer("place", torch.zeros(4))
    settings = {"opt_level": "O2", "dtype": BF16, "verbosity": 0}
    if order == ORDERS[1]:
        amp.initialize(model, **settings)
    training.shard(model, **training.policy_of("O2", BF16))
    if order == ORDERS[0]:
        amp.initialize(model, **settings)
    model.to_empty(device="cpu")
    values = training.Net(norm=True).state_dict() | {"place": torch.zeros(4)}
    states.set_model_state_dict(
        model, values, options=states.StateDictOptions(full_state_dict=True)
    )
    optimizer = amp.add_optimizers(training.MAKE["AdamW"](model.parameters()))
    losses = training.steps(model, optimizer, training.of_rank(rank))
    return {"losses": losses, "weights": training.whole(model)}


@pytest.mark.parametrize("order", [ORDERS[0], slow(ORDERS[1])])
def test_models_that_are_made_on_the_meta_device(ranks, order):
    """To the bit as a model that was made in memory."""
    in_memory = ranks(by_ampatch, order, "AdamW", {"opt_level": "O2", "dtype": BF16}, {}, True)
    for ours, theirs in zip(ranks(from_meta, order), in_memory, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert all(map(torch.equal, ours["weights"], theirs["weights"]))


def changes(rank: int) -> list:
    """`initialize` again on a sharded model that has run before; the policy is the user's."""
    model = training.shard(training.Net(norm=True), **training.policy_of("O2", BF16))
    with torch.no_grad():
        model(training.batch(0)[0])  # FSDP2 has settled its dtypes, and has gathered the root
    optimizer = training.MAKE["SGD"](model.parameters())
    seen = []

    def look(part: nn.Module, args: tuple) -> None:
        seen.append((part.weight.dtype, args[0].dtype))

    for part in (model.blocks[0].up, model.blocks[0].norm):
        part.register_forward_pre_hook(look)
    results = []
    for level in ("O2", "O1", "O2", ""):
        amp.deactivate()
        if level:
            amp.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
            training.steps(model, optimizer, training.of_rank(rank), count=2)
        seen.clear()
        out = model(training.batch(1)[0])
        model.reshard()
        results.append((*seen, out.dtype, dtypes_of(model)))
    return results


def test_the_policy_stays_the_users_at_every_level(ranks):
    by_policy = ((BF16, BF16), (FP32, BF16), BF16, {FP32})
    by_calls = ((BF16, FP32), *by_policy[1:])  # O1: after LayerNorm, before the call's cast
    in_float = ((BF16, BF16), (FP32, BF16), FP32, {FP32})  # O2 gives FP32 outputs
    for rank in ranks(changes):
        assert rank == [in_float, by_calls, in_float, by_policy]


def precisions(rank: int, order: str) -> None:
    model = training.Net()
    settings = {"opt_level": "O2", "verbosity": 0, "overrides": {"blocks.1": "float"}}
    in_half = fsdp.MixedPrecisionPolicy(param_dtype=FP16, cast_forward_inputs=False)
    if order == ORDERS[1]:
        amp.initialize(model, **settings)
    fsdp.fully_shard(model.blocks[0], mp_policy=in_half)
    fsdp.fully_shard(model.blocks[1])
    fsdp.fully_shard(model.last, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=FP32))
    fsdp.fully_shard(model, mp_policy=in_half)
    optimizer = training.MAKE["SGD"](model.parameters())
    if order == ORDERS[0]:
        amp.initialize(model, optimizer, **settings)
    else:
        amp.add_optimizers(optimizer)
    seen, largest = [], []
    for part in (model.blocks[0].up, model.blocks[1].up, model.last):
        part.register_forward_pre_hook(
            lambda part, args: seen.append((part.weight.dtype, args[0].dtype))
        )
    model.first.register_forward_pre_hook(lambda part, args: largest.append(args[0].max()))
    inputs = training.batch(rank)[0]
    with amp.scale_loss(model(inputs).square().mean(), optimizer) as scaled:
        scaled.backward()
    inputs[0, 0] = 1e6
    model(inputs)
    assert seen[:3] == [(FP16, FP16), (FP32, FP32), (FP32, FP32)] and largest[1].item() == 1e6


@pytest.mark.parametrize("order", ORDERS)
def test_parts_in_a_precision_of_their_own(ranks, order):
    ranks(precisions, order)


GIVE = "MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)"
HALF = training.policy_of("O2")
REFUSED = {  # how it was sharded, the settings, and words of the error
    "no policy": ({}, {}, GIVE),
    "other half dtype": (training.policy_of("O2", BF16), {}, GIVE),
    "whole in FP32": ({"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=FP32)}, {}, GIVE),
    "add_optimizers": ({}, {}, GIVE),
    "batch norm": (HALF, {}, "Shard the BatchNorm1d first, by itself"),
    "override": (HALF, {"overrides": {"last": "float"}}, "Shard the Linear first, by itself"),
    "O3": (HALF, {"opt_level": "O3"}, "model.to(torch.float16) before fully_shard"),
    "O0, half": ({}, {"opt_level": "O0"}, "model.float() before fully_shard"),
    "O0 with a policy": (HALF, {"opt_level": "O0"}, "Give fully_shard no mp_policy"),
}


def refusals(rank: int) -> None:
    for name, (policy, settings, words) in REFUSED.items():
        model = training.Net(norm=name == "batch norm")
        model = model.half() if name == "O0, half" else model
        settings = {"opt_level": "O2", "verbosity": 0, **settings}
        is_late = name == "add_optimizers"
        if is_late:
            amp.initialize(model, **settings)
        shard = fsdp.fully_shard if name == "batch norm" or is_late else training.shard
        shard(model, **policy)
        optimizer = training.MAKE["SGD"](model.parameters())
        before = dtypes_of(model), training.whole(model)
        with pytest.raises(amp.AmpatchError) as refused:
            amp.add_optimizers(optimizer) if is_late else amp.initialize(
                model, optimizer, **settings
            )
        amp.deactivate()
        assert words in str(refused.value), name
        assert before[0] == dtypes_of(model), name
        assert all(map(torch.equal, before[1], training.whole(model))), name


def test_what_contradicts_the_level_is_refused_with_the_policy_to_give(ranks):
    ranks(refusals)


# Beside plain parameters, in half from the start, FSDP1


def partly_sharded(rank: int) -> None:
    """Only the blocks are sharded; `shift`, a plain parameter, has a gradient of 0.1."""
    model = training.Net()
    model.shift = nn.Parameter(torch.zeros(4))
    fsdp.fully_shard(model.blocks[0])
    optimizer = training.MAKE["SGD"](model.parameters())
    settings = {"init_scale": 256.0, "process_group": torch.distributed.group.WORLD}
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **settings)
    skipped = []
    for step in range(3):
        loss = training.loss_of(model, 10 * rank + step) + 0.1 * model.shift.sum()
        small_training.step(loss * float("inf") if (rank, step) == (0, 1) else loss, optimizer)
        skipped.append(amp.step_was_skipped(optimizer))
    assert skipped == [False, True, False]
    after_two = torch.full((4,), -0.05 * (0.1 + (0.9 * 0.1 + 0.1)))  # with momentum
    torch.testing.assert_close(model.shift.detach(), after_two, atol=1e-5, rtol=1e-3)


def test_plain_parameters_beside_sharded_ones(ranks):
    ranks(partly_sharded)


def learns(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> bool:
    """Whether ten steps on one batch lower its loss."""
    losses = training.steps(model, optimizer, lambda step, part: rank, count=10)
    return losses[-1] < losses[0]


def first_version(rank: int, use_orig_params: bool) -> None:
    """FullyShardedDataParallel, the wrapper."""
    for level in ("O1", "O2", "O3"):
        options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        model = fsdp.FullyShardedDataParallel(training.Net(), **options)
        optimizer = training.MAKE["SGD"](model.parameters())
        refused = pytest.raises(amp.AmpatchError, match="sharded parameter")
        with contextlib.nullcontext() if level == "O1" else refused:
            amp.initialize(model, optimizer, opt_level=level, init_scale=256.0, verbosity=0)
            assert learns(model, optimizer, rank)
        amp.deactivate()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_first_fsdp_trains_at_o1_and_is_refused_above(ranks, use_orig_params):
    ranks(first_version, use_orig_params)


def in_half(rank: int, level: str, sharded_first: bool) -> None:
    model = training.Net()
    settings = {"opt_level": level, "dtype": BF16, "verbosity": 0}
    if sharded_first:
        training.shard(model.to(BF16))
        optimizer = training.MAKE["SGD"](model.parameters())
        amp.initialize(model, optimizer, **settings)
    else:
        amp.initialize(model, **settings)
        training.shard(model)
        optimizer = amp.add_optimizers(training.MAKE["SGD"](model.parameters()))
    assert dtypes_of(model) == {BF16} and learns(model, optimizer, rank)
    amp.deactivate()
    assert dtypes_of(model) == {BF16}


@pytest.mark.parametrize(
    "level, sharded_first", [("O1", True), ("O2", True), ("O3", True), ("O3", False)]
)
def test_half_shards_stay_half(ranks, level, sharded_first):
    ranks(in_half, level, sharded_first)


# Checkpoints


def saved_or_loaded(rank, folder, count, order, shape, loads) -> dict:
    """A model at O2 and AdamW, on a mesh of `count` ranks or in one process.

    Three steps and a checkpoint, or what is in that checkpoint; then two more steps, in which all
    ranks together have the same four batches.
    """
    model, settings = training.Net(), {"opt_level": "O2", "init_scale": 512.0, "growth_interval": 2}
    if count == 1:
        optimizer = training.MAKE["AdamW"](model.parameters())
        amp.initialize(model, optimizer, verbosity=0, **settings)
    else:
        options = {"mesh": training.mesh(shape)}
        optimizer = training.managed(model, "AdamW", order, options, **settings)
    if loads:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    else:
        training.steps(model, optimizer, lambda step, part: 10 * rank + step, count=3)
    of_model, of_optimizer = states.get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "amp": amp.state_dict()}
    if loads:
        dcp.load(state, checkpoint_id=folder, no_dist=count == 1)
        states.set_state_dict(
            model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer
        )
        amp.load_state_dict(state["amp"])
    else:
        dcp.save(state, checkpoint_id=folder)
    results = {"weights": training.whole(model), "scale": amp.loss_scale()}
    results["dtypes"] = {value.dtype for value in of_model.values()}
    own = 4 // count
    training.steps(
        model, optimizer, lambda step, part: 100 * step + rank * own + part, count=2, parts=own
    )
    results["later"] = training.whole(model)
    amp.deactivate()
    return results


def check_resume(saved: list[dict], loaded: list[dict]) -> None:
    """The same weights to the bit; the next steps but for the order of sums."""
    for rank in (*saved, *loaded):
        assert rank["dtypes"] == {FP32} and rank["scale"] == 1024.0
    for rank in loaded:
        assert all(map(torch.equal, rank["weights"], saved[0]["weights"]))
        for ours, theirs in zip(rank["later"], saved[0]["later"], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_in_one_process_and_back(ranks, tmp_path):
    saved = ranks(saved_or_loaded, str(tmp_path), 2, ORDERS[0], (2,), False)
    check_resume(saved, [saved_or_loaded(0, str(tmp_path), 1, "", (), True)])
    again = ranks(saved_or_loaded, str(tmp_path), 2, ORDERS[1], (2,), True)
    check_resume(saved, again)
    assert all(map(torch.equal, again[0]["later"], saved[0]["later"]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["one mesh", "HSDP"])
def test_checkpoints_between_two_and_four_ranks(ranks, four_ranks, tmp_path, shape):
    two, four = (ranks, 2, ORDERS[1], (2,)), (four_ranks, 4, ORDERS[0], shape)
    for (first, *own), (second, *other) in itertools.permutations([two, four]):
        folder = str(tmp_path / str(own[0]))
        saved = first(saved_or_loaded, folder, *own, False)
        check_resume(saved, second(saved_or_loaded, folder, *other, True))
