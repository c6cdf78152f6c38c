"""apex.mlp and apex.fused_dense, on torch's own linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "FusedDense"]

_ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}


class MLP(nn.Module):
    """Linear layers, each followed by the activation (the last one too).

    Args:
        mlp_sizes: features of the input and of each output: `[64, 128, 10]` makes two layers.
        bias: whether the layers have a bias.
        activation: "none", "relu" or "sigmoid".

    The parameters are `weight_0`, `bias_0`, `weight_1`, ..., FP32, with shapes as in
    `torch.nn.Linear`; initial weights have the standard deviation `sqrt(2 / (in + out))`,
    biases `sqrt(1 / out)`, as in apex.  Raises `TypeError` for another activation.
    """

    def __init__(
        self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu"
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(
                f'apex.mlp.MLP(activation={activation!r}): expected "none", "relu" or "sigmoid".'
            )
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(self.mlp_sizes) - 1
        self.bias = bias
        self.activation = activation
        for n, (fan_in, fan_out) in enumerate(zip(self.mlp_sizes[:-1], self.mlp_sizes[1:])):
            self.register_parameter(f"weight_{n}", nn.Parameter(torch.empty(fan_out, fan_in)))
            if bias:
                self.register_parameter(f"bias_{n}", nn.Parameter(torch.empty(fan_out)))
        self.reset_parameters()

    # Read anew each time: during a forward at O2 the attributes are half copies.

    @property
    def weights(self) -> list[Tensor]:
        """The weights, layer by layer."""
        return [getattr(self, f"weight_{n}") for n in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The biases, layer by layer; empty with `bias=False`."""
        return [getattr(self, f"bias_{n}") for n in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Initialize the parameters again."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, (2.0 / sum(weight.shape)) ** 0.5)
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, (1.0 / bias.numel()) ** 0.5)

    def forward(self, input: Tensor) -> Tensor:
        """Map `(..., mlp_sizes[0])` to `(..., mlp_sizes[-1])`."""
        for weight, bias in zip(self.weights, self.biases or [None] * self.num_layers):
            input = _ACTIVATIONS[self.activation](F.linear(input, weight, bias))
        return input


class FusedDense(nn.Linear):
    """`torch.nn.Linear`."""
