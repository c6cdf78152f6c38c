"""Tensor parallel: DTensors at every level, as one process with that level trains."""

import contextlib
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks, slow
from torch import Tensor, nn

import ampatch as amp

pytest.importorskip("torch.distributed.tensor.debug", reason="torch without torch.distributed")
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tensor_parallel
from torch.distributed.tensor.debug import CommDebugMode


@pytest.fixture(params=["ranks", slow("four_ranks")])
def some_ranks(request) -> Ranks:
    return request.getfixturevalue(request.param)


KINDS = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
NO_KERNEL = "O3", "fused"
WORDS, STEPS = 16, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 8)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.scores = nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.narrow(F.relu(self.wide(self.norm(x))))
        return self.scores(x)


@dataclasses.dataclass(frozen=True)
class Run:
    """What is asked of a training run."""

    level: str = "O1"
    dtype: torch.dtype = torch.float16
    enabled: bool = True  # False is without ampatch
    order: str = "parallelize first"
    kind: str = "for-loop"
    micro: int = 1
    delay: bool = False
    clip: float | None = None
    poisoned: tuple[int, ...] = ()
    losses_are_parallel: bool = False
    tied: bool = False
    partly: bool = False
    autocast: bool = False
    loss_scale: str | None = None
    counts: bool = False  # collectives are counted


def parallel(model: Net, mesh: DeviceMesh, run: Run) -> Net:
    plan = {
        "words": tensor_parallel.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        "norm": tensor_parallel.SequenceParallel(),
        "wide": tensor_parallel.ColwiseParallel(),
        "narrow": tensor_parallel.RowwiseParallel(output_layouts=Shard(1)),
        "scores": tensor_parallel.ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if run.losses_are_parallel else Replicate(),
            use_local_output=not run.losses_are_parallel,
        ),
    }
    if run.partly:  # plain parameters beside DTensors
        plan = {
            "wide": tensor_parallel.ColwiseParallel(),
            "narrow": tensor_parallel.RowwiseParallel(),
        }
    else:
        inputs = tensor_parallel.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        tensor_parallel.parallelize_module(model.wide, mesh, inputs)
    tensor_parallel.parallelize_module(model, mesh, plan)
    if run.tied:
        model.scores.weight = model.words.weight
    return model


def data(step: int) -> Tensor:
    return torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(step))


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def optimizer_of(model: Net, run: Run) -> torch.optim.Optimizer:
    if run.level == "O3":  # Adam's eps is 0 in float16
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **KINDS[run.kind])
    return torch.optim.AdamW(model.parameters(), lr=0.01, **KINDS[run.kind])


def start(run: Run, mesh: DeviceMesh | None) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    settings = {
        **{"opt_level": run.level, "dtype": run.dtype, "loss_scale": run.loss_scale},
        **{"init_scale": 256.0, "verbosity": 0, "enabled": run.enabled},
    }
    if run.order == "initialize first" and mesh is not None:
        amp.initialize(model, **settings)
        parallel(model, mesh, run)
        return model, amp.add_optimizers(optimizer_of(model, run))
    if mesh is not None:
        parallel(model, mesh, run)
    elif run.tied:
        model.scores.weight = model.words.weight
    optimizer = optimizer_of(model, run)
    amp.initialize(model, optimizer, **settings)
    return model, optimizer


def loss_of(model: Net, x: Tensor, run: Run) -> Tensor:
    with torch.autocast("cpu", run.dtype) if run.autocast else contextlib.nullcontext():
        scores = model(x).flatten(0, 1)
    return F.cross_entropy(scores.float(), x.flatten()) / run.micro


def backward(model: Net, loss: Tensor, optimizer: Any, delay=False, bad=False) -> None:
    """`bad`: with an inf in the last element of this rank's part of a gradient."""
    with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
        scaled_loss.backward()
        if bad:
            grad = model.wide.weight.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.view(-1)[-1] = float("inf")


def train(rank: int, run: Run) -> dict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    model, optimizer = start(run, mesh)
    results: dict = {"losses": [], "skipped": [], "scales": [], "collectives": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        with contextlib.ExitStack() as stack:
            if run.counts:
                seen = stack.enter_context(CommDebugMode())
            if run.losses_are_parallel and mesh is not None:
                stack.enter_context(tensor_parallel.loss_parallel())
            for part in range(run.micro):
                x = data(10 * step + part)
                loss = loss_of(model, x, run)
                bad = step in run.poisoned and rank == (mesh.size() if mesh else 1) - 1
                backward(model, loss, optimizer, run.delay and part < run.micro - 1, bad)
            if run.clip is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), run.clip)
                results["norms"].append(full(norm).item())
            optimizer.step()
        results["losses"].append(full(loss).item())
        if run.counts:
            results["collectives"].append(seen.get_total_counts())
        results["skipped"].append(amp.step_was_skipped(optimizer))
        results["scales"].append(amp.loss_scale() if run.enabled else 1.0)
    results["kinds"] = {type(parameter).__name__ for parameter in model.parameters()}
    results["weights"] = [full(value) for value in model.state_dict().values()]
    results["placed"] = placements_of(optimizer)
    amp.deactivate()
    results["after"] = [full(parameter) for parameter in model.state_dict().values()]
    held = optimizer.param_groups[0]["params"]
    results["own"] = [p is q for p, q in zip(model.parameters(), held)]
    return results


def placements_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """Of each DTensor that the optimizer steps on: its placements and those of its gradient."""
    params = optimizer.param_groups[0]["params"]
    return [(str(p.placements), str(p.grad.placements)) for p in params if isinstance(p, DTensor)]


@functools.cache
def in_one_process(run: Run) -> dict:
    return train(0, run)


def several(rank: int, runs: list[Run]) -> list[dict]:
    return [train(rank, run) for run in runs]


BOUNDS = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of losses, and relative to the largest weight of all weights: what half rounds elsewhere."""


def assert_close(ours: dict, reference: dict, dtype: torch.dtype) -> None:
    bound = BOUNDS[dtype]
    torch.testing.assert_close(
        torch.tensor(ours["losses"]), torch.tensor(reference["losses"]), rtol=bound, atol=bound
    )
    for first, other in zip(ours["weights"], reference["weights"], strict=True):
        torch.testing.assert_close(first, other, rtol=bound, atol=bound)


LEVELS = [(level, dtype) for level in ("O0", "O1", "O2", "O3") for dtype in BOUNDS]


@pytest.mark.parametrize(
    "level, dtype", [row if row == ("O2", torch.float16) else slow(*row) for row in LEVELS]
)
def test_as_in_one_process(some_ranks, level, dtype):
    """In both orders, with the collectives of FP32 and one for the overflow flag."""
    first = Run(level, dtype, counts=True)
    later = dataclasses.replace(first, order="initialize first")
    plain = dataclasses.replace(first, enabled=False, autocast=level == "O1")
    results = some_ranks(several, [first, later, plain])
    first_order, other, without = results[0]
    assert_close(first_order, in_one_process(Run(level, dtype)), dtype)
    if level in ("O0", "O1"):
        assert_close(first_order, without, dtype)
        assert first_order["losses"] == without["losses"]
    for run in (first_order, other, *(rank[0] for rank in results[1:])):
        assert run["losses"] == first_order["losses"]
        assert all(map(torch.equal, run["weights"], first_order["weights"]))
        assert run["scales"] == first_order["scales"] and not any(run["skipped"])
        assert run["kinds"] == {"DTensor"} and all(run["own"])
        kept = dtype if level == "O3" else torch.float32
        assert {value.dtype for value in run["weights"]} == {kept}
        if level == "O3":  # it has another optimizer than the run without
            continue
        assert all(map(torch.equal, run["after"], run["weights"]))
        assert run["placed"] == without["placed"]
        checks = dtype is torch.float16 and level in ("O1", "O2")
        assert run["collectives"] == [count + checks for count in without["collectives"]]


BAD = {"poisoned": (1,), "loss_scale": "dynamic"}  # an inf in one shard
SITUATIONS = [
    {"micro": 2},
    {"micro": 2, "delay": True},
    {"losses_are_parallel": True},
    {"tied": True},
    {"partly": True},
    {"kind": "foreach", "clip": 0.1},
    {"kind": "fused"},
    *({"kind": kind, **BAD} for kind in KINDS),
]


@pytest.mark.parametrize(
    "level, dtype", [row if row == ("O2", torch.float16) else slow(*row) for row in LEVELS[2:]]
)
def test_situations(some_ranks, level, dtype):
    runs = [Run(level, dtype, **settings) for settings in SITUATIONS]
    runs = [run for run in runs if (level, run.kind) != NO_KERNEL]
    for run, *results in zip(runs, *some_ranks(several, runs), strict=True):
        check(run, results)


def check(run: Run, results: list[dict]) -> None:
    reference, bound = in_one_process(run), 5 * BOUNDS[run.dtype]
    for rank in results:
        assert_close(rank, reference, run.dtype)
        assert all(map(torch.equal, rank["weights"], results[0]["weights"]))
        assert all(weight.isfinite().all() for weight in rank["weights"])
        assert rank["norms"] == pytest.approx(reference["norms"], rel=bound)
        assert rank["skipped"] == [step in run.poisoned for step in range(STEPS)]
        assert not run.poisoned or rank["scales"] == [256.0, 128.0, 128.0]


def under_ddp(rank: int, level: str, group: bool, expected: list[float] | str) -> None:
    """DDP with a mesh takes DTensors out of the model.  `expected`: losses, or what is refused."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "parts"))
    model = parallel(Net(), mesh["parts"], Run())
    is_refused = isinstance(expected, str)
    error = pytest.raises(amp.AmpatchError, match=expected if is_refused else "")
    with error if is_refused else contextlib.nullcontext():
        if level != "O1":
            amp.initialize(model, opt_level=level, verbosity=0)
        wrapped = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["data"])
        optimizer = optimizer_of(wrapped, Run())
        shared = dist.group.WORLD if group else None
        amp.initialize(wrapped, optimizer, init_scale=256.0, process_group=shared, verbosity=0)
    for step in () if is_refused else range(3):
        optimizer.zero_grad()
        loss = loss_of(wrapped, data(10 * step), Run())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            if step == 1 and rank == 1:
                optimizer.param_groups[0]["params"][-1].grad[-1] = float("inf")
        optimizer.step()
        assert loss.item() == pytest.approx(expected[step], rel=4e-3)
        assert amp.step_was_skipped(optimizer) is (step == 1)


def test_ddp_around_tensor_parallel(ranks):
    """At O1 with a process group; without one, and with half copies, it is refused."""
    reference = in_one_process(Run("O1", poisoned=(1,), loss_scale="dynamic"))
    ranks(under_ddp, "O1", True, reference["losses"])
    ranks(under_ddp, "O1", False, "process_group=torch.distributed.group.WORLD")
    ranks(under_ddp, "O2", True, '(?s)half copies of DTensors.*opt_level="O1"')
