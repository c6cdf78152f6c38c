"""The fixture that watches torch must itself be able to fail."""

import pytest
import torch
from torch_snapshot import changes, snapshot


@pytest.mark.parametrize(
    "title, value", [("torch.mm", torch.bmm), ("torch.Tensor.mul", torch.Tensor.mul)]
)
def test_it_sees_a_replaced_function_and_a_copy_of_an_inherited_method(title, value, monkeypatch):
    before = snapshot()
    monkeypatch.setattr(title, value)
    assert [line.split(":")[0] for line in changes(before, snapshot())] == [title]
    monkeypatch.undo()
    assert changes(before, snapshot()) == []
