"""A process that trains with ampatch under a torch that lacks a private name.

It reads names, one a line, and forks for each: torch is imported once, ampatch in each child.
An empty line means that nothing is lacking.  It answers each line with one line of JSON: what
`train` returned, or `{"error": ...}`.  A name in front of which "plain " stands is lacking in
the training of a model without a recurrent layer.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import private_names
import torch
import torch.distributed
import torch.nn.functional as F
import torch.utils._device
import torch.utils.checkpoint
import wrapt  # noqa: F401


def train(recurrent: bool) -> dict:
    """Two steps at O1 and at O2, a look at what is cast, and everything taken out again."""
    import ampatch

    originals = [F.linear, torch.exp, torch.Tensor.matmul]
    losses = []
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), Head(recurrent))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = ampatch.initialize(
            model, optimizer, opt_level=level, dtype="bfloat16", loss_scale="dynamic", verbosity=0
        )
        x = torch.randn(8, 4)
        for _ in range(2):
            loss = model(x).float().square().mean()
            with ampatch.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        saved = model.state_dict()
        assert all(value.dtype is not torch.bfloat16 for value in saved.values())
        with ampatch.report(model):
            losses.append(model(x).float().square().mean().item())
        ampatch.deactivate()
    assert [F.linear, torch.exp, torch.Tensor.matmul] == originals
    assert model(x).dtype is torch.float32
    return {"losses": losses}


class Head(torch.nn.Module):
    """A linear layer, after a recurrent one if asked for."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.recurrent = torch.nn.RNN(4, 4) if recurrent else None
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers on `x`."""
        return self.linear(x if self.recurrent is None else self.recurrent(x)[0])


def answer(line: str) -> dict:
    """What `train` returns in this process, or the error."""
    name = line.removeprefix("plain ").strip()
    try:
        if name:
            private_names.take_away(name)
        return train(recurrent=not line.startswith("plain "))
    except BaseException:
        return {"error": traceback.format_exc()}


def main() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # torch imports Dynamo for it
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, json.dumps(answer(line)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            found = pipe.read().decode()
        os.waitpid(child, 0)
        print(found or json.dumps({"error": "the process died"}), flush=True)


if __name__ == "__main__":
    main()
