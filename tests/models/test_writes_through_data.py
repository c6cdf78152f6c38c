"""O2: a forward that writes through `.data` of its weights, in whichever of its forwards."""

import pytest
import torch
from torch import nn

import ampatch

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Writing(nn.Module):
    """A quantizer sets its step once, or a momentum encoder goes on, from forward `first` on."""

    def __init__(self, first: int, once: bool, way: str):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.count, self.first, self.once, self.way = 0, first, once, way

    def forward(self, x):
        self.count += 1
        if self.count == self.first or (self.count > self.first and not self.once):
            new = self.key.weight.detach() * 0.5 + self.query.weight.detach() * 0.5
            if self.way == "copy_":
                self.key.weight.data.copy_(new)
            elif self.way == "mul_":
                self.key.weight.data.mul_(0.5).add_(self.query.weight.data, alpha=0.5)
            else:
                self.key.weight.data = new
        return self.query(x) + self.key(x)


@pytest.mark.parametrize("way", ["copy_", "mul_", "="])
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    "first, mode",
    [
        *((first, torch.enable_grad) for first in (1, 2, 5, 10)),
        *((first, torch.no_grad) for first in (1, 2)),
        (1, torch.inference_mode),
    ],
)
def test_no_write_is_lost(first, mode, once, way):
    """Values are looked at in the forwards 1, 10, 100, ... with a graph and without; those of a
    module that writes in all that follow.
    """
    plain = Writing(first, once, way)
    model = ampatch.initialize(
        Writing(first, once, way), opt_level="O2", dtype="bfloat16", verbosity=0
    )
    begun = plain.key.weight.detach().clone()
    for _ in range(first + 2):
        with mode():
            plain(X)
            model(X)
        torch.testing.assert_close(model.key.weight, plain.key.weight, atol=8e-3, rtol=8e-3)
    assert not torch.allclose(plain.key.weight, begun, atol=0.05)
    assert torch.equal(model.query.weight, plain.query.weight)  # read through .data alone


def test_a_compiled_forward_reads_data():
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.weight.data.abs().max()

    model = ampatch.initialize(Reading(8, 8), opt_level="O2", dtype="bfloat16", verbosity=0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X), atol=0.02, rtol=0.02)


def test_data_of_other_tensors_is_as_it_was():
    model = ampatch.initialize(nn.Linear(8, 8), opt_level="O2", dtype="bfloat16", verbosity=0)
    x = X.clone()
    x.data.zero_()
    assert not x.any()
    x.data = torch.ones(2)
    assert x.tolist() == [1.0, 1.0]
    model.weight.data.zero_()
    assert model(X).std(0).eq(0).all()


class Asking(nn.Linear):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("block", [ampatch.disable_casts, lambda: ampatch.precision("float")])
def test_a_block_that_changes_nothing_is_said_once(level, block, caplog):
    model = ampatch.initialize(Asking(8, 8), opt_level=level, dtype="bfloat16")
    caplog.clear()
    with block():
        model(X)
        model(X)
    said = [message for message in caplog.messages if "disable_casts" in message]
    assert len(said) == (level != "O1")
    if said:
        assert said[0].startswith("Asking is called inside") and f"at {level}" in said[0]
        assert "ampatch.unwrap(model)" in said[0] and "overrides=" in said[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_returns_data(backend):
    ampatch.initialize(nn.Linear(2, 2), opt_level="O2", dtype="bfloat16", verbosity=0)
    compiled = torch.compile(lambda x: (x.data, x + 1), backend=backend)
    data, _ = compiled(torch.ones(2, requires_grad=True))
    assert data.tolist() == [1.0, 1.0] and not data.requires_grad


def test_data_cannot_be_deleted():
    with pytest.raises(RuntimeError, match="Deleting tensor data"):
        del X.clone().data
    ampatch.initialize(nn.Linear(2, 2), opt_level="O2", dtype="bfloat16", verbosity=0)
    with pytest.raises(RuntimeError, match="Deleting tensor data"):
        del X.clone().data
