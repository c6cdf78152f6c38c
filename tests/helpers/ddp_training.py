"""A small model, its data and its steps, for tests with several ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from small_training import pass_back
from torch import nn

import ampatch as amp


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=data), torch.randint(0, 3, (8,), generator=data)


def backward(model: nn.Module, optimizers: Any, number: int, weight: float = 1.0) -> None:
    inputs, targets = batch(number)
    pass_back(F.cross_entropy(model(inputs), targets) * weight, optimizers)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights as the model has them, and what the optimizer updates."""
    values = [*model.parameters(), *amp.master_params(optimizer)]
    return [value.detach().float().clone() for value in values]
