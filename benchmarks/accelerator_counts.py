"""Exact counts per training step on a fake accelerator: what a GPU would be asked to do.

    python benchmarks/accelerator_counts.py [--wide] [--out FILE.md]

Launches are operators that give work to the device: views, allocations and metadata are none, and
a call on a list of tensors (`_foreach_*`, a fused optimizer) is one, as on CUDA.  An operator that
takes several kernels on CUDA (a norm's backward, say) counts as one, so these are no counts of
kernels, but what a system adds to FP32 is: casts and calls on lists take one kernel each (for lists
of up to some 20 million elements).  A wait is whatever makes the host wait for the device.

The models are those of `gpu.py` in depth and structure, narrow; with `--wide` they have their own
width (7 GB of memory).  The inputs are tiny.  Needs a C++ compiler: the device is built from
`tests/helpers/fake_accelerator`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpu_models import LanguageModel, resnet50
from systems import AUTOCAST, FP32
from torch import Tensor, nn
from workers import machine

import ampatch as amp

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import fake_accelerator
from fake_accelerator import NAME, Counts, counted

SYSTEMS = [FP32, AUTOCAST, "O1", "O2", "O3"]
OPTIMIZERS = {"fused": {"fused": True}, "ordinary": {}}
HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
INIT_SCALE = 256.0  # so that no step is skipped
WARM_UP = 4


class Size(NamedTuple):
    """Width of a convolutional net, and of the two transformers."""

    convolutions: int
    gpt: int
    bert: int
    vocabulary: int


NARROW, WIDE = Size(8, 24, 32, 64), Size(64, 768, 1024, 30528)


def images(size: Size) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """ResNet-50."""
    inputs, targets = torch.randn(2, 3, 64, 64), torch.tensor([1, 2])
    return resnet50(width=size.convolutions), _classified(inputs, targets)


def _classified(inputs: Tensor, targets: Tensor) -> Callable[[nn.Module], Tensor]:
    inputs, targets = inputs.to(NAME), targets.to(NAME)
    return lambda model: F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _text(width: int, heads: int, layers: int, vocabulary: int, causal: bool) -> tuple:
    words = torch.randint(0, vocabulary, (2, 8))
    model = LanguageModel(width, heads, layers, vocabulary, 8, causal)
    return model, _classified(words, words.roll(-1, 1))


MODELS = {
    "ResNet-50": images,
    "GPT-2 small, 12 layers": lambda size: _text(size.gpt, 12, 12, size.vocabulary, True),
    "BERT large, 24 layers": lambda size: _text(size.bert, 16, 24, size.vocabulary, False),
}


def make_step(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    system: str,
    optimizer: str,
    dtype: torch.dtype,
) -> Callable[[], None]:
    """The function that does one step of AdamW; the loss is scaled in float16 alone."""
    own = torch.optim.AdamW(model.parameters(), lr=1e-5, **OPTIMIZERS[optimizer])
    if system in (FP32, AUTOCAST):
        is_on = system == AUTOCAST
        is_scaled = is_on and dtype is torch.float16
        scaler = torch.amp.GradScaler(NAME, init_scale=INIT_SCALE, enabled=is_scaled)

        def step() -> None:
            own.zero_grad()
            with torch.autocast(NAME, dtype=dtype, enabled=is_on):
                loss = loss_of(model)
            scaler.scale(loss).backward()
            scaler.step(own)
            scaler.update()

        return step
    amp.initialize(model, own, opt_level=system, dtype=dtype, init_scale=INIT_SCALE, verbosity=0)

    def ours() -> None:
        own.zero_grad()
        with amp.scale_loss(loss_of(model), own) as scaled_loss:
            scaled_loss.backward()
        own.step()

    return ours


def count(
    name: str, system: str, optimizer: str, dtype: torch.dtype, size: Size = NARROW
) -> tuple[Counts, int]:
    """What one step asks of the device, after some to warm up; and the number of parameters."""
    torch.manual_seed(0)
    model, loss_of = MODELS[name](size)
    model.to(NAME).train()
    try:
        step = make_step(model, loss_of, system, optimizer, dtype)
        for _ in range(WARM_UP):
            step()
        before = [parameter.abs().sum().item() for parameter in model.parameters()]
        with counted() as counts:
            step()
        after = [parameter.abs().sum().item() for parameter in model.parameters()]
        if system != "O3":  # there AdamW's eps is 0 in float16, and NaN follows; it skips nothing
            assert before != after and all(map(math.isfinite, after)), (name, system, dtype)
    finally:
        amp.deactivate()
    return counts, len(list(model.parameters()))


def report(size: Size, optimizers: list[str], dtypes: list[str]) -> str:
    """The table, in Markdown."""
    lines = [
        "Per training step of AdamW: launches, of them casts of one tensor and copies of lists; "
        "host waits; copies between host and device.",
        f"{machine()}.",
        "",
        "| | parameters | dtype | optimizer | system | launches | more than FP32 | casts "
        "| copies of lists | waits | uploads | downloads |",
        "|---" * 12 + "|",
    ]
    for name in MODELS:
        for optimizer in optimizers:
            plain, parameters = count(name, FP32, optimizer, torch.float32, size)
            lines.append(_row(name, parameters, "float32", optimizer, FP32, plain, plain))
            for dtype in dtypes:
                for system in SYSTEMS[1:]:
                    found, _ = count(name, system, optimizer, HALF_TYPES[dtype], size)
                    row = _row(name, parameters, dtype, optimizer, system, found, plain)
                    lines.append(row)
                    print(row, flush=True)
    return "\n".join(lines) + "\n"


def _row(
    name: str,
    parameters: int,
    dtype: str,
    optimizer: str,
    system: str,
    found: Counts,
    plain: Counts,
) -> str:
    return (
        f"| {name} | {parameters} | {dtype} | {optimizer} | {system} | {found.launches} "
        f"| {found.launches - plain.launches:+d} | {found.casts} | {found.list_copies} "
        f"| {found.waits} | {found.uploads} | {found.downloads} |"
    )


def main() -> None:
    """Count, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wide", action="store_true", help="models of their own width")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--dtypes", default=",".join(HALF_TYPES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    fake_accelerator.load()
    size = WIDE if options.wide else NARROW
    text = report(size, options.optimizers.split(","), options.dtypes.split(","))
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
