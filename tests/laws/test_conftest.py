"""The fixture that watches torch must itself be able to fail."""

from __future__ import annotations

import torch
from torch_snapshot import changes, snapshot


def test_it_sees_a_replaced_function():
    before, original = snapshot(), torch.mm
    torch.mm = lambda *args: original(*args)
    try:
        assert [line.split(":")[0] for line in changes(before, snapshot())] == ["torch.mm"]
    finally:
        torch.mm = original
    assert changes(before, snapshot()) == []


def test_it_sees_a_copy_of_an_inherited_method():
    before = snapshot()
    torch.Tensor.mul = torch.Tensor.mul
    try:
        assert [line.split(":")[0] for line in changes(before, snapshot())] == ["torch.Tensor.mul"]
    finally:
        del torch.Tensor.mul
    assert changes(before, snapshot()) == []
