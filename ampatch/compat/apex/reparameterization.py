"""apex.reparameterization: weight norm, by `torch.nn.utils.parametrizations.weight_norm`.

Checkpoints that have `weight_g` and `weight_v` load, as torch's do.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["apply_weight_norm", "remove_weight_norm"]


def apply_weight_norm(
    module: nn.Module, name: str = "", dim: int = 0, hook_child: bool = True
) -> nn.Module:
    """Put weight norm on the parameter `name` ("rnn.weight_hh_l0"), or on all if `name` is "".

    As in apex, embeddings and parameters of one dimension are left out.  `hook_child` is accepted:
    a parametrization is on the module that has the parameter.
    """
    paths = [name] if name else [path for path, _ in module.named_parameters()]
    for path in [path for path in paths if ".parametrizations." not in f".{path}"]:
        owner, weight_name = _owner_and_name(module, path)
        is_embedding = isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding or getattr(owner, weight_name).dim() < 2:
            continue
        if not parametrize.is_parametrized(owner, weight_name):
            weight_norm(owner, weight_name, dim)
    return module


def remove_weight_norm(module: nn.Module, name: str = "", remove_all: bool = False) -> nn.Module:
    """Make `name`, or all with "" or `remove_all`, plain parameters with their present values."""
    normed = weight_norm(nn.Linear(1, 1, device="meta"))  # on "meta" it draws no random numbers
    parametrization = type(normed.parametrizations.weight[0])
    normed_params = [_owner_and_name(module, name)] if name and not remove_all else [
        (owner, weight_name)
        for owner in module.modules()
        for weight_name, chain in getattr(owner, "parametrizations", {}).items()
        if isinstance(chain[0], parametrization)
    ]  # fmt: skip
    for owner, weight_name in normed_params:
        parametrize.remove_parametrizations(owner, weight_name)
    return module


def _owner_and_name(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, weight_name = name.rpartition(".")
    return module.get_submodule(path), weight_name
