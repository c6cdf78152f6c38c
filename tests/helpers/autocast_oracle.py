"""What PyTorch's own autocast for CUDA gives, asked without a GPU.

Inside a FakeTensorMode tensors may claim to be on CUDA, and the dispatcher
applies the real autocast policy to them.  Ask before `ampatch.initialize`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

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
    return tree_map_only(
        Tensor, lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda"), tree
    )


def to(dtype: torch.dtype, tree: Any) -> Any:
    """The floating tensors of a tree in `dtype`."""
    return tree_map_only(
        Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree
    )


def dtypes(tree: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


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


def outcome(function: Callable, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error
