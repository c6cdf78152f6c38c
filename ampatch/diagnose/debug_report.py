"""The report of `ampatch.debug` about a non-finite value."""

from __future__ import annotations

import dataclasses
import linecache
import math
from types import CodeType

import torch

MAX_NAMES = 10  # parameters named in the text; `parameters` holds all


@dataclasses.dataclass
class Report:
    """A non-finite value, and the operator that made it.

    Attributes:
        operator: PyTorch's name of the operator ("aten.addmm"); "" if it ran in compiled code or in
            another thread.
        module: the path of the module in which it ran; "" for the model itself, None outside the
            model, such as in the loss.
        module_class: the class of that module.
        location: the line of the script.
        phase: "forward", "backward", or "step" (in the optimizer).
        value: "inf" or "nan".
        dtype: the dtype of the operator's output.
        largest_input: the largest absolute finite number among its inputs; None if unknown.
        input_is_finite: whether all inputs were finite.
        where: where the value was noticed: a module's output, a gradient, the loss, a weight.
        step: the number of optimizer steps since `debug`, from 0.
        rank: the rank in torch.distributed; None without it.
        loss_scale: the scale of the `scale_loss` block in which it was noticed; None outside.
        at_scale_1: the largest absolute value that the operator would return at loss scale 1; inf
            if no scale makes it finite; None if unknown, or not in backward.
        parameters: names of the parameters with non-finite gradients (or weights, in a step) in the
            same step; more may come until the step ends.
        advice: a known cause of such values; "" if there is none.
    """

    module: str | None
    module_class: str
    phase: str
    where: str
    value: str
    dtype: torch.dtype
    largest_input: float | None
    input_is_finite: bool
    step: int
    operator: str = ""
    location: str = ""
    rank: int | None = None
    loss_scale: float | None = None
    at_scale_1: float | None = None
    parameters: list[str] = dataclasses.field(default_factory=list)
    advice: str = ""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", on rank {self.rank}"
        largest = "unknown" if self.largest_input is None else f"{self.largest_input:g}"
        lines = [
            f"First non-finite value ({self.value}) at step {self.step}{rank}, in {self.phase}: "
            f"{self._made_by()}. Largest finite input: {largest}. Noticed in the {self.where}."
        ]
        if not self.input_is_finite:
            lines.append("Its inputs were not finite either: check the data or the loss.")
        if self.loss_scale is not None and self.phase == "backward":
            at_scale_1 = (
                ""
                if self.at_scale_1 is None
                else f"; at scale 1 the value is {self.at_scale_1:.3g}"
            )
            if self.at_scale_1 == math.inf:
                at_scale_1 = "; no loss scale makes the value finite"
            lines.append(f"The loss scale was {self.loss_scale:g}{at_scale_1}.")
        if self.parameters:
            num_hidden = len(self.parameters) - MAX_NAMES
            rest = f" and {num_hidden} more" if num_hidden > 0 else ""
            label = "Parameters" if self.phase == "step" else "Parameters with such gradients"
            lines.append(f"{label}: {', '.join(self.parameters[:MAX_NAMES])}{rest}.")
        return " ".join(filter(None, [*lines, self.advice]))

    def in_short(self) -> str:
        """Step, loss scale, value and operator, for a list."""
        scale = "" if self.loss_scale is None else f", loss scale {self.loss_scale:g}"
        return f"step {self.step}{scale}: {self.value} {self._made_by()}"

    def _made_by(self) -> str:
        unseen = "an operator that is not visible (compiled code, or another thread)"
        made_by = f"made by {self.operator or unseen}"
        module = f"in {self.module or 'the model'} ({self.module_class})"
        if self.module is None:
            module = "in the optimizer's step" if self.phase == "step" else "outside of the model"
        at = f" at {self.location}" if self.location else ""
        return f"{made_by} in {self.dtype}, {module}{at}"


def location(code: CodeType | None, line: int) -> str:
    """A line of code: file, line number, and the text of the line."""
    if code is None:
        return ""
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}" + (f" `{text}`" if text else "")
