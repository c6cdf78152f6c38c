"""Lists of tensors at once or one by one: the same numbers."""

import pytest
import torch

from ampatch.torch_private import foreach

CALLS = {
    "add": ([2.0, 3.0], {"alpha": 0.5}),
    "add_": (1.5, {}),
    "addcdiv_": ([2.0, 4.0], [4.0, 8.0], {"value": -0.5}),
    "addcmul_": ([2.0, 4.0], [4.0, 8.0], {"value": 2.0}),
    "copy_": ([5.0, 6.0], {}),
    "lerp_": ([2.0, 4.0], 0.25, {}),
    "mul": (3.0, {}),
    "mul_": (3.0, {}),
    "norm": ({},),
    "sqrt": ({},),
}


def tensors(values) -> list[torch.Tensor]:
    return [torch.full((2,), value) for value in values]


@pytest.mark.parametrize("name", CALLS)
def test_one_by_one_is_torchs_own(name):
    *others, kwargs = CALLS[name]
    others = [tensors(other) if isinstance(other, list) else other for other in others]
    results = []
    for call in (
        getattr(torch, f"_foreach_{name}"),
        lambda *a, **k: foreach.call_one_by_one(name, *a, **k),
    ):
        inputs = tensors([4.0, 9.0])
        returned = call(inputs, *others, **kwargs)
        results.append(inputs if name.endswith("_") else list(returned))
    assert all(map(torch.equal, *results))


def test_every_function_here_is_compared():
    here = {name for name in vars(foreach) if hasattr(torch, f"_foreach_{name}")}
    assert here == set(CALLS)


def test_weights_that_require_grad_are_written():
    weight = torch.nn.Parameter(torch.zeros(2))
    foreach.call_one_by_one("copy_", [weight], [torch.ones(2)])
    assert weight.tolist() == [1.0, 1.0]
