"""What PyTorch's own autocast for CUDA gives, asked without a GPU.

Inside a FakeTensorMode tensors may claim to be on CUDA, and the dispatcher
applies the real autocast policy to them.  Ask before `ampatch.initialize`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import ampatch

DRIVERLESS = bool(torch.version.cuda) and not torch.cuda.is_available()
"""In such builds some functions (convolutions, lstm) ask the driver even for fake tensors."""


class NoAnswer(pytest.skip.Exception):
    """This build of torch needs the CUDA driver, and there is none.  Uncaught it skips the test."""


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast as it is on CUDA, without the warning that there is none."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    except RuntimeError as error:
        if DRIVERLESS and "driver" in str(error):
            raise NoAnswer(f"no CUDA driver to ask: {error}") from error
        raise
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.clear_autocast_cache()


def on_fake_cuda(tree: Any) -> Any:
    """Tensors of the same shapes and dtypes that say they are on CUDA; within a FakeTensorMode."""
    return tree_map(
        lambda leaf: (
            torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda")
            if isinstance(leaf, Tensor)
            else leaf
        ),
        tree,
    )


def to(dtype: torch.dtype, tree: Any) -> Any:
    """The floating tensors of a tree in `dtype`."""
    return tree_map(
        lambda leaf: (
            leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        ),
        tree,
    )


def dtypes(tree: Any) -> list[torch.dtype]:
    """The dtypes of a tree's tensors, in order."""
    return [leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def autocast_dtypes(half: torch.dtype, function: Callable, *args: Any, **kwargs: Any) -> list:
    """The dtypes of what `function` returns under autocast for CUDA."""
    with FakeTensorMode(), cuda_autocast(half):
        args, kwargs = on_fake_cuda((args, kwargs))
        return dtypes(function(*args, **kwargs))


def module_dtypes(half: torch.dtype, module: nn.Module, *args: Any, **kwargs: Any) -> list:
    """The dtypes of a module's outputs under autocast for CUDA.

    Without gradients, cuDNN and running statistics: a CPU build has no CUDA to write in place.
    """
    module = copy.deepcopy(module)
    with torch.backends.cudnn.flags(enabled=False), FakeTensorMode(), cuda_autocast(half):
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(on_fake_cuda(parameter), requires_grad=False))
            for name, buffer in part.named_buffers(recurse=False):
                forget = part.training and isinstance(part, nn.modules.batchnorm._NormBase)
                setattr(part, name, None if forget else on_fake_cuda(buffer))
        args, kwargs = on_fake_cuda((args, kwargs))
        return dtypes(module(*args, **kwargs))


def mixed(half: torch.dtype, tree: Any) -> Any:
    """The floating tensors of a tree in `half` and FP32 by turns."""
    turns = itertools.cycle((half, torch.float32))
    return tree_map(
        lambda leaf: (
            leaf.to(next(turns)) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        ),
        tree,
    )


def outcome(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or the exception it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


Case = tuple[Callable, tuple]
"""A function and its arguments."""


def check_like_autocast(cases: dict[str, Case], half: torch.dtype) -> None:
    """Dtypes as autocast for CUDA has them, values near FP32's; for FP32, half and mixed tensors.

    What autocast refuses is refused here too.  The gradients of FP32 arguments are FP32 and near
    those of plain PyTorch.  Initializes ampatch, once for all cases.
    """
    expected = {
        name: _of_autocast(function, args, half) for name, (function, args) in cases.items()
    }
    plain = {name: _with_gradients(function, args) for name, (function, args) in cases.items()}
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    wrong = {}
    for name, (function, args) in cases.items():
        failure = outcome(_check_case, function, args, half, expected[name], plain[name])
        if failure is not None:
            wrong[name] = repr(failure)
    assert wrong == {}


def _ways(args: tuple, half: torch.dtype) -> dict[str, tuple]:
    return {"float32": args, "half": to(half, args), "mixed": mixed(half, args)}


def _of_autocast(function: Callable, args: tuple, half: torch.dtype) -> dict[str, Any]:
    return {
        way: outcome(autocast_dtypes, half, function, *given)
        for way, given in _ways(args, half).items()
    }


def _check_case(
    function: Callable, args: tuple, half: torch.dtype, says: dict, plain: tuple
) -> None:
    for way, given in _ways(args, half).items():
        found = outcome(function, *given)
        if isinstance(says[way], Exception):
            assert isinstance(found, Exception), (way, says[way])
            continue
        if isinstance(found, Exception):
            raise found
        assert dtypes(found) == says[way], way
        _assert_near(half, found, plain[0])
    _, grads = _with_gradients(function, args)
    _assert_near(half, grads, plain[1])
    assert all(grad is None or grad.dtype is torch.float32 for grad in grads)


def _with_gradients(function: Callable, args: tuple) -> tuple[Any, list]:
    args = tree_map(
        lambda leaf: (
            leaf.clone().requires_grad_()
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
            else leaf
        ),
        args,
    )
    result = function(*args)
    outs = [out for out in tree_leaves(result) if isinstance(out, Tensor) and out.requires_grad]
    if outs:
        sum(out.abs().float().sum() for out in outs).backward()
    leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return result, [leaf.grad for leaf in leaves if leaf.requires_grad]


def _assert_near(half: torch.dtype, found: Any, reference: Any) -> None:
    tolerance = 0.02 if half is torch.float16 else 0.1
    for new, old in zip(tree_leaves(found), tree_leaves(reference), strict=True):
        if isinstance(old, Tensor):
            new = new.to(old.dtype)
            torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance)
        else:
            assert new == old
