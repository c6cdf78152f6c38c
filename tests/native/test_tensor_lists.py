"""What the native part does with lists of tensors is what the ways in Python do, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampatch import native
from ampatch.scaling import tensor_lists

pytestmark = pytest.mark.skipif(native.part is None, reason="the native part is not in force")


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


# Questions


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
    for function in ("with_grads", "grads_of", "drop_grads"):
        with pytest.raises(TypeError):
            getattr(native.part, function)(1)


def test_memory_that_was_freed_is_an_error_as_in_torch() -> None:
    wide = torch.ones(4)
    wide.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        native.part.copies([wide], torch.bfloat16)
