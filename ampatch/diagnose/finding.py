"""What `ampatch.debug` says of the first non-finite value."""

from __future__ import annotations

import dataclasses
import linecache
from types import CodeType

import torch

SHOWN = 10  # parameters that the text names; `parameters` has them all


@dataclasses.dataclass
class Report:
    """The first non-finite value, and the operator that made it.

    `operator` is PyTorch's name for it ("aten.addmm"; "" if it ran where it cannot be
    seen: in compiled code, in another thread).  `module` is the path of the module it
    ran in ("" for the model itself, None outside of the model: in the loss, say),
    `module_class` its class, `location` the line of your code, `phase` `"forward"`,
    `"backward"` or `"step"` (in the optimizer).  `value` is `"inf"` or `"nan"`, `dtype`
    the dtype of the operator's output, `largest_input` the largest absolute finite
    number among its inputs, None if not known; `input_is_finite` says whether that
    was all.  `where` is where it was noticed: the output of a module, a gradient, the
    loss, a weight.  `step` counts optimizer steps since `debug`, from 0; `rank` is
    this process's in torch.distributed, None without.  `parameters` are the names of
    those whose gradients (weights, if a step made it) were non-finite in the same
    step; more may come until the step ends.
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
    parameters: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", on rank {self.rank}"
        made = f"made by {self.operator}" if self.operator else "made where operators are not seen"
        at = f" at {self.location}" if self.location else ""
        largest = "unknown" if self.largest_input is None else f"{self.largest_input:g}"
        first = (
            f"First non-finite value ({self.value}) at step {self.step}{rank}, in {self.phase}: "
            f"{made} in {self.dtype}, {self._module()}{at}. "
            f"Largest finite input: {largest}. Noticed in the {self.where}."
        )
        lines = [first]
        if not self.input_is_finite:
            lines.append("What went into it was not finite either: look at the data or the loss.")
        if self.phase == "backward":
            lines.append(
                "Under a dynamic loss scale a single one is normal: the step is skipped and the "
                "scale halved."
            )
        if self.parameters:
            left = len(self.parameters) - SHOWN
            more = f" and {left} more" if left > 0 else ""
            what = "Parameters" if self.phase == "step" else "Parameters with such gradients"
            lines.append(f"{what}: {', '.join(self.parameters[:SHOWN])}{more}.")
        return " ".join(lines)

    def _module(self) -> str:
        if self.phase == "step" and self.module is None:
            return "in the optimizer's step"
        if self.module is None:
            return "outside of the model"
        return f"in {self.module or 'the model'} ({self.module_class})"


def location(code: CodeType | None, line: int) -> str:
    """A line of code as people look for it: file, number and what is written there."""
    if code is None:
        return ""
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line}" + (f" `{text}`" if text else "")
