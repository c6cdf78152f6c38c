"""Random arguments, small and tame: half precision is good to two digits."""

import torch


def r(*shape: int) -> torch.Tensor:
    """Values in (0.1, 0.9)."""
    return torch.rand(shape) * 0.8 + 0.1


def ints(top: int, *shape: int) -> torch.Tensor:
    """Class numbers below `top`."""
    return torch.randint(top, shape)
