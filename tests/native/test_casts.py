"""The native casts give the bits of the Python ones.

The graphs that training makes are situations of `tests/laws`, which run natively too.
"""

import pytest
from repository import HELPERS

CALLS = """
import ampatch
import torch.nn.functional as F
from torch import nn

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))

def innermost(value):
    return innermost(value[0]) if type(value) is list else value

def writes_between_and_within(model):
    found = []
    def write(module, args):
        with torch.no_grad():
            model[0].weight.mul_(2)
            model[2].weight.data.add_(1)
        # of which the forward has an older copy
        found.append(F.linear(X, model[0].weight).detach())
    handle = model[3].register_forward_pre_hook(write)
    for _ in range(2):
        found.append(model(X).detach())
    handle.remove()
    with torch.no_grad():
        found.append(model(X))
    with torch.inference_mode():
        found.append(model(X).clone())
    found.append(model(X).detach())
    return found

def calls_of_every_kind(model):
    x, w = X[:, :, None].expand(5, 4, 4), model[0].weight
    half, nested, endless = X.bfloat16(), X, [X]
    endless.append(endless)
    for _ in range(10):
        nested = [nested]
    calls = {
        "keywords": lambda: F.linear(input=X, weight=w, bias=model[0].bias),
        "mixed": lambda: F.linear(half, weight=w),
        "double": lambda: F.linear(X.double(), w.double()),
        "lists": lambda: torch.einsum("ij,kj->ik", [X, w]),
        "tuples": lambda: F.conv2d(X[None, None], torch.ones(1, 1, 2, 2), None, (1, 2), (1, 0)),
        "whole": lambda: torch.mm(torch.ones(2, 2, dtype=torch.long), torch.ones(2, 2).long()),
        "scalar": lambda: F.softmax(half, dim=-1),
        "dtype": lambda: F.softmax(X, -1, dtype=torch.float64),
        "out": lambda: torch.mm(X, X.t(), out=torch.empty(5, 5)),
        "strided": lambda: torch.bmm(x, x.transpose(1, 2)),
        "sparse": lambda: torch.mm(X.t().to_sparse(), X).to_dense(),
        "wrong": lambda: F.linear(X, torch.ones(3, 7)),
        "no dtype": lambda: F.linear(X.bool(), w),
        "too few": lambda: torch.mm(X),
        "prod": lambda: torch.prod(half.float(), dim=0),
        "norm": lambda: torch.norm(half, 2, (0, 1)),
        "ten lists": lambda: innermost(ampatch.half_function(lambda value: value)(nested)),
        "a list that holds itself": lambda: F.linear(X, endless),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call().detach()
        except RecursionError:
            found[name] = "RecursionError"
        except (RuntimeError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return found

found = {}
for dtype in (torch.float16, torch.bfloat16):
    for function in (writes_between_and_within, calls_of_every_kind):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 70), nn.Linear(70, 3))
        with torch.no_grad():  # strides of its own, and numbers that no rounding reaches
            model[2].weight = nn.Parameter(torch.randn(6, 70).t())
            model[2].bias[:4] = torch.tensor([float("inf"), -0.0, 1e-42, 3.4e38])
        ampatch.initialize(model, opt_level="O1", dtype=dtype, patch_scope="process", verbosity=0)
        for _ in range(2):
            model(X).float().sum().backward()
        found[f"{function.__name__} {dtype}"] = function(model)
        ampatch.deactivate()
torch.save(found, sys.argv[1])
"""


def test_training_has_the_bits_of_the_python_way(same_bits_with_native):
    """Of a model that no situation of `tests/laws` compares to the bit."""
    program = """
        sys.path.append({helpers!r})
        from train_without import train
        torch.save({{half: train(half=half) for half in ("float16", "bfloat16")}}, sys.argv[1])
    """
    assert same_bits_with_native(program.format(helpers=str(HELPERS)))["float16"]


def test_calls_and_writes_have_them_too(same_bits_with_native):
    results = same_bits_with_native(CALLS)
    calls = results["calls_of_every_kind torch.bfloat16"]
    assert calls["wrong"].startswith("RuntimeError") and calls["double"].dtype.is_floating_point
    assert calls["keywords"].dtype == calls["tuples"].dtype == calls["ten lists"].dtype
    assert calls["a list that holds itself"] == "RecursionError"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_is_rounded_as_torch_rounds_it(same_bits_with_native, dtype):
    """All bfloat16 and a share of all FP32 numbers, infinities and NaN among them."""
    results = same_bits_with_native(
        f"""
        from ampatch.casting.half_copies import cast_weights
        dtype = torch.{dtype}
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(-2**31, 2**31 - 1, (2**18,), generator=generator).int()
        edges = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
        wide = torch.cat([bits.view(torch.float32), edges])
        parts = [part.clone() for part in wide.split(3000)]
        parts += [torch.randn(40, 30, generator=generator).t(), torch.randn(0), torch.randn(()),
                  torch.randn(9, 4, generator=generator)[:, ::2]]
        parts.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).zero_())
        halves = cast_weights(parts, dtype)
        leaves = [part.clone().requires_grad_() for part in parts]
        torch.autograd.backward(cast_weights(leaves, dtype), halves)
        every = torch.arange(2**16).short().view(dtype).split(4096)
        up = [torch.zeros(4096, requires_grad=True) for _ in every]
        torch.autograd.backward(cast_weights(up, dtype), [half.clone() for half in every])
        torch.save({{"down": list(halves), "up": [leaf.grad for leaf in (*leaves, *up)]}},
                   sys.argv[1])
        """
    )
    assert all(half.dtype != grad.dtype for half, grad in zip(results["down"], results["up"]))


def test_which_weights_may_be_cast_in_one_node(same_bits_with_native):
    results = same_bits_with_native(
        """
        from torch import nn
        from ampatch.casting.half_copies import Buckets

        def weights():
            return [nn.Parameter(torch.ones(2)) for _ in range(3)]

        def hooked(which, how, drop=False):
            bucket = weights()
            handle = getattr(bucket[which], how)(lambda tensor: None)
            if drop:
                handle.remove()
            return bucket

        def changed(which, change):
            bucket = weights()
            bucket[which] = change(bucket[which])
            return bucket

        frozen = lambda weight: weight.requires_grad_(False)
        early, late = "register_hook", "register_post_accumulate_grad_hook"
        buckets = {
            "plain": weights(), "early": hooked(1, early), "late": hooked(2, late),
            "own early": hooked(0, early), "own late": hooked(0, late),
            "early gone": hooked(1, early, True), "late gone": hooked(0, late, True),
            "frozen": changed(1, frozen), "own frozen": changed(0, frozen),
            "own half": changed(0, lambda weight: nn.Parameter(weight.detach().half())),
            "half": changed(1, lambda weight: nn.Parameter(weight.detach().half())),
            "own computed": changed(0, lambda weight: weight * 1),
            "own tensor": changed(0, lambda weight: weight.detach().requires_grad_()),
            "own buffer": changed(0, nn.Buffer),
        }
        every = {}
        for name, bucket in buckets.items():
            parts = Buckets(bucket, nn.Module(), nn.Module()).lists_to_cast()
            part_of = {id(param): place for place, part in enumerate(parts) for param in part}
            every[name] = [part_of.get(id(param)) for param in bucket]
        torch.save(every, sys.argv[1])
        """
    )
    whole = ["plain", "early gone", "late gone", "half"]
    assert [name for name, parts in results.items() if parts == [0, 0, 0]] == whole
    assert results["early"] == [0, None, 0]
    assert results["frozen"] == [1, 0, 1] and results["own frozen"] == [0, 1, 1]
    assert results["own late"] == results["own computed"] == results["own half"] == [None, 0, 0]


def test_entries_are_exchanged_all_or_none(same_bits_with_native):
    results = same_bits_with_native(
        """
        from ampatch.models import half_copy_slots
        found = {}
        for name, second in (("other", {"a": 3}), ("gone", {}), ("same", {"a": 2})):
            tables = [{"a": 1}, second]
            done = half_copy_slots.set_entries(tables, ["a", "a"], [0, 1], [4, 5], [1, 2])
            found[name] = [done, tables]
        torch.save(found, sys.argv[1])
        """
    )
    assert results["other"] == [False, [{"a": 1}, {"a": 3}]]
    assert results["gone"] == [False, [{"a": 1}, {}]]
    assert results["same"] == [True, [{"a": 4}, {"a": 5}]]
