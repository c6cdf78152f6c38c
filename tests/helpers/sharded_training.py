"""Training on sharded models (`fully_shard`): by ampatch, by FSDP2 alone, and in one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ampatch as amp

STEPS = 5
MAKE = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


class NormInFloat(nn.LayerNorm):
    """LayerNorm in FP32 inside, as ampatch has it on the CPU at O2 and O3."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class Block(nn.Module):
    """Half of a transformer's block, or with `norm` a batch norm in the middle."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width) if norm else nn.Identity()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.norm(self.up(self.before(x)))))


class Net(nn.Module):
    def __init__(self, norm: bool = False, width: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width, norm) for _ in range(2))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=data), torch.randint(0, 4, (8,), generator=data)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    inputs, targets = batch(number)
    return F.cross_entropy(model(inputs).float(), targets)


def shard(model: Net, **options: Any) -> Net:
    """As FSDP2's users do: each block, then the root; batch norms by themselves, in FP32."""
    from torch.distributed.fsdp import fully_shard

    of_norms = {name: option for name, option in options.items() if name != "mp_policy"}
    for block in model.blocks:
        if isinstance(getattr(block, "norm", None), nn.BatchNorm1d):
            fully_shard(block.norm, **of_norms)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def policy_of(level: str, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)} if level == "O2" else {}


def managed(
    model: nn.Module, make: Any, order: str, options: dict[str, Any], **settings: Any
) -> torch.optim.Optimizer:
    settings = {"verbosity": 0, **settings}
    policy = policy_of(settings["opt_level"], settings.get("dtype", torch.float16))
    options, make = {**policy, **options}, MAKE.get(make, make)
    if settings["opt_level"] == "O3":
        model.to(settings.get("dtype", torch.float16))
    if order == "sharded first":
        shard(model, **options)
        optimizer = make(model.parameters())
        amp.initialize(model, optimizer, **settings)
        return optimizer
    amp.initialize(model, **settings)
    shard(model, **options)
    return amp.add_optimizers(make(model.parameters()))


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_of: Callable[[int, int], int],
    count: int = STEPS,
    parts: int = 1,
    sync: bool = False,
    scale: Any = None,
) -> list[float]:
    """Train on the batches `data_of(step, part)`; returns the losses.

    Of several parts each is reduced over ranks with `sync`, otherwise their sum.  `scale(loss)` is
    a context manager that gives the loss for `backward`, in place of `scale_loss`.
    """
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        for part in range(parts):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(sync or part == parts - 1)
            loss = loss_of(model, data_of(step, part)) / parts
            with scale(loss) if scale else amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        losses.append(loss.item() * parts)
    return losses


def of_rank(rank: int) -> Callable[[int, int], int]:
    """The numbers of a rank's batches."""
    return lambda step, part: 1000 * rank + 10 * step + part


def of_ranks(count: int, parts: int) -> Callable[[int, int], int]:
    """Those of all ranks, as parts in one process."""
    return lambda step, part: of_rank(part // parts)(step, part % parts)


def whole(model: nn.Module) -> list[torch.Tensor]:
    """The values of a model's parameters, put together from all ranks, in FP32."""
    results = []
    for parameter in model.parameters():
        value = parameter.detach()
        results.append((value.full_tensor() if hasattr(value, "full_tensor") else value).float())
    return [value.clone() for value in results]


def mesh(shape: tuple[int, ...]) -> Any:
    """A mesh of CPUs: one dimension shards, the first of two replicates (HSDP)."""
    names = ("replicate", "shard")[-len(shape) :]
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
