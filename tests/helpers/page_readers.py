"""What the readers of a page have already: the names that its snippets begin with.

`READERS` has them by framework.
"""

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import ampatch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x).relu())
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


def of_any_page() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return {
        "torch": torch,
        "nn": nn,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": functional.cross_entropy,
        "loader": [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(4)],
    }


def of_docstrings() -> dict[str, Any]:
    names = of_any_page()
    first, other = nn.Linear(8, 8), nn.Linear(8, 3)
    names |= {"generator": first, "discriminator": other, "StepLR": StepLR, "ampatch": ampatch}
    return names | {"first": torch.optim.SGD(first.parameters(), lr=0.1)}


def of_several_devices() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"torch": torch, "nn": nn, "Model": Model, "model": model, "optimizer": optimizer}


def loader() -> DataLoader:
    return DataLoader([(torch.randn(8), number % 3) for number in range(16)], 4)


def of_lightning() -> dict[str, Any]:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 3)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return {"module": Module(), "loader": loader()}


def of_transformers() -> dict[str, Any]:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 3)

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(inputs)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    rows = [{"inputs": torch.randn(8), "labels": number % 3} for number in range(16)]
    return {"model": Classifier(), "rows": rows}


def of_accelerate() -> dict[str, Any]:
    names = of_any_page()
    return names | {"loader": loader(), "scheduler": StepLR(names["optimizer"], 30)}


READERS: dict[str, Callable[[], dict[str, Any]]] = {
    "accelerate": of_accelerate,
    "fabric": lambda: of_any_page() | {"loader": loader()},
    "lightning": of_lightning,
    "transformers": of_transformers,
}


def beginning(framework: str) -> dict[str, Any]:
    return READERS.get(framework, of_any_page)()


def run_on_rank(rank: int, texts: list[str], folder: str) -> list[tuple]:
    """Run the snippets of a page and train what they have made.

    One with `initialize` begins anew, with the imports of those before it.  Returned are the losses
    of each beginning, and the sums of its weights.
    """
    before = Path.cwd()
    os.chdir(folder)
    reader = sys.modules["reader"] = types.ModuleType("reader")  # a module, as a script is
    names, results = vars(reader), []
    try:
        for text, following in zip(texts, [*texts[1:], "initialize("], strict=True):
            if "initialize(" in text:
                ampatch.deactivate()
                names |= of_several_devices()
            exec(compile(text, "a page on several devices", "exec"), names)
            if "initialize(" in following:
                results.append(_trained(names["model"], names["optimizer"]))
        return results
    finally:
        os.chdir(before)
        del sys.modules["reader"]


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list, list]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 8), torch.randint(3, (16,))
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).float(), targets)
        with ampatch.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [_whole(weight).double().sum().item() for weight in model.parameters()]


def _whole(weight: Any) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight
