"""Optimizer checkpoints as apex wrote them, turned into torch's layout.

At O2 apex saved the state of the master weights in torch's layout, which loads unchanged.  Other
layouts:

* FusedAdam and FusedAdagrad of apex count steps per group; torch's Adam, AdamW and Adagrad count
  per parameter.
* `FP16_Optimizer` saved the inner optimizer's state beside the master weights (`fp32_from_fp16`).
  The `FP16_Optimizer` of `apex.contrib` saved a flat tensor per group (`fp32_groups_flat`), which
  is refused.

LAMB, NovoGrad and third-party optimizers count per group too, under the same name.  So only for
torch's three classes the counts are copied from groups to parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..session import facade

Groups = Sequence[dict[str, Any]]
_INNER_STATE_KEY = "optimizer_state_dict"
_MASTERS, _FLAT_MASTERS = "fp32_from_fp16", "fp32_groups_flat"


class _ApexLayout(NamedTuple):
    """How to recognize a checkpoint of a fused optimizer of apex."""

    group_options: frozenset[str]  # options that each group has
    torch_option: str  # an option of torch's groups that apex's groups lack
    state_names: frozenset[str]  # the names of a parameter's state


_ADAM = _ApexLayout(
    frozenset(("step", "bias_correction", "betas", "eps")),
    "amsgrad",
    frozenset(("exp_avg", "exp_avg_sq")),
)
_GROUP_STEP_LAYOUTS = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adagrad: _ApexLayout(frozenset(("step", "eps")), "lr_decay", frozenset(("sum",))),
}
"""torch's classes that count steps per parameter, and the layout of apex that each can load."""


def torch_layout(
    state: dict[str, Any], optimizer: Any, is_in_half: Callable[[Tensor], bool]
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """torch's layout of an optimizer's `state_dict`, and `(parameter, FP32 values)` pairs.

    `optimizer` will load the state.  `is_in_half` returns whether the model computes with half
    copies of a parameter: apex had master weights of these.  A state in torch's layout, or of an
    optimizer that is not torch's, is returned unchanged.  Raises `ValueError` if apex's masters do
    not fit.
    """
    values: list[tuple[Tensor, Tensor]] = []
    groups = optimizer.param_groups
    if _INNER_STATE_KEY in state and _MASTERS in state:
        values = _master_values(state[_MASTERS], groups, is_in_half)
        state = state[_INNER_STATE_KEY]
    elif _INNER_STATE_KEY in state and _FLAT_MASTERS in state:
        raise ValueError(
            f"optimizer.load_state_dict(state): state[{_FLAT_MASTERS!r}] is a checkpoint of "
            "apex.contrib's FP16_Optimizer, which is not read. Load the weights of the model, and "
            "start the optimizer anew."
        )
    layout = _GROUP_STEP_LAYOUTS.get(type(optimizer))
    if layout is not None and _has_layout(state, layout):
        state = _steps_per_parameter(state, groups)
    return state, values


def _has_layout(state: dict[str, Any], layout: _ApexLayout) -> bool:
    for group in state.get("param_groups") or [{}]:
        if not layout.group_options <= group.keys() or layout.torch_option in group:
            return False
    return all(entry.keys() == layout.state_names for entry in state["state"].values())


def _pairs_of_groups(saved: Sequence[Any], groups: Groups, name: str) -> list[tuple[Any, dict]]:
    if len(saved) != len(groups):
        raise ValueError(
            f"optimizer.load_state_dict(state): state[{name!r}] has {len(saved)} groups, this "
            f"optimizer has {len(groups)}."
        )
    return list(zip(saved, groups, strict=True))


def _master_values(
    saved: Sequence[Sequence[Tensor]], groups: Groups, is_in_half: Callable[[Tensor], bool]
) -> list[tuple[Tensor, Tensor]]:
    values: list[tuple[Tensor, Tensor]] = []
    for number, (tensors, group) in enumerate(_pairs_of_groups(saved, groups, _MASTERS)):
        params = group["params"]
        if len(params) != len(tensors):  # without those that were FP32 in the model
            params = [param for param in params if is_in_half(param)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [tuple(param.shape) for param in params]
        if shapes != expected:
            raise ValueError(
                f"optimizer.load_state_dict(state): state[{_MASTERS!r}][{number}] has shapes "
                f"{shapes}, this optimizer's weights have {expected}."
            )
        values += zip(params, tensors, strict=True)
    return values


def _steps_per_parameter(state: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Copy step counts from groups to parameters.  Options that apex lacks keep their values."""
    entries = dict(state["state"])
    new_groups = []
    for saved, group in _pairs_of_groups(state["param_groups"], groups, "param_groups"):
        saved = dict(saved)
        steps = saved.pop("step")
        options = {name: value for name, value in group.items() if name != "params"}
        new_groups.append({**options, **saved})
        for key in entries.keys() & set(saved["params"]):
            entries[key] = {"step": torch.tensor(float(steps)), **entries[key]}
    return {**state, "state": entries, "param_groups": new_groups}


facade.checkpoint_readers.append(torch_layout)
