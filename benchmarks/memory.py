"""Peak tensor memory of a training step: FP32, autocast + GradScaler, O1, O2, O3, pure half.

    python benchmarks/memory.py [--out FILE.md]

Counted, not sampled: a dispatch mode follows every storage that an operator
returns from its making to its death, so that a run repeats to the byte.
Scratch space inside a kernel is not seen.  Weights, optimizer state, gradients,
activations and the batch all count.
"""

from __future__ import annotations

import argparse
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workers import machine

import ampatch as amp

REFERENCE = "autocast + GradScaler"
SYSTEMS = ["FP32", REFERENCE, "O1", "O2", "O3", "pure half"]
WARM_UP = 2  # steps until all optimizer state is there

Batch = tuple[Tensor, Tensor]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensor storages made while it is on.

    `now` is what is alive, `peak` the most that was since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._note(value.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def died(reference: weakref.ref) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)


class Recurrent(nn.Module):
    """Two LSTM layers and a classifier on the last output."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Encoder(nn.Module):
    """A transformer encoder and a classifier on the mean of its outputs."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def mlp(batch: int = 512, width: int = 256) -> tuple[nn.Module, Batch]:
    """Eight Linears."""
    layers: list[nn.Module] = []
    for _ in range(7):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, (torch.randn(batch, width), torch.randint(0, 10, (batch,)))


def conv_net(batch: int = 16, width: int = 64) -> tuple[nn.Module, Batch]:
    """Convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for inputs in (3, width, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*layers), (torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,)))


def transformer(batch: int = 16, width: int = 128) -> tuple[nn.Module, Batch]:
    """Four encoder layers over 32 positions."""
    return Encoder(width, 4, 10), (torch.randn(batch, 32, width), torch.randint(0, 10, (batch,)))


def lstm(batch: int = 32, width: int = 128) -> tuple[nn.Module, Batch]:
    """Two LSTM layers over 32 positions."""
    return Recurrent(width, 10), (torch.randn(batch, 32, width), torch.randint(0, 10, (batch,)))


MODELS = {
    "MLP, 8 layers": mlp,
    "conv net with BatchNorm": conv_net,
    "transformer encoder": transformer,
    "LSTM": lstm,
}


def peak_bytes(
    build: Callable[[], tuple[nn.Module, Batch]],
    system: str,
    dtype: torch.dtype = torch.bfloat16,
    **adam: Any,
) -> int:
    """The most bytes of tensors alive at once during a training step with Adam.

    `build` makes the model and a batch; `adam` are further arguments of Adam.
    """
    gc.collect()
    gc.disable()  # what only the collector frees counts, and at the same place each time
    try:
        with LiveBytes() as live:
            torch.manual_seed(0)
            step = make_step(*build(), system, dtype, adam)
            for _ in range(WARM_UP):
                step()
            live.peak = live.now
            step()
            return live.peak
    finally:
        amp.deactivate()
        gc.enable()


def make_step(
    model: nn.Module, batch: Batch, system: str, dtype: torch.dtype, adam: dict[str, Any]
) -> Callable[[], None]:
    """The function that does one training step under `system`."""
    inputs, targets = batch
    if system == "pure half":
        model, inputs = model.to(dtype), inputs.to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **adam)
    if system == REFERENCE:
        return _autocast_step(model, optimizer, inputs, targets, dtype)
    if system.startswith("O"):
        return _ampatch_step(model, optimizer, inputs, targets, dtype, system)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def _autocast_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
) -> Callable[[], None]:
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _ampatch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    level: str,
) -> Callable[[], None]:
    scale = 1.0 if level == "O3" else "dynamic"
    amp.initialize(model, optimizer, opt_level=level, dtype=dtype, loss_scale=scale, verbosity=0)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step


def report(dtype: torch.dtype) -> str:
    """The table, in Markdown."""
    lines = [
        f"Peak tensor memory of a training step relative to {REFERENCE}, {dtype}, Adam, counted.",
        f"{machine()}.",
        "",
        "| | MB | " + " | ".join(SYSTEMS) + " |",
        "|---" * (len(SYSTEMS) + 2) + "|",
    ]
    for name, build in MODELS.items():
        peaks = {system: peak_bytes(build, system, dtype) for system in SYSTEMS}
        base = peaks[REFERENCE]
        cells = [f"{peaks[system] / base:.3f}" for system in SYSTEMS]
        lines.append(f"| {name} | {base / 2**20:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Count, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = report(torch.bfloat16)  # float16 takes as many bytes, but has no LSTM on every CPU
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
