"""The first non-finite value of a training, and where it came from.

    with ampatch.debug(model) as debugger:
        train(model)
    print(debugger.report)

Every submodule's outputs are looked at in the forward pass, the gradients of
its inputs, outputs and parameters in the backward pass.  That waits for the
device at each module: use it to find something, not to train.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

import ampatch

logger = logging.getLogger("ampatch")


@dataclasses.dataclass
class Report:
    """The first non-finite tensor.

    `module` is the path in the model ("" for the model itself), `phase`
    `"forward"` or `"backward"`, `where` what the tensor was, `value` `"inf"` or
    `"nan"`, `dtype` its dtype.  `largest_input` is the largest absolute finite
    number among the module's inputs (in backward: among the gradients of its
    outputs), None if not known; `input_is_finite` says whether that was all.
    `step` counts optimizer steps since `debug`, from 0.  `parameters` are the
    names of those whose gradient was non-finite in the same step; more may
    come until the step ends.
    """

    module: str
    module_class: str
    phase: str
    where: str
    value: str
    dtype: torch.dtype
    largest_input: float | None
    input_is_finite: bool
    step: int
    parameters: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        largest = "unknown" if self.largest_input is None else f"{self.largest_input:g}"
        lines = [
            f"First non-finite value ({self.value}) at step {self.step}, in {self.phase}: "
            f"{self.where} of {self.module or 'the model'} ({self.module_class}), "
            f"{self.dtype}. Largest finite input: {largest}."
        ]
        if not self.input_is_finite:
            lines.append("What went into it was not finite either: look at the data or the loss.")
        if self.phase == "backward":
            lines.append(
                "Under a dynamic loss scale a single one is normal: the step is skipped and the "
                "scale halved."
            )
        if self.parameters:
            lines.append(f"Parameters with such gradients: {', '.join(self.parameters)}.")
        return " ".join(lines)


def debug(model: nn.Module) -> Debugger:
    """Watch a model for its first inf or NaN, logged as one error on the logger "ampatch".

    Works on managed models at any opt level and on plain ones, before or after
    `initialize`.  The `Debugger` returned is a context manager; `remove()` or
    `ampatch.deactivate()` end it as well.  A module that means to return inf
    (a mask of -inf, say) is reported like any other.

    Raises `TypeError` if `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"ampatch.debug(model=...): expected a torch.nn.Module, got {type(model).__name__}."
        )
    return Debugger(model)


class Debugger:
    """Watches one model; `report` is None until something is found."""

    def __init__(self, model: nn.Module) -> None:
        self.report: Report | None = None
        self.is_active = True
        self._names = {module: name for name, module in model.named_modules()}
        self._steps: dict[int, int] = {}
        self._seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._gradients: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        for module in model.modules():
            self._handles += [
                module.register_forward_pre_hook(_Watch(self._enter), with_kwargs=True),
                module.register_forward_hook(_Watch(self._leave), with_kwargs=True),
            ]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._parameter_hook(model, name)))
        self._handles.append(register_optimizer_step_post_hook(self._stepped))
        self._stop = ampatch.observe(self)

    def remove(self) -> None:
        """Take every hook out.  The report stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop()
        self.is_active = False

    def reset(self) -> None:
        """Forget the report and look for the next one."""
        self.report = None

    def __enter__(self) -> Debugger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    @property
    def step(self) -> int:
        """Optimizer steps since the start, skipped ones too; of several optimizers the most."""
        return max(self._steps.values(), default=0)

    # What the engine and torch's optimizers tell

    def on_step(self, optimizer: Any, skipped: Any) -> None:
        """A managed optimizer has skipped a step; of one it makes torch tells us, too."""
        if skipped is True:
            self._count(optimizer)

    def on_deactivate(self) -> None:
        """Everything ampatch put in is taken out, this too."""
        self.remove()

    def _stepped(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1

    # Forward

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        for tensor in _tensors((args, kwargs)):
            if tensor.requires_grad and not tensor.is_leaf:
                self._watch(tensor).readers.append(module)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        for tensor in _tensors(output):
            if self.report is None and not _is_finite(tensor):
                self._found(module, "forward", "output", tensor, _tensors((args, kwargs)))
            if tensor.requires_grad and not tensor.is_leaf:
                self._watch(tensor).writer = module

    # Backward

    def _watch(self, tensor: Tensor) -> _Use:
        """Who writes and reads a tensor; its gradient is looked at once, with both known."""
        use = self._seen.get(tensor)
        if use is None:
            use = self._seen[tensor] = _Use()
            tensor.register_hook(lambda gradient: self._gradient(use, gradient))
        return use

    def _gradient(self, use: _Use, gradient: Tensor) -> None:
        if not self.is_active:
            return
        if use.writer is not None:
            self._gradients[use.writer] = _size(gradient)
        if self.report is not None or _is_finite(gradient):
            return
        if use.readers:  # the innermost of those that got it last
            self._found(use.readers[-1], "backward", "gradient of the input", gradient)
        else:
            self._found(use.writer, "backward", "gradient of the output", gradient, [gradient])

    def _parameter_hook(self, model: nn.Module, name: str) -> Callable[[Tensor], None]:
        owner, _, attribute = name.rpartition(".")
        module = weakref.ref(model.get_submodule(owner))

        def look(gradient: Tensor) -> None:
            if _is_finite(gradient):
                return
            if self.report is None:
                where = f"gradient of the parameter {attribute}"
                self._found(module(), "backward", where, gradient)
            if self.report.step == self.step and name not in self.report.parameters:
                self.report.parameters.append(name)

        return look

    # The report

    def _found(
        self,
        module: nn.Module,
        phase: str,
        where: str,
        tensor: Tensor,
        inputs: list[Tensor] | None = None,
    ) -> None:
        if inputs is None:
            largest, finite = self._gradients.get(module, (None, True))
        else:
            sizes = [_size(one) for one in inputs]
            largest = max((size for size, _ in sizes if size is not None), default=None)
            finite = all(one for _, one in sizes)
        value = "nan" if bool(torch.isnan(_values(tensor)).any()) else "inf"
        self.report = Report(
            self._names.get(module, "?"),
            type(module).__name__,
            phase,
            where,
            value,
            tensor.dtype,
            largest,
            finite,
            self.step,
        )
        logger.error("%s", self.report)


@dataclasses.dataclass
class _Use:
    """The module a tensor came out of, and those it went into, outermost first."""

    writer: nn.Module | None = None
    readers: list[nn.Module] = dataclasses.field(default_factory=list)


class _Watch:
    """A hook that copies and pickles of the model do without."""

    def __init__(self, call: Callable) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __deepcopy__(self, memo: dict) -> Callable:
        return watched_no_more

    def __reduce__(self) -> str:
        return "watched_no_more"


def watched_no_more(*args: Any) -> None:
    """What is left of our hooks in a copied or unpickled model: nothing."""


def _tensors(value: Any) -> list[Tensor]:
    """The floating tensors in outputs and arguments of any common shape."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict) or hasattr(value, "items"):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _is_finite(tensor: Tensor) -> bool:
    with ampatch.disable_casts():
        return bool(torch.isfinite(_values(tensor)).all())


def _size(tensor: Tensor) -> tuple[float | None, bool]:
    """The largest absolute finite value, None if there is none, and whether all are finite."""
    with ampatch.disable_casts():
        values = _values(tensor)
        finite = torch.isfinite(values)
        kept = values[finite]
        largest = kept.abs().max().item() if kept.numel() else None
        return largest, bool(finite.all())
