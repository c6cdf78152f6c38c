"""What PyTorch computes wrongly in half is FP32 inside at every level: values against FP32."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from autocast_oracle import to
from op_samples import ints, r
from small_training import Made
from torch import Tensor, nn

import ampatch

MANY = 70_000  # more than float16 can count
CLASSES = r(3) + 0.5
LARGE = (1, 1, 190, 190)  # more pixels than 16 bits can count


def grid() -> Tensor:
    return r(1, 40, 40, 2) * 2 - 1


CASES: dict[str, Callable] = {
    "grid_sample": lambda: (F.grid_sample, r(*LARGE), grid()),
    "cross_entropy": lambda: (F.cross_entropy, r(MANY, 3), ints(3, MANY)),
    "nll_loss": lambda: (F.nll_loss, r(MANY, 3), ints(3, MANY)),
    "nll_loss of images": lambda: (F.nll_loss, r(1, 3, 265, 265), ints(3, 1, 265, 265)),
    "nll_loss of images, weighted": lambda: (
        lambda x, t: F.nll_loss(x, t, CLASSES.to(x.dtype)),
        r(1, 3, 265, 265),
        ints(3, 1, 265, 265),
    ),
    "layer_norm": lambda: (lambda w, x: F.layer_norm(x, (8,), w, w), r(8), r(MANY, 8)),
    "embedding": lambda: (lambda w, i: F.embedding(i, w), r(2, 3), ints(2, MANY)),
}


def with_gradient(call: Callable, leaf: Tensor, *more: Tensor) -> list[Tensor]:
    """The result, and the gradient of what is given, where the result's is as large as a step's."""
    leaf = leaf.clone().requires_grad_()
    output = call(leaf, *more)
    output.float().mul(1000 / output.numel()).sum().backward()
    return [output.detach(), leaf.grad]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_out_is_written_as_without_us(level, half):
    """PyTorch's builtin has `out=`; a result in FP32 would not be written into it."""
    x, targets, out = r(4, 3).to(half), ints(3, 4), torch.zeros(4, dtype=half)
    expected = F.nll_loss(x, targets, reduction="none")
    ampatch.initialize(nn.Linear(1, 1), opt_level=level, dtype=half, verbosity=0)
    assert torch._C._nn.nll_loss(x, targets, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_values_and_gradients_are_those_of_fp32(level, half):
    torch.manual_seed(0)
    built = {name: make() for name, make in CASES.items()}
    if level == "O1":
        del built["embedding"]  # whose table is FP32 there
    plain, cases = {}, {}
    for name, (call, *args) in built.items():
        args = to(half, args)
        plain[name] = with_gradient(call, *to(torch.float32, args))
        model = Made(lambda self, *args, call=call: call(*args), part=nn.Linear(1, 1))
        cases[name] = model, call, args
    models = [model for model, *_ in cases.values()]
    ampatch.initialize(models, opt_level=level, dtype=half, verbosity=0)
    for name, (model, call, args) in cases.items():
        inside, outside = with_gradient(model, *args), with_gradient(call, *args)
        assert outside[0].dtype is (torch.float32 if level == "O1" else half), name
        for new, old in zip((*inside, *outside), (*plain[name], *plain[name]), strict=True):
            room = 4 * torch.finfo(half).eps * old.abs().max().item()
            torch.testing.assert_close(new.float(), old, rtol=0, atol=room, msg=name)
