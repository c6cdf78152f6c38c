"""FSDP2 (`fully_shard`): beside FSDP2's own policy, and beside one process.  FSDP1."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict
from torch import nn

import ampatch as amp

pytest.importorskip("torch.distributed.fsdp", reason="torch without FSDP")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

import sharded_training as training

ORDERS = ("sharded first", "initialized first")
HALVES = (torch.bfloat16, torch.float16)


# Equal to FSDP2's own policy, and to one process


def by_own_policy(
    rank: int, dtype: torch.dtype, kind: str, scale: float, parts: int, shape: tuple[int, ...]
) -> dict:
    """What FSDP2 alone makes of the same training; the loss scale is written out."""
    model = training.Net()
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

    losses = training.steps(model, optimizer, training.on_rank(rank), scaled, parts=parts)
    return {"losses": losses, "weights": training.whole(model)}


def by_ampatch(
    rank: int,
    order: str,
    kind: str,
    options: dict,
    settings: dict,
    norm: bool = False,
    parts: int = 1,
    shape: tuple[int, ...] = (2,),
    sync: bool = False,
) -> dict:
    model = training.Net(norm)
    options = {**options, "mesh": training.mesh(shape)}
    optimizer = training.managed(model, kind, order, options, **settings)
    losses = training.steps(
        model,
        optimizer,
        training.on_rank(rank),
        lambda loss: amp.scale_loss(loss, optimizer),
        parts=parts,
        sync=sync,
    )
    found = {
        "losses": losses,
        "weights": training.whole(model),
        "shards": {parameter.dtype for parameter in model.parameters()},
        "grads": {parameter.grad.dtype for parameter in model.parameters()},
        "state": {v.dtype for v in model.state_dict().values() if v.is_floating_point()},
        "skips": amp.step_counts(optimizer).skipped,
        "scale": amp.loss_scale(),
    }
    amp.deactivate()
    found["after"] = {parameter.dtype for parameter in model.parameters()}
    return found


def in_one_process(
    level: str, dtype: torch.dtype, kind: str, count: int, norm: bool = False, parts: int = 1
) -> list[torch.Tensor]:
    """The same under ampatch without shards; each step has the batches of all ranks."""
    model = training.Net(norm)
    optimizer = training.MAKE[kind](model.parameters())
    settings = {"loss_scale": 256.0} if dtype is torch.float16 else {}
    amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **settings)
    for step in range(training.STEPS):
        optimizer.zero_grad()
        for rank, part in itertools.product(range(count), range(parts)):
            loss = training.loss_of(model, 1000 * rank + 10 * step + part) / (count * parts)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
    values = training.whole(model)
    amp.deactivate()
    return values


@pytest.mark.parametrize(
    ("kind", "parts", "sync"),
    [("SGD", 2, True), ("AdamW", 1, False), ("AdamW fused", 2, False)],
)
def test_o1_is_one_process_in_float(ranks, kind, parts, sync):
    settings = {"opt_level": "O1", "init_scale": 256.0}
    reference = in_one_process("O0", HALVES[0], kind, 2, parts=parts)
    for rank in ranks(by_ampatch, ORDERS[0], kind, {}, settings, False, parts, (2,), sync):
        assert rank["shards"] == rank["grads"] == rank["state"] == {torch.float32}
        assert rank["skips"] == 0 and rank["scale"] == 256.0
        for ours, plain in zip(rank["weights"], reference, strict=True):
            torch.testing.assert_close(ours, plain, atol=0.01, rtol=0.05)


@pytest.mark.parametrize(
    "order, dtype",
    [
        (ORDERS[0], torch.bfloat16),
        (ORDERS[1], torch.float16),
        pytest.param(ORDERS[0], torch.float16, marks=pytest.mark.slow),
        pytest.param(ORDERS[1], torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_o2_is_fsdp2s_own_policy(ranks, order, dtype):
    """To the bit: the same shards, the same collectives, the same casts of weights."""
    compare_with_own_policy(ranks, order, dtype, "AdamW", 1)


def compare_with_own_policy(ranks, order, dtype, kind, parts, shape=(2,), **options):
    scale = 256.0 if dtype is torch.float16 else 1.0
    settings = {"opt_level": "O2", "dtype": dtype, "loss_scale": scale}
    own = ranks(by_own_policy, dtype, kind, scale, parts, shape)
    ours = ranks(by_ampatch, order, kind, options, settings, False, parts, shape)
    for mine, theirs in zip(ours, own, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=2e-3)
        for one, other in zip(mine["weights"], theirs["weights"], strict=True):
            assert torch.equal(one, other)
        assert mine["shards"] == mine["grads"] == mine["state"] == {torch.float32}
        assert mine["after"] == {torch.float32} and mine["skips"] == 0


@pytest.mark.parametrize("level, dtype", [("O2", torch.float16), ("O3", torch.bfloat16)])
def test_norm_layers_and_one_process(ranks, level, dtype):
    """Batch norms are FP32 at O2, sharded by themselves; as ampatch without shards has it."""
    settings = {"opt_level": level, "dtype": dtype}
    if dtype is torch.float16:
        settings["loss_scale"] = 256.0
    kept = dtype if level == "O3" else torch.float32
    reference = in_one_process(level, dtype, "SGD", 2, norm=True)
    orders = ORDERS if level == "O2" else ORDERS[:1]
    found = [ranks(by_ampatch, order, "SGD", {}, settings, True) for order in orders]
    for rank in itertools.chain(*found):
        assert rank["shards"] == rank["grads"] == rank["after"] == {kept}
        assert rank["state"] == {kept}
        for ours, plain in zip(rank["weights"], reference, strict=True):
            bound = 0.02 if level == "O3" else 2e-3
            torch.testing.assert_close(ours.float(), plain.float(), atol=bound, rtol=0.02)
    for one, other in zip(found[0][0]["weights"], found[-1][0]["weights"], strict=True):
        assert torch.equal(one, other)


def overflow(rank: int, shape: tuple[int, ...], level: str, kind: str, group: bool) -> dict:
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
    same = all(map(torch.equal, weights[0], weights[1]))
    return {"skipped": skipped, "scales": scales, "same": same, "weights": weights[-1]}


@pytest.mark.parametrize(
    ("level", "kind", "group"),
    [("O1", "AdamW fused", True), ("O1", "SGD", False), ("O2", "SGD", False)],
)
def test_an_overflow_in_one_shard_is_decided_by_all_ranks(ranks, level, kind, group):
    check_overflow(ranks(overflow, (2,), level, kind, group))


def check_overflow(found):
    for rank in found:
        assert rank["skipped"] == [False, True, False, False, False] and rank["same"]
        assert rank["scales"] == [256.0, 128.0, 128.0, 128.0, 256.0]
        assert all(map(torch.equal, rank["weights"], found[0]["weights"]))


def clipping(rank: int) -> dict:
    """Gradients of the whole model, and their norm, after they were clipped."""
    model = training.Net()
    optimizer = training.managed(
        model, "SGD", ORDERS[0], {}, opt_level="O2", dtype=torch.bfloat16, loss_scale=64.0
    )
    with amp.scale_loss(training.loss_of(model, rank), optimizer) as scaled:
        scaled.backward()
    grads = [parameter.grad.full_tensor() for parameter in amp.master_params(optimizer)]
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    again = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return {"grads": grads, "norm": norm.full_tensor(), "clipped": again.full_tensor()}


def test_clipping_takes_the_norm_over_all_shards(ranks):
    for rank in ranks(clipping):
        norm = torch.stack([grad.norm() for grad in rank["grads"]]).norm()
        torch.testing.assert_close(rank["norm"], norm)
        assert norm > 0.02 and rank["clipped"].item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_accumulation_without_communication(ranks, reshard):
    """`set_requires_gradient_sync(False)`: sums in FP32, as FSDP2's own policy has them."""
    compare_with_own_policy(
        ranks, ORDERS[1], torch.float16, "SGD", 3, reshard_after_forward=reshard
    )


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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(self.frozen(x))


def train_tied(rank: int, order: str | None, compiled: bool) -> dict:
    """`order` None: FP32 in one process, with the batches of both ranks."""
    model = Tied()
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")

    def made() -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
        return torch.optim.SGD(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "lr": 0.01}], lr=0.1
        )

    settings = {"opt_level": "O2", "dtype": torch.bfloat16, "verbosity": 0}
    if order is None:
        optimizer = made()
        amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    elif order == ORDERS[0]:
        training.shard(model, **training.policy_of("O2", torch.bfloat16))
        optimizer = made()
        amp.initialize(model, optimizer, **settings)
    else:
        amp.initialize(model, **settings)
        training.shard(model, **training.policy_of("O2", torch.bfloat16))
        optimizer = amp.add_optimizers(made())
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        total = 0.0
        for one in [rank] if order else [0, 1]:
            tokens = torch.randint(
                0, 12, (6, 4), generator=torch.Generator().manual_seed(10 * step + one)
            )
            loss = nn.functional.cross_entropy(model(tokens).float().transpose(1, 2), tokens)
            loss = loss if order else loss / 2
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    tied = model.last.weight is model.words.weight
    return {"weights": training.whole(model), "losses": losses, "tied": tied}


@pytest.mark.parametrize(
    "order, compiled",
    [
        (ORDERS[1], False),
        pytest.param(ORDERS[0], False, marks=pytest.mark.slow),
        pytest.param(ORDERS[0], True, marks=pytest.mark.slow),
        pytest.param(ORDERS[1], True, marks=pytest.mark.slow),
    ],
)
def test_tied_frozen_and_checkpointed(ranks, order, compiled):
    reference = train_tied(0, None, False)
    amp.deactivate()
    one, two = ranks(train_tied, order, compiled)
    assert one["tied"] and two["tied"]
    together = [(a + b) / 2 for a, b in zip(one["losses"], two["losses"], strict=True)]
    assert together == pytest.approx(reference["losses"], rel=0.02)
    for ours, plain in zip(one["weights"], reference["weights"], strict=True):
        torch.testing.assert_close(ours, plain, atol=5e-3, rtol=0.05)


def from_meta(rank: int, order: str) -> dict:
    """A model that is made without memory, sharded, and filled then; its buffer is FP32."""
    with torch.device("meta"):
        model = training.Net(norm=True)
        model.register_buffer("place", torch.zeros(4))
    settings = {"opt_level": "O2", "dtype": torch.bfloat16, "verbosity": 0}
    if order == ORDERS[1]:
        amp.initialize(model, **settings)
    training.shard(model, **training.policy_of("O2", torch.bfloat16))
    if order == ORDERS[0]:
        amp.initialize(model, **settings)
    model.to_empty(device="cpu")
    values = training.Net(norm=True).state_dict() | {"place": torch.zeros(4)}
    options = torch.distributed.checkpoint.state_dict.StateDictOptions(full_state_dict=True)
    torch.distributed.checkpoint.state_dict.set_model_state_dict(model, values, options=options)
    optimizer = amp.add_optimizers(training.MAKE["AdamW"](model.parameters()))
    losses = training.steps(
        model, optimizer, training.on_rank(rank), lambda loss: amp.scale_loss(loss, optimizer)
    )
    return {"losses": losses, "weights": training.whole(model)}


@pytest.mark.parametrize("order", [ORDERS[0], pytest.param(ORDERS[1], marks=pytest.mark.slow)])
def test_models_that_are_made_on_the_meta_device(ranks, order):
    """To the bit as a model that was made in memory."""
    made = ranks(by_ampatch, order, "AdamW", {}, {"opt_level": "O2", "dtype": HALVES[0]}, True)
    for ours, theirs in zip(ranks(from_meta, order), made, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert all(map(torch.equal, ours["weights"], theirs["weights"]))


def changes(rank: int) -> list:
    """`initialize` again on a sharded model that has run before; the policy is the user's."""
    model = training.shard(training.Net(norm=True), **training.policy_of("O2", torch.bfloat16))
    with torch.no_grad():
        model(training.batch(0)[0])  # FSDP2 has settled its dtypes, and has gathered the root
    optimizer = training.MAKE["SGD"](model.parameters())
    seen = []

    def look(part: nn.Module, args: tuple) -> None:
        seen.append((part.weight.dtype, args[0].dtype))

    for part in (model.blocks[0].up, model.blocks[0].norm):
        part.register_forward_pre_hook(look)
    found = []
    for level in ("O2", "O1", "O2", ""):
        amp.deactivate()
        if level:
            settings = {"opt_level": level, "dtype": torch.bfloat16, "verbosity": 0}
            amp.initialize(model, optimizer, **settings)
            training.steps(
                model,
                optimizer,
                training.on_rank(rank),
                lambda loss: amp.scale_loss(loss, optimizer),
                count=2,
            )
        seen.clear()
        out = model(training.batch(1)[0])
        model.reshard()
        shards = {parameter.dtype for parameter in model.parameters()}
        found.append((*seen, out.dtype, shards))
    return found


def test_the_policy_stays_the_users_at_every_level(ranks):
    full, half = torch.float32, torch.bfloat16
    by_policy = ((half, half), (full, half), half, {full})
    by_calls = ((half, full), *by_policy[1:])  # O1: after LayerNorm, before the call's cast
    in_float = ((half, half), (full, half), full, {full})  # O2 gives FP32 outputs
    for rank in ranks(changes):
        assert rank == [in_float, by_calls, in_float, by_policy]


def precisions(rank: int, order: str) -> tuple[list, float]:
    """Overrides, parts in FP32, and inputs that half cannot hold."""
    from torch.distributed import fsdp

    model = training.Net()
    settings = {"opt_level": "O2", "verbosity": 0, "overrides": {"blocks.1": "float"}}
    in_float = fsdp.MixedPrecisionPolicy(param_dtype=torch.float32)
    in_half = fsdp.MixedPrecisionPolicy(param_dtype=torch.float16, cast_forward_inputs=False)
    if order == ORDERS[1]:
        amp.initialize(model, **settings)
    fsdp.fully_shard(model.blocks[0], mp_policy=in_half)
    fsdp.fully_shard(model.blocks[1])
    fsdp.fully_shard(model.last, mp_policy=in_float)
    fsdp.fully_shard(model, mp_policy=in_half)
    optimizer = training.MAKE["SGD"](model.parameters())
    if order == ORDERS[0]:
        amp.initialize(model, optimizer, **settings)
    else:
        amp.add_optimizers(optimizer)
    seen = []
    for part in (model.blocks[0].up, model.blocks[1].up, model.last):
        part.register_forward_pre_hook(
            lambda part, args: seen.append((part.weight.dtype, args[0].dtype))
        )
    given = []
    model.first.register_forward_pre_hook(lambda part, args: given.append(args[0].max()))
    inputs = training.batch(rank)[0]
    with amp.scale_loss(model(inputs).square().mean(), optimizer) as scaled:
        scaled.backward()
    inputs[0, 0] = 1e6
    model(inputs)
    return seen[:3], given[1].item()


@pytest.mark.parametrize("order", ORDERS)
def test_parts_in_a_precision_of_their_own(ranks, order):
    full, half = torch.float32, torch.float16
    for seen, largest in ranks(precisions, order):
        assert seen == [(half, half), (full, full), (full, full)]
        assert largest == 1e6


def refusals(rank: int) -> dict:
    from torch.distributed import fsdp

    said, states = {}, []

    def attempt(name: str, act: Any, model: nn.Module) -> None:
        policies = [part._get_fsdp_state()._mp_policy for part in _sharded_parts(model)]
        before = [(p.dtype, p.detach().clone()) for p in model.parameters()]
        try:
            act()
        except amp.AmpatchError as error:
            said[name] = str(error)
        amp.deactivate()
        same = [(p.dtype, p.detach()) for p in model.parameters()]
        states.append(
            all(a[0] is b[0] and (a[1] == b[1]).all() for a, b in zip(before, same, strict=True))
            and policies == [part._get_fsdp_state()._mp_policy for part in _sharded_parts(model)]
        )

    def initialize(model: nn.Module, level: str = "O2", **settings: Any) -> Any:
        optimizer = training.MAKE["SGD"](model.parameters())
        return lambda: amp.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)

    half = training.policy_of("O2")
    model = training.shard(training.Net())
    attempt("no policy", initialize(model), model)
    model = training.shard(training.Net(), **training.policy_of("O2", torch.bfloat16))
    attempt("other half type", initialize(model), model)
    in_float = fsdp.MixedPrecisionPolicy(param_dtype=torch.float32)
    model = training.shard(training.Net(), mp_policy=in_float)
    attempt("whole in FP32", initialize(model), model)
    model = training.Net(norm=True)
    fsdp.fully_shard(model, **half)
    attempt("batch norm", initialize(model), model)
    model = training.shard(training.Net(), **half)
    attempt("override", initialize(model, overrides={"last": "float"}), model)
    model = training.shard(training.Net(), **half)
    attempt("O3", initialize(model, "O3"), model)
    model = training.shard(training.Net().half())
    attempt("O0", initialize(model, "O0"), model)
    model = training.shard(training.Net(), **half)
    attempt("O0 with a policy", initialize(model, "O0"), model)
    model = amp.initialize(training.Net(), opt_level="O2", verbosity=0)
    fsdp.fully_shard(model)
    optimizer = training.MAKE["SGD"](model.parameters())
    attempt("add_optimizers", lambda: amp.add_optimizers(optimizer), model)
    return {"said": said, "same": states}


def _sharded_parts(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "_get_fsdp_state")]


def test_what_contradicts_the_level_is_refused_with_the_policy_to_give(ranks):
    policy = "MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)"
    for rank in ranks(refusals):
        said = rank["said"]
        for name in ("no policy", "other half type", "whole in FP32", "add_optimizers"):
            assert policy in said[name]
        assert "Give fully_shard no mp_policy" in said["O0 with a policy"]
        assert "Shard the BatchNorm1d first, by itself" in said["batch norm"]
        assert "Shard the Linear first, by itself" in said["override"]
        assert "model.to(torch.float16) before fully_shard" in said["O3"]
        assert "model.float() before fully_shard" in said["O0"]
        assert rank["same"] == [True] * 9


# Beside plain parameters, in half from the start, FSDP1


def partly_sharded(rank: int, scale: float | str) -> dict:
    """Only the blocks are sharded; `shift`, a plain parameter, has a gradient of 0.1."""
    from torch.distributed.fsdp import fully_shard

    model = training.Net()
    model.shift = nn.Parameter(torch.zeros(4))
    fully_shard(model.blocks[0])
    optimizer = training.MAKE["SGD"](model.parameters())
    settings = {"loss_scale": scale, "process_group": torch.distributed.group.WORLD}
    amp.initialize(model, optimizer, opt_level="O1", init_scale=256.0, verbosity=0, **settings)
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        loss = training.loss_of(model, 10 * rank + step) + 0.1 * model.shift.sum()
        if scale == "dynamic" and (rank, step) == (0, 1):
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        skipped.append(amp.step_was_skipped(optimizer))
    return {"skipped": skipped, "shift": model.shift.detach().clone()}


@pytest.mark.parametrize("scale", ["dynamic", 128.0])
def test_plain_parameters_beside_sharded_ones(ranks, scale):
    shift = torch.zeros(4, requires_grad=True)
    optimizer = training.MAKE["SGD"]([shift])
    for _ in range(2 if scale == "dynamic" else 3):
        shift.grad = torch.full((4,), 0.1)
        optimizer.step()
    for rank in ranks(partly_sharded, scale):
        assert rank["skipped"] == [False, scale == "dynamic", False]
        torch.testing.assert_close(rank["shift"], shift.detach(), atol=1e-5, rtol=1e-3)


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    """Ten steps on one batch."""
    return training.steps(
        model,
        optimizer,
        lambda step, part: rank,
        lambda loss: amp.scale_loss(loss, optimizer),
        count=10,
    )


def first_version(rank: int, level: str, use_orig_params: bool) -> list[float] | str:
    """FullyShardedDataParallel, the wrapper: its losses, or why it was refused."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(training.Net(), **options)
    optimizer = training.MAKE["SGD"](model.parameters())
    try:
        amp.initialize(model, optimizer, opt_level=level, init_scale=256.0, verbosity=0)
    except amp.AmpatchError as error:
        return str(error)
    return losses_of(model, optimizer, rank)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_first_fsdp(ranks, use_orig_params):
    for losses in ranks(first_version, "O1", use_orig_params):
        assert losses[-1] < losses[0]
    for level in ("O2", "O3"):
        for said in ranks(first_version, level, use_orig_params):
            assert "sharded parameter" in said


def in_half(rank: int, level: str, sharded_first: bool) -> dict:
    """Shards that are half."""
    model, dtype = training.Net(), torch.bfloat16
    settings = {"opt_level": level, "dtype": dtype, "verbosity": 0}
    if sharded_first:
        training.shard(model.to(dtype))
        optimizer = training.MAKE["SGD"](model.parameters())
        amp.initialize(model, optimizer, **settings)
    else:
        amp.initialize(model, **settings)
        training.shard(model)
        optimizer = amp.add_optimizers(training.MAKE["SGD"](model.parameters()))
    shards = {parameter.dtype for parameter in model.parameters()}
    losses = losses_of(model, optimizer, rank)
    amp.deactivate()
    after = {parameter.dtype for parameter in model.parameters()}
    return {"shards": shards, "losses": losses, "after": after}


@pytest.mark.parametrize(
    "level, sharded_first", [("O1", True), ("O2", True), ("O3", True), ("O3", False)]
)
def test_half_shards_stay_half(ranks, level, sharded_first):
    for rank in ranks(in_half, level, sharded_first):
        assert rank["shards"] == rank["after"] == {torch.bfloat16}
        assert rank["losses"][-1] < rank["losses"][0]


# Checkpoints


def sharded_or_not(count: int, order: str, shape: tuple[int, ...]) -> tuple[nn.Module, Any]:
    """A model at O2 and its optimizer, on a mesh of `count` ranks or in one process."""
    model, settings = training.Net(), {"opt_level": "O2", "init_scale": 512.0, "growth_interval": 2}
    if count == 1:
        optimizer = training.MAKE["AdamW"](model.parameters())
        amp.initialize(model, optimizer, verbosity=0, **settings)
        return model, optimizer
    options = {"mesh": training.mesh(shape)}
    return model, training.managed(model, "AdamW", order, options, **settings)


def state_of(model: nn.Module, optimizer: Any) -> dict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    own, of_optimizer = get_state_dict(model, optimizer)
    return {"model": own, "optimizer": of_optimizer, "amp": amp.state_dict()}


def go_on(model: nn.Module, optimizer: Any, rank: int, count: int) -> list[torch.Tensor]:
    """Two more steps, in which all ranks together have the same four batches."""
    for step in range(2):
        optimizer.zero_grad()
        for part in range(4 // count):
            if count > 1:
                model.set_requires_gradient_sync(part == 4 // count - 1)
            number = 100 * step + rank * (4 // count) + part
            with amp.scale_loss(
                training.loss_of(model, number) / (4 // count), optimizer
            ) as scaled:
                scaled.backward()
        optimizer.step()
    return training.whole(model)


def save(rank: int, folder: str, count: int, order: str, shape: tuple[int, ...]) -> dict:
    import torch.distributed.checkpoint as checkpoint

    model, optimizer = sharded_or_not(count, order, shape)
    for step in range(3):
        with amp.scale_loss(training.loss_of(model, 10 * rank + step), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = state_of(model, optimizer)
    checkpoint.save(state, checkpoint_id=folder)
    dtypes = {value.dtype for value in state["model"].values()}
    return {
        "weights": training.whole(model),
        "scale": amp.loss_scale(),
        "dtypes": dtypes,
        "later": go_on(model, optimizer, rank, count),
    }


def load(rank: int, folder: str, count: int, order: str, shape: tuple[int, ...]) -> dict:
    import torch.distributed.checkpoint as checkpoint

    model, optimizer = sharded_or_not(count, order, shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder, no_dist=count == 1)
    checkpoint.state_dict.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    amp.load_state_dict(state["amp"])
    found = {"weights": training.whole(model), "scale": amp.loss_scale()}
    found["later"] = go_on(model, optimizer, rank, count)
    amp.deactivate()
    return found


def check_resume(saved: list[dict], loaded: list[dict]) -> None:
    """The same weights to the bit; the next steps but for the order of sums."""
    for rank in saved:
        assert rank["dtypes"] == {torch.float32} and rank["scale"] == 1024.0
    for rank in loaded:
        assert rank["scale"] == saved[0]["scale"]
        assert all(map(torch.equal, rank["weights"], saved[0]["weights"]))
        for ours, theirs in zip(rank["later"], saved[0]["later"], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_in_one_process_and_back(ranks, tmp_path):
    saved = ranks(save, str(tmp_path), 2, ORDERS[0], (2,))
    check_resume(saved, [load(0, str(tmp_path), 1, "", ())])
    again = ranks(load, str(tmp_path), 2, ORDERS[1], (2,))
    check_resume(saved, again)
    assert all(map(torch.equal, again[0]["later"], saved[0]["later"]))


# Four ranks: one mesh, and HSDP


MESHES = [(4,), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=["one mesh", "HSDP"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("order", ORDERS)
def test_o2_is_fsdp2s_own_policy_on_four_ranks(four_ranks, shape, dtype, order):
    compare_with_own_policy(four_ranks, order, dtype, "AdamW", 2, shape)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_twenty_runs_without_a_hang(request, count):
    """They are equal too: an order that depends on time would show."""
    ranks = request.getfixturevalue("ranks" if count == 2 else "four_ranks")
    settings = {"opt_level": "O2", "init_scale": 256.0}
    found = [
        ranks(by_ampatch, ORDERS[run % 2], "AdamW", {}, settings, True, 2, (count,))
        for run in range(20)
    ]
    assert all(run[0]["losses"] == found[0][0]["losses"] for run in found)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=["one mesh", "HSDP"])
def test_an_overflow_is_decided_by_four_ranks(four_ranks, shape):
    check_overflow(four_ranks(overflow, shape, "O2", "SGD", False))


@pytest.mark.slow
@pytest.mark.parametrize("level, dtype", [("O2", torch.float16), ("O3", torch.bfloat16)])
@pytest.mark.parametrize("shape", MESHES, ids=["one mesh", "HSDP"])
def test_norm_layers_and_one_process_on_four_ranks(four_ranks, level, dtype, shape):
    settings = {"opt_level": level, "dtype": dtype}
    if dtype is torch.float16:
        settings["loss_scale"] = 256.0
    reference = in_one_process(level, dtype, "SGD", 4, norm=True)
    for rank in four_ranks(by_ampatch, ORDERS[1], "SGD", {}, settings, True, 1, shape):
        for ours, plain in zip(rank["weights"], reference, strict=True):
            bound = 0.02 if level == "O3" else 2e-3
            torch.testing.assert_close(ours.float(), plain.float(), atol=bound, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=["one mesh", "HSDP"])
def test_checkpoints_between_two_and_four_ranks(ranks, four_ranks, tmp_path, shape):
    saved = ranks(save, str(tmp_path / "two"), 2, ORDERS[1], (2,))
    check_resume(saved, four_ranks(load, str(tmp_path / "two"), 4, ORDERS[0], shape))
    saved = four_ranks(save, str(tmp_path / "four"), 4, ORDERS[0], shape)
    check_resume(saved, ranks(load, str(tmp_path / "four"), 2, ORDERS[0], (2,)))
