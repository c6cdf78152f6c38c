"""What the native part does with lists of tensors is what the ways in Python do, to the bit."""

import math

import pytest
import torch
from native_runs import different
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ampatch import native
from ampatch.scaling import unscaling

pytestmark = pytest.mark.skipif(native.part is None, reason="the native part is not active")

ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, 1e-40, 3.4e38, 6e-8, 65520.0, 1.00390625]
SHAPES = [(), (0,), (1,), (3, 5), (64,), (65,), (70, 70), (2, 3, 4, 5), (300, 300)]


def test_what_is_no_tensor_is_refused() -> None:
    for grads in ([1], (torch.ones(2),), 1):
        with pytest.raises(TypeError):
            native.part.unscale(grads, torch.ones(()))


def numbers(shape: tuple, *, odd: bool = False) -> Tensor:
    """FP32 numbers, some of them where rounding has special cases."""
    values = torch.randn(shape)
    if odd and values.numel() >= len(ODD):
        values.view(-1)[: len(ODD)] = torch.tensor(ODD)
    return values


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_gradients_are_unscaled_alike(
    odd: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscaled() -> tuple[list[Tensor], bool]:
        torch.manual_seed(0)
        grads = [numbers(shape, odd=odd) for shape in SHAPES] + [numbers((8, 8))[:, ::2]]
        has_inf = unscaling.unscale_(grads, torch.tensor(scale), as_bool=True)
        return grads, has_inf

    natively = unscaled()
    assert natively[1] is odd
    monkeypatch.setattr(unscaling, "_unscale", None)
    assert different(natively, unscaled()) == []


def test_unusual_gradients_are_unscaled_in_python() -> None:
    sparse = torch.eye(3).to_sparse()
    in_graph = torch.ones(3, requires_grad=True) * 2
    is_complex = torch.ones(3, dtype=torch.complex64)
    for unusual in (sparse, in_graph, is_complex, torch.ones(3, device="meta")):
        usual = torch.ones(2)
        assert native.part.unscale([usual, unusual], torch.tensor(2.0)) is None
        assert usual.tolist() == [1, 1]
    unscaling.unscale_([sparse], torch.tensor(2.0), as_bool=True)
    assert sparse.to_dense().trace() == 1.5


def test_nothing_is_unscaled_where_a_mode_looks_on() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert native.part.unscale([torch.ones(2)], torch.tensor(2.0)) is None


def test_memory_that_was_freed_is_an_error_as_in_torch() -> None:
    wide = torch.ones(4)
    wide.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        native.part.cast_weights([wide, wide], torch.bfloat16, False)
