"""What is trained to compare accuracies: four small tasks on data that ships in packages.

Which examples are held out depends on no seed; the seed decides the initial
weights and the order of the batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import char_lm

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """One seed's model and optimizer, in FP32, with what trains and judges them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[], float]


@dataclass(frozen=True)
class Task:
    """What is trained, how it is judged, and how a run is made."""

    title: str
    about: str
    metric: str
    places: int  # decimals to show of the metric
    higher_is_better: bool
    steps: int
    uses_adam: bool
    make: Callable[[int, float], Run]  # (seed, Adam's eps)


def _digits_net() -> nn.Module:
    """Two convolutions and two linear layers, for 8 x 8 grey images."""
    layers: list[nn.Module] = []
    for inside, outside in ((1, 12), (12, 24)):
        convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(24 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *head)


def digits(seed: int, eps: float) -> Run:
    """A small conv net by SGD; `eps` is without effect."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    train, test = _split(images, torch.tensor(data.target), stratify=True)
    torch.manual_seed(seed)
    model = _digits_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return Run(model, optimizer, _epochs(train), F.cross_entropy, partial(_accuracy, model, test))


def breast_cancer(seed: int, eps: float) -> Run:
    """A perceptron on 30 measurements per tumour, benign or not."""
    data = load_breast_cancer()
    inputs = torch.tensor(data.data, dtype=torch.float32)
    train, test = _split(inputs, torch.tensor(data.target), stratify=True)
    of_both = _moments(train[0])
    train, test = ((_standardised(x, of_both), y) for x, y in (train, test))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=eps)
    return Run(model, optimizer, _epochs(train), F.cross_entropy, partial(_accuracy, model, test))


def diabetes(seed: int, eps: float) -> Run:
    """A perceptron on 10 measurements per patient; the disease's progress, standardised."""
    data = load_diabetes()
    inputs = torch.tensor(data.data, dtype=torch.float32)
    targets = torch.tensor(data.target, dtype=torch.float32).unsqueeze(1)
    train, test = _split(inputs, targets, stratify=False)
    scales = [_moments(part) for part in train]
    train, test = (tuple(map(_standardised, part, scales)) for part in (train, test))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=eps)
    return Run(model, optimizer, _epochs(train), F.mse_loss, partial(_r_squared, model, test))


def characters(seed: int, eps: float) -> Run:
    """The transformer of examples/char_lm.py, one layer of 32, on windows of 32 characters."""
    length = 32
    train, test = char_lm.load_text("cpu")
    torch.manual_seed(seed)
    model = char_lm.CharLM(length, dim=32, heads=2, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=eps)
    starts = torch.linspace(0, len(test) - length - 1, 256).long()
    inputs, targets = char_lm.batch_at(test, starts, length)

    def held_out() -> float:
        return _character_loss(_predict(model, inputs), targets).item()

    return Run(model, optimizer, _windows(train, length), _character_loss, held_out)


ACCURACY: dict[str, Any] = {
    "metric": "held-out accuracy, %",
    "places": 2,
    "higher_is_better": True,
    "uses_adam": True,
}
TASKS = {
    "digits": Task(
        "Digits: conv net, SGD",
        "1198 images of handwritten digits; held out: 599.",
        steps=250,
        make=digits,
        **{**ACCURACY, "uses_adam": False},
    ),
    "breast_cancer": Task(
        "Breast cancer: perceptron, AdamW",
        "379 tumours, benign or malignant, by 30 measurements; held out: 190.",
        steps=150,
        make=breast_cancer,
        **ACCURACY,
    ),
    "diabetes": Task(
        "Diabetes: perceptron, Adam",
        "Regression of the disease's progress in 294 patients; held out: 148.",
        steps=150,
        make=diabetes,
        **{**ACCURACY, "metric": "held-out R squared", "places": 4},
    ),
    "characters": Task(
        "Characters: transformer, AdamW",
        "The next character in Python's standard library; lower is better. In float16\n"
        "O2 skipped one step a run: the embedding gradient of a frequent character overflowed.",
        steps=300,
        make=characters,
        metric="held-out loss, nats",
        places=4,
        higher_is_better=False,
        uses_adam=True,
    ),
}


def _split(inputs: Tensor, targets: Tensor, *, stratify: bool) -> tuple[Batch, Batch]:
    """Training and held-out examples, two to one."""
    train, test = train_test_split(
        range(len(targets)),
        test_size=1 / 3,
        random_state=0,
        stratify=targets if stratify else None,
    )
    return (inputs[train], targets[train]), (inputs[test], targets[test])


def _moments(values: Tensor) -> Batch:
    """Mean and standard deviation per column."""
    return values.mean(0), values.std(0)


def _standardised(values: Tensor, moments: Batch) -> Tensor:
    return (values - moments[0]) / moments[1]


def _epochs(data: Batch, size: int = 64) -> Iterator[Batch]:
    """Batches without end: all examples in a new order, again and again."""
    inputs, targets = data
    while True:
        for chosen in torch.randperm(len(targets)).split(size):
            yield inputs[chosen], targets[chosen]


def _windows(text: Tensor, length: int, size: int = 16) -> Iterator[Batch]:
    while True:
        yield char_lm.batch_at(text, torch.randint(len(text) - length, (size,)), length)


def _character_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def _predict(model: nn.Module, inputs: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(inputs).float()


def _accuracy(model: nn.Module, test: Batch) -> float:
    """Per cent."""
    return 100 * (_predict(model, test[0]).argmax(1) == test[1]).float().mean().item()


def _r_squared(model: nn.Module, test: Batch) -> float:
    """Share of the targets' variance that the model explains."""
    error = (_predict(model, test[0]) - test[1]).square().mean()
    return 1 - (error / test[1].var(correction=0)).item()
