"""Which dtypes the kernels that multiply matrices really get."""

from typing import Any

from operators import Operators
from torch import Tensor

MATRIX_KERNELS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "mkldnn_rnn_layer",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_transformer_encoder_layer_fwd",
    "_native_multi_head_attention",
)
MASKS = {"_transformer_encoder_layer_fwd": 18, "_native_multi_head_attention": 9}
"""Positions of masks."""
FUSED = MASKS.keys()
"""The kernels of torch's modules for attention in evaluation."""


class Kernels(Operators):
    """The dtypes of the matrices that kernels multiplying matrices are given, by kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set] = {}

    def look(self, function, args) -> None:
        name = function._overloadpacket.__name__
        if name in MATRIX_KERNELS:
            matrices = [
                arg
                for place, arg in enumerate(args)
                if isinstance(arg, Tensor) and arg.dim() > 1 and place != MASKS.get(name)
            ]
            self.seen.setdefault(name, set()).update(
                matrix.dtype for matrix in matrices if matrix.is_floating_point()
            )

    def dtypes(self) -> set:
        assert self.seen, "no matrix kernel ran"
        return set().union(*self.seen.values())


def tensor_of(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0] if not hasattr(output, "data") else output.data
    return output
