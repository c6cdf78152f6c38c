"""The fused cells of recurrent layers, which torch asks of any accelerator and the CPU lacks."""

from __future__ import annotations

import torch
from torch import Tensor

Maybe = Tensor | None


def _with(gates: Tensor, bias: Maybe) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    cell: Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _with(from_input, input_bias) + _with(from_hidden, hidden_bias)
    enter, keep, new, out = gates.chunk(4, 1)
    enter, keep, new, out = enter.sigmoid(), keep.sigmoid(), new.tanh(), out.sigmoid()
    after = keep * cell + enter * new
    return out * after.tanh(), after, torch.cat([enter, keep, new, out], 1)


def lstm_cell_backward(
    grad_hidden: Maybe, grad_cell: Maybe, cell: Tensor, after: Tensor, gates: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Maybe]:
    enter, keep, new, out = gates.chunk(4, 1)
    to_hidden = torch.zeros_like(cell) if grad_hidden is None else grad_hidden
    seen = after.tanh()
    to_cell = _with(to_hidden * out * (1 - seen * seen), grad_cell)
    parts = [
        to_cell * new * enter * (1 - enter),
        to_cell * cell * keep * (1 - keep),
        to_cell * enter * (1 - new * new),
        to_hidden * seen * out * (1 - out),
    ]
    to_gates = torch.cat(parts, 1)
    return to_gates, to_cell * keep, to_gates.sum(0) if biased else None


def gru_cell(
    from_input: Tensor,
    from_hidden: Tensor,
    hidden: Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[Tensor, Tensor]:
    reset_in, keep_in, new_in = _with(from_input, input_bias).chunk(3, 1)
    reset_own, keep_own, new_own = _with(from_hidden, hidden_bias).chunk(3, 1)
    reset, keep = (reset_in + reset_own).sigmoid(), (keep_in + keep_own).sigmoid()
    new = (new_in + reset * new_own).tanh()
    return new + keep * (hidden - new), torch.cat([reset, keep, new, hidden, new_own], 1)


def gru_cell_backward(
    grad: Tensor, workspace: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Maybe, Maybe]:
    reset, keep, new, hidden, new_own = workspace.chunk(5, 1)
    to_new = grad * (1 - keep) * (1 - new * new)
    to_keep = grad * (hidden - new) * keep * (1 - keep)
    to_reset = to_new * new_own * reset * (1 - reset)
    to_input = torch.cat([to_reset, to_keep, to_new], 1)
    to_own = torch.cat([to_reset, to_keep, to_new * reset], 1)
    biases = (to_input.sum(0), to_own.sum(0)) if biased else (None, None)
    return to_input, to_own, grad * keep, *biases


def register() -> torch.library.Library:
    """Make them the device's, for as long as the result lives."""
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("_thnn_fused_lstm_cell", lstm_cell)
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward)
    library.impl("_thnn_fused_gru_cell", gru_cell)
    library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward)
    return library
