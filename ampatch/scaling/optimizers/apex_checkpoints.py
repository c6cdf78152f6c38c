"""Optimizer checkpoints as apex wrote them, turned into torch's layout.

At O2 apex saved torch's own layout over the masters, which needs nothing.  Different are

* its fused optimizers, which count steps per group and not per parameter;
* `FP16_Optimizer`: the inner optimizer's state beside the masters, either one
  tensor each (`fp32_from_fp16`) or one flat tensor per group (`fp32_groups_flat`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[dict[str, Any]]
_INNER, _LISTED, _FLAT = "optimizer_state_dict", "fp32_from_fp16", "fp32_groups_flat"


def torch_layout(
    state: dict[str, Any], groups: Groups, is_master: Callable[[Tensor], bool]
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """torch's layout of an optimizer's `state_dict`, and `(parameter, FP32 values)` pairs.

    `groups` are the `param_groups` to load into, `is_master` tells which of
    their parameters are masters.  A state in torch's layout comes back as it
    is.  Raises `ValueError` if apex's masters are not as many, or not as large.
    """
    values: list[tuple[Tensor, Tensor]] = []
    if _INNER in state and _LISTED in state:
        values = _listed(state[_LISTED], groups, is_master)
        state = state[_INNER]
    elif _INNER in state and _FLAT in state:
        parts = [
            _split(flat, group["params"]) for flat, group in _zipped(state[_FLAT], groups, _FLAT)
        ]
        for group, part in zip(groups, parts, strict=True):
            values += zip(group["params"], part, strict=True)
        state = _unflattened(state[_INNER], groups)
    if any("step" in group for group in state.get("param_groups", ())):
        state = _steps_per_parameter(state, groups)
    return state, values


def _zipped(saved: Sequence[Any], groups: Groups, name: str) -> list[tuple[Any, dict]]:
    if len(saved) != len(groups):
        raise ValueError(
            f"optimizer.load_state_dict(state): state[{name!r}] has {len(saved)} groups, this "
            f"optimizer has {len(groups)}."
        )
    return list(zip(saved, groups, strict=True))


def _listed(
    saved: Sequence[Sequence[Tensor]], groups: Groups, is_master: Callable[[Tensor], bool]
) -> list[tuple[Tensor, Tensor]]:
    values: list[tuple[Tensor, Tensor]] = []
    for number, (tensors, group) in enumerate(_zipped(saved, groups, _LISTED)):
        params = group["params"]
        if len(params) != len(tensors):  # apex left out those that were FP32 in the model
            params = [param for param in params if is_master(param)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [tuple(param.shape) for param in params]
        if shapes != expected:
            raise ValueError(
                f"optimizer.load_state_dict(state): state[{_LISTED!r}][{number}] has shapes "
                f"{shapes}, this optimizer's masters have {expected}."
            )
        values += zip(params, tensors, strict=True)
    return values


def _split(flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    sizes = [param.numel() for param in params]
    if flat.numel() != sum(sizes):
        raise ValueError(
            f"optimizer.load_state_dict(state): a flat tensor of {flat.numel()} elements for "
            f"parameters of {sum(sizes)}."
        )
    parts = flat.flatten().split(sizes)
    return [part.reshape(param.shape) for part, param in zip(parts, params, strict=True)]


def _unflattened(state: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """One entry per parameter, where there was one per group."""
    entries: dict[int, dict[str, Any]] = {}
    made, first = [], 0
    for saved, group in _zipped(state["param_groups"], groups, _INNER):
        params = group["params"]
        (key,) = saved["params"]
        numbers = list(range(first, first + len(params)))
        first += len(params)
        made.append({**saved, "params": numbers})
        flat = state["state"].get(key, {})
        size = sum(param.numel() for param in params)
        for name, value in flat.items():
            split = isinstance(value, Tensor) and value.numel() == size and value.dim() > 0
            parts = _split(value, params) if split else [value] * len(params)
            for number, part in zip(numbers, parts, strict=True):
                entries.setdefault(number, {})[name] = part
    return {**state, "state": entries, "param_groups": made}


def _steps_per_parameter(state: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """apex's fused optimizers count in the group; what torch's groups have more stays."""
    entries = dict(state["state"])
    made = []
    for saved, group in _zipped(state["param_groups"], groups, "param_groups"):
        saved = dict(saved)
        steps = saved.pop("step", None)
        options = {name: value for name, value in group.items() if name != "params"}
        made.append({**options, **saved})
        for key in saved["params"]:
            entry = entries.get(key)
            if steps is not None and entry and "step" not in entry:
                entries[key] = {"step": torch.tensor(float(steps)), **entry}
    return {**state, "state": entries, "param_groups": made}
