"""What the native part does with lists of tensors is what the ways in Python do, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from native_runs import different
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampatch import native
from ampatch.scaling import scale_value, tensor_lists

pytestmark = pytest.mark.skipif(native.part is None, reason="the native part is not in force")

CPU = torch.device("cpu")
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, 1e-40, 3.4e38, 6e-8, 65520.0, 1.00390625]
SHAPES = [(), (0,), (1,), (3, 5), (64,), (65,), (70, 70), (2, 3, 4, 5), (300, 300)]


class Asked(nn.Parameter):
    """A parameter whose `.grad` is a property of its own."""

    seen = 0

    @property
    def grad(self) -> Tensor | None:
        type(self).seen += 1
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        type(self).seen += 1
        torch.Tensor.grad.__set__(self, grad)


def questions() -> list[tuple[str, list[Tensor]]]:
    plain: list[Tensor] = [nn.Parameter(torch.randn(3)) for _ in range(4)]
    plain[1].grad, plain[3].grad = torch.ones(3), torch.zeros(3)
    half: list[Tensor] = [nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2).half())]
    asked = Asked(torch.randn(3))
    asked.grad = torch.ones(3)
    sparse = nn.Parameter(torch.randn(3, 2))
    sparse.grad = torch.eye(3)[:, :2].to_sparse()
    with FakeTensorMode():
        fake = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))
    meta = nn.Parameter(torch.empty(2, device="meta"))
    plain[0].data.add_(1)
    with torch.no_grad():
        plain[2].add_(1)
    found = {"none": [], "plain": plain, "half": half, "asked": [*plain, asked, Asked(plain[0])]}
    return list({**found, "sparse": [sparse, *half], "no data": [fake, meta]}.items())


@pytest.mark.parametrize("name", [name for name, _ in questions()])
@pytest.mark.parametrize("function", ["with_grads", "grads_of"])
def test_answers(function: str, name: str) -> None:
    tensors = dict(questions())[name]
    answer = getattr(native.part, function)(tensors)
    expected = getattr(tensor_lists, f"_{function}")(tensors)
    assert type(answer) is type(expected)
    if isinstance(expected, list) and expected and isinstance(expected[0], Tensor):
        assert list(map(id, answer)) == list(map(id, expected))
    else:
        assert answer == expected
    assert getattr(native.part, function)(tuple(tensors)) is not None  # groups may hold tuples


def test_gradients_are_dropped() -> None:
    for _, tensors in questions():
        native.part.drop_grads(tensors)
        assert not tensor_lists._grads_of(tensors)


def test_a_subclass_is_asked_for_its_gradient() -> None:
    asked = Asked(torch.randn(3))
    for function in ("with_grads", "grads_of", "drop_grads"):
        before = Asked.seen
        getattr(native.part, function)([asked])
        assert Asked.seen == before + 1


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError):
        native.part.unscale([1], torch.ones(()))
    for function in ("with_grads", "grads_of", "drop_grads"):
        with pytest.raises(TypeError):
            getattr(native.part, function)(1)


def numbers(shape: tuple, *, odd: bool = False) -> Tensor:
    """FP32 numbers, some of them where rounding has special cases."""
    made = torch.randn(shape)
    if odd and made.numel() >= len(ODD):
        made.view(-1)[: len(ODD)] = torch.tensor(ODD)
    return made


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_gradients_are_unscaled_alike(
    odd: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unscaled() -> tuple[list[Tensor], bool]:
        torch.manual_seed(0)
        grads = [numbers(shape, odd=odd) for shape in SHAPES] + [numbers((8, 8))[:, ::2]]
        found = scale_value.Numbers(CPU, scale).unscale_(grads, torch.tensor(scale))
        return grads, found

    natively = unscaled()
    assert natively[1] is odd
    monkeypatch.setattr(scale_value, "part", None)
    assert different(natively, unscaled()) == []


def test_unusual_gradients_are_unscaled_in_python() -> None:
    sparse = torch.eye(3).to_sparse()
    in_graph = torch.ones(3, requires_grad=True) * 2
    is_complex = torch.ones(3, dtype=torch.complex64)
    for unusual in (sparse, in_graph, is_complex, torch.ones(3, device="meta")):
        usual = torch.ones(2)
        assert native.part.unscale([usual, unusual], torch.tensor(2.0)) is None
        assert usual.tolist() == [1, 1]
    scale_value.Numbers(CPU, 2.0).unscale_([sparse], torch.tensor(2.0))
    assert sparse.to_dense().trace() == 1.5


def test_nothing_is_unscaled_where_a_mode_looks_on() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert native.part.unscale([torch.ones(2)], torch.tensor(2.0)) is None


def test_memory_that_was_freed_is_an_error_as_in_torch() -> None:
    wide = torch.ones(4)
    wide.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        native.part.copies([wide], torch.bfloat16)
