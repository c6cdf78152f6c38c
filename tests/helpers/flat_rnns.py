"""RNNs as they are on CUDA: their weights in one memory buffer."""

import torch
from torch import nn


def in_one_buffer(rnn: nn.RNNBase) -> nn.RNNBase:
    """Lay its weights out in one memory buffer, as `flatten_parameters` does on CUDA."""
    block = torch.cat([weight.detach().flatten() for weight in rnn._flat_weights])
    start = 0
    for weight in rnn._flat_weights:
        weight.data = block[start : start + weight.numel()].view_as(weight)
        start += weight.numel()
    return rnn
