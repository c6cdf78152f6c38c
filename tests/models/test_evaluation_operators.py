"""Models of users' kinds: no product that FP32 does not have, and no copy of a table of words."""

import pytest
import torch
from bench_modules import load
from operators import Operators
from torch import nn
from torch.utils._pytree import tree_leaves

import ampatch

realistic = load("realistic")
COPIES = ("_to_copy", "copy_", "_foreach_copy_", "clone")
LEVELS = ["O1", "O2", "O3"]


class Watching(Operators):
    """Counts batched products, and the largest tensor that is copied."""

    def __init__(self):
        super().__init__()
        self.products = self.largest = 0

    def look(self, function, args):
        name = function.overloadpacket.__name__
        self.products += name in ("bmm", "baddbmm")
        if name in COPIES:
            sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.largest = max(self.largest, *sizes)


@pytest.fixture(autouse=True)
def without_fused_layers():
    """Which are one call, in FP32 and under autocast, and would hide what is in it."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(fast)


def made(name, level=None, half=None):
    torch.manual_seed(0)
    task = realistic.task(name, realistic.narrow)
    if level is not None:
        ampatch.initialize(task.modules, opt_level=level, dtype=half, verbosity=0)
    return task


def watched(task, is_training):
    [model], [loss_of] = task.modules, task.losses
    model.train(is_training)
    with torch.set_grad_enabled(is_training):
        loss_of(task.modules)  # the first forward casts its weights one by one
        with Watching() as watching:
            loss = loss_of(task.modules)
            if is_training:
                loss.backward()
    return watching


def table_of(model):
    """The elements of the smallest table, if nothing but lookups reads the tables."""
    sizes = [
        part.weight.numel()
        for part in model.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    return min(sizes, default=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", realistic.MODELS)
def test_evaluation_has_no_product_that_fp32_has_not_and_copies_no_table(name, level, half):
    expected = watched(made(name), is_training=False)
    task = made(name, level, half)
    seen = watched(task, is_training=False)
    assert seen.products <= expected.products
    table = table_of(task.modules[0])
    if table and "tied" not in name:
        assert seen.largest < table


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", [name for name in realistic.MODELS if "tied" not in name])
def test_training_copies_no_table(name, level, half):
    """At O3 the table is half, and its gradient is summed in FP32, in a copy."""
    task = made(name, level, half)
    if table := table_of(task.modules[0]):
        assert watched(task, is_training=True).largest < table
