"""amp_C, apex_C and what calls them: lists of tensors, against the formulas."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ampatch.compat.apex.parallel.distributed import flat_dist_call

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 4), (5,), (), (0,)]
CHUNK = 65536


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    data = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=data).to(dtype) for shape in SHAPES]


@pytest.fixture
def amp_C():
    return importlib.import_module("amp_C")


@pytest.fixture
def multi_tensor_applier():
    return importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier


def flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int)


@pytest.mark.parametrize(
    "dtype, out", [(torch.float32, torch.float16), (torch.float16, torch.float32)]
)
def test_scale(amp_C, multi_tensor_applier, dtype, out):
    grads, noop = tensors(dtype), flag()
    outs = [torch.empty_like(grad, dtype=out) for grad in grads]
    multi_tensor_applier(amp_C.multi_tensor_scale, noop, [grads, outs], 1 / 3)
    for grad, scaled in zip(grads, outs, strict=True):
        assert torch.equal(scaled, (grad.float() * (1 / 3)).to(out))
    amp_C.multi_tensor_scale(CHUNK, noop, [grads, grads], 2.0)  # in place
    assert torch.equal(grads[1], tensors(dtype)[1] * 2)
    large, small = [torch.tensor([1e6])], [torch.empty(1, dtype=torch.float16)]
    amp_C.multi_tensor_scale(CHUNK, noop, [large, small], 1e-3)
    assert small[0].item() == 1000 and noop.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(amp_C, multi_tensor_applier, dtype):
    grads, noop = [tensor * 300 for tensor in tensors(dtype)], flag()  # squares: more than float16
    each = torch.stack([grad.double().norm() for grad in grads])
    norm, none = multi_tensor_applier(amp_C.multi_tensor_l2norm, noop, [grads], False)
    assert norm.shape == (1,) and norm.dtype is torch.float32 and none.numel() == 0
    torch.testing.assert_close(norm[0].double(), each.norm())
    norm, per_tensor = amp_C.multi_tensor_l2norm(CHUNK, noop, [grads], True)
    torch.testing.assert_close(per_tensor.double(), each)
    assert norm.item() > 0 and noop.item() == 0
    assert amp_C.multi_tensor_l2norm(CHUNK, noop, [[]])[0].tolist() == [0.0]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_noted(amp_C, bad):
    good = [torch.ones(2), torch.ones(2)]
    broken, outs = [torch.ones(2), torch.tensor([1.0, bad])], [torch.empty(2), torch.empty(2)]

    def noted(function, *args) -> bool:
        noop = flag()
        function(CHUNK, noop, *args)
        return bool(noop.item())

    assert noted(amp_C.multi_tensor_scale, [broken, outs], 1.0)
    assert not outs[1].isfinite().all()  # it goes on
    assert noted(amp_C.multi_tensor_l2norm, [broken])
    assert not noted(amp_C.multi_tensor_scale, [good, outs], 1.0)
    assert not noted(amp_C.multi_tensor_l2norm, [good])


def test_they_are_the_same_within_a_session(amp, amp_C):
    """Functions in the tables do not cast what is in a list."""
    expected = amp_C.multi_tensor_l2norm(CHUNK, flag(), [tensors()], True)
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)
    norms = amp_C.multi_tensor_l2norm(CHUNK, flag(), [tensors()], True)
    assert all(map(torch.equal, norms, expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_flatten_and_unflatten(dtype):
    import apex_C

    values = tensors(dtype)
    values[0] = values[0].t()  # with gaps between its rows
    flat = apex_C.flatten(values)
    numbers = [number for value in values for number in value.flatten().tolist()]
    assert flat.dtype is dtype and flat.tolist() == numbers
    parts = apex_C.unflatten(flat, values)
    assert all(map(torch.equal, parts, values))
    flat.zero_()
    assert not any(part.any() for part in parts)  # they are views, as scripts rely on


def reduced(rank: int) -> dict:
    values = [torch.full((2, 2), rank + 1.0), torch.full((3,), rank + 2.0, dtype=torch.float16)]
    flat_dist_call(values, dist.all_reduce)
    weights = [nn.Parameter(torch.full((2,), float(rank))), torch.full((1,), rank)]
    flat_dist_call([weight.data for weight in weights], dist.broadcast, (1,))
    return {"averaged": values, "sent": [weight.tolist() for weight in weights]}


def test_flat_dist_call(ranks):
    """As in apex, what is reduced is averaged."""
    for result in ranks(reduced):
        assert [value.unique().tolist() for value in result["averaged"]] == [[1.5], [2.5]]
        assert result["averaged"][1].dtype is torch.float16
        assert result["sent"] == [[1.0, 1.0], [1]]


def test_asking_first_says_yes():
    """Scripts that ask refuse to start without, and then call functions that are here."""
    from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
    from apex.multi_tensor_apply import multi_tensor_apply as module

    assert module.MultiTensorApply is MultiTensorApply
    assert multi_tensor_applier.available
    assert MultiTensorApply(8)(lambda *args: args, "flag", ["lists"], 1, 2) == (
        *(8, "flag", ["lists"], 1, 2),
    )
