"""Optimizer checkpoints as apex wrote them, turned into torch's layout.

At O2 apex saved torch's own layout of the masters' state, which loads unchanged.  Different are

* its FusedAdam and FusedAdagrad, which count steps per group, where torch's Adam, AdamW and
  Adagrad count per parameter;
* `FP16_Optimizer`: the inner optimizer's state beside the masters (`fp32_from_fp16`).  That of
  `apex.contrib`, with a flat tensor per group (`fp32_groups_flat`), is refused.

Other optimizers count in their groups too, under the same name (LAMB, NovoGrad, third-party ones).
So steps move only into an optimizer of these three classes of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..session import facade

Groups = Sequence[dict[str, Any]]
_INNER, _LISTED, _FLAT = "optimizer_state_dict", "fp32_from_fp16", "fp32_groups_flat"


class _Fused(NamedTuple):
    """The marks by which a file of apex's fused optimizer differs from torch's and others'."""

    has: frozenset[str]  # options of each group
    lacks: str  # an option that torch writes and apex does not have
    entries: frozenset[str]  # all that there is for a parameter


_ADAM = _Fused(
    frozenset(("step", "bias_correction", "betas", "eps")),
    "amsgrad",
    frozenset(("exp_avg", "exp_avg_sq")),
)
_COUNTED_IN_GROUPS = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adagrad: _Fused(frozenset(("step", "eps")), "lr_decay", frozenset(("sum",))),
}
"""torch's classes that count steps per parameter, and apex's files that each can load."""


def torch_layout(
    state: dict[str, Any], optimizer: Any, is_in_half: Callable[[Tensor], bool]
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """torch's layout of an optimizer's `state_dict`, and `(parameter, FP32 values)` pairs.

    `optimizer` will load the state.  `is_in_half` tells with which weights the model computes in
    half: apex had masters of these.  A state in torch's layout, or of an optimizer that is not
    torch's, is returned unchanged.  Raises `ValueError` if apex's masters do not fit.
    """
    values: list[tuple[Tensor, Tensor]] = []
    groups = optimizer.param_groups
    if _INNER in state and _LISTED in state:
        values = _listed(state[_LISTED], groups, is_in_half)
        state = state[_INNER]
    elif _INNER in state and _FLAT in state:
        raise ValueError(
            f"optimizer.load_state_dict(state): state[{_FLAT!r}] is a checkpoint of apex.contrib's "
            "FP16_Optimizer, which is not read. Load the weights of the model, and start the "
            "optimizer anew."
        )
    layout = _COUNTED_IN_GROUPS.get(type(optimizer))
    if layout is not None and _is_of(layout, state):
        state = _steps_per_parameter(state, groups)
    return state, values


def _is_of(layout: _Fused, state: dict[str, Any]) -> bool:
    groups = state.get("param_groups") or [{}]
    return all(layout.has <= group.keys() and layout.lacks not in group for group in groups) and (
        all(entry.keys() == layout.entries for entry in state["state"].values())
    )


def _zipped(saved: Sequence[Any], groups: Groups, name: str) -> list[tuple[Any, dict]]:
    if len(saved) != len(groups):
        raise ValueError(
            f"optimizer.load_state_dict(state): state[{name!r}] has {len(saved)} groups, this "
            f"optimizer has {len(groups)}."
        )
    return list(zip(saved, groups, strict=True))


def _listed(
    saved: Sequence[Sequence[Tensor]], groups: Groups, is_in_half: Callable[[Tensor], bool]
) -> list[tuple[Tensor, Tensor]]:
    values: list[tuple[Tensor, Tensor]] = []
    for number, (tensors, group) in enumerate(_zipped(saved, groups, _LISTED)):
        params = group["params"]
        if len(params) != len(tensors):  # apex left out those that were FP32 in the model
            params = [param for param in params if is_in_half(param)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [tuple(param.shape) for param in params]
        if shapes != expected:
            raise ValueError(
                f"optimizer.load_state_dict(state): state[{_LISTED!r}][{number}] has shapes "
                f"{shapes}, this optimizer's weights have {expected}."
            )
        values += zip(params, tensors, strict=True)
    return values


def _steps_per_parameter(state: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """apex's fused optimizers count in the group; what torch's groups have more stays."""
    entries = dict(state["state"])
    new_groups = []
    for saved, group in _zipped(state["param_groups"], groups, "param_groups"):
        saved = dict(saved)
        steps = saved.pop("step")
        options = {name: value for name, value in group.items() if name != "params"}
        new_groups.append({**options, **saved})
        for key in entries.keys() & set(saved["params"]):
            entries[key] = {"step": torch.tensor(float(steps)), **entries[key]}
    return {**state, "state": entries, "param_groups": new_groups}


facade.checkpoint_readers.append(torch_layout)
