"""Errors about dtypes, explained: which tensors are half and FP32, and what to do.

PyTorch says which two dtypes met, or that it has no kernel for half.  If ampatch made a tensor
half, the user needs to know which tensor.  It is looked for after the error, in the locals of the
failing frame.  Calls without an error cost nothing more.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from types import FrameType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from ..config.opt_levels import HALF_DTYPES

_ABOUT = (
    *("dtype", "scalar type", "data type", "same type", "Type does not"),
    *("'Half'", "'BFloat16'", "c10::Half", "c10::BFloat16", "HalfTensor", "BFloat16Tensor"),
    *("HalfType", "BFloat16Type", "ScalarType", "tensors of type", "types other than"),
    *("cdouble types", "Float or Double tensors", "Type promoting", "must have the type"),
)
_HALF_WEIGHT = "expect parameter to have scalar type of Float"
"""In torch's message about FP32 values in a norm on the CPU whose weight is half."""
_SUPPORTED = re.compile(r"\bfloat,? (or |and )?double\b")
"""In messages that name the dtypes with a kernel, and not always those of the arguments."""
_FOR_WHOLE_NUMBERS = re.compile(r'"(bitwise|gcd|lcm|lshift|rshift)')
"""In messages of functions that have no kernel for FP32 either."""
_NOT_THE_SCRIPTS = ("builtins", "collections", "torch", "numpy")
_KINDS = {
    **dict.fromkeys(("half", "float16", "bfloat16"), "half"),
    **dict.fromkeys(("float", "float32"), "single"),
    **dict.fromkeys(("double", "float64"), "double"),
    **dict.fromkeys(("bool", "byte", "char", "short", "int", "long"), "whole"),
    **dict.fromkeys(("uint8", "int8", "int16", "int32", "int64"), "whole"),
    **dict.fromkeys(("complexhalf", "complexfloat", "complexdouble"), "complex"),
}
"""Names of dtypes in torch's messages, in lower case: `c10::Half`, `torch.HalfTensor`, `Half`."""
_CONSTANT = "Half without overflow"
"""In torch's message about a constant that float16 cannot hold, as of `masked_fill(mask, -1e9)`."""
_LARGEST = (
    "float16 holds numbers up to 65504. Where a mask is meant, write torch.finfo(x.dtype).min for "
    "the constant, or -torch.inf where no row is masked as a whole; else compute with x.float()."
)
_OURS = __name__.partition(".")[0]
_EXPLAINED = "_ampatch_explained"


def explain(
    error: BaseException | None,
    cause: str,
    remedy: str,
    unpatched_name: Callable[[Any], str | None] = lambda value: None,
) -> None:
    """Add a note to an error about dtypes: which tensors are half, and the remedy.  Once per error.

    `cause` says why a tensor is half.  `remedy` continues "cast it yourself, or".
    `unpatched_name(value)` is the name of a function of torch that the script has bound before the
    patches; None for any other value.
    """
    if not isinstance(error, (RuntimeError, TypeError, ValueError)) or hasattr(error, _EXPLAINED):
        return
    if _CONSTANT in str(error):
        _add_note(error, f"ampatch: {cause}, and {_LARGEST}")
        return
    if not _is_due_to_half(error):
        return
    lists_supported = _SUPPORTED.search(str(error).lower()) is not None
    tensors = _half_tensors(error, in_line=lists_supported)
    if tensors is None and lists_supported:
        return  # an argument has another dtype without a kernel
    advice = f"{tensors or 'Cast the half tensor yourself, by .float(), or'} {remedy}"
    more = _note_on_own_class(error) + _note_on_unpatched_function(error, unpatched_name)
    _add_note(error, f"ampatch: {cause}. {advice}{more}")


def _is_due_to_half(error: BaseException) -> bool:
    """Whether a message is about half: beside FP32, or without a kernel.

    Such a message names half and FP32, half alone, or the dtypes that have a kernel; one of torch's
    may name none.  A message that names other dtypes has another cause, which FP32 has too.
    """
    text = str(error)
    if not any(word in text for word in _ABOUT) or _FOR_WHOLE_NUMBERS.search(text):
        return False
    if _SUPPORTED.search(text.lower()) or _HALF_WEIGHT in text:
        return True
    text = re.sub(r"complex<\w+>", "complexfloat", text)
    words = re.findall(r"[a-z]+\d*", re.sub(r"Tensor|Type|CPU|CUDA", "", text).lower())
    named = {_KINDS[word] for word in words if word in _KINDS}
    return named in ({"half", "single"}, {"half"}) or (not named and type(error) is RuntimeError)


def _add_note(error: BaseException, text: str) -> None:
    setattr(error, _EXPLAINED, True)
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # before Python 3.11
        error.args = (f"{error}\n{text}", *error.args[1:])


def _half_tensors(error: BaseException, in_line: bool) -> str | None:
    """The tensors of the innermost frame that has a half tensor; None if no frame has any.

    `in_line`: only the line of the innermost frame counts.
    """
    text, frames = None, list(_frames(error))
    for frame, line in frames[-1:] if in_line else frames:
        tensors = _tensors(frame, line, in_line)
        halves = [name for name, value in tensors.items() if value.dtype in HALF_DTYPES]
        if halves:
            named = "; ".join(f"{name} is {value.dtype}" for name, value in tensors.items())
            code = frame.f_code
            text = (
                f"In {code.co_name} ({code.co_filename}:{line}): {named}. Cast one of them "
                f"yourself, such as {halves[0]}.float(), or"
            )
    return text


def _note_on_own_class(error: BaseException) -> str:
    """Names an object of the script's own class that has FP32 tensors: they are not cast."""
    for frame, _ in _frames(error):
        is_torchs = _package_of(frame.f_globals.get("__name__")) == "torch"
        for name, value in () if is_torchs else frame.f_locals.items():
            inside = value if type(value) in (list, tuple) else ()
            inside = value.values() if type(value) is dict else inside
            for item in (value, *inside):
                attributes = _float_attributes(item)
                if attributes:
                    kind, what = type(item).__name__, "is" if item is value else "has"
                    return (
                        f" {name} {what} a {kind}, whose {attributes[0]} is FP32: tensors in "
                        f"objects of a class of your own are not cast. Make {kind} a dataclass, "
                        "pass a dict, or pass the object with its tensors in half."
                    )
    return ""


def _note_on_unpatched_function(
    error: BaseException, unpatched_name: Callable[[Any], str | None]
) -> str:
    """Names a function of torch that the failing line calls by a name from before the patches."""
    frame, line = list(_frames(error))[-1]
    text = linecache.getline(frame.f_code.co_filename, line)
    for words in re.findall(r"\b\w+(?:\.\w+)*", text):
        first, *rest = words.split(".")
        value = frame.f_locals.get(first)
        for word in rest:
            value = inspect.getattr_static(value, word, None)
        if (name := unpatched_name(value)) is not None:
            return (
                f" `{words}` has held `{name}` since before `initialize`, so this call is not "
                f"cast: write {name}(...), or hold it in an attribute of a module of the model."
            )
    return ""


def _float_attributes(value: object) -> list[str]:
    """The names of FP32 tensors in an object of the script's own class."""
    kind = type(value)
    if _package_of(kind.__module__) in (*_NOT_THE_SCRIPTS, _OURS):
        return []
    if issubclass(kind, (nn.Module, Tensor, torch.optim.Optimizer)):
        return []
    own: dict[str, object] = {}
    for cls in kind.__mro__:  # by descriptors: code of the user's could raise
        for name, member in vars(cls).items():
            if name == "__dict__" and type(member) is GetSetDescriptorType:
                own.update(member.__get__(value))
            elif type(member) is MemberDescriptorType:  # a slot
                with contextlib.suppress(AttributeError):  # not set
                    own[name] = member.__get__(value)
    tensors = _floating(own)
    return [name for name, tensor in tensors.items() if tensor.dtype is torch.float32]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of an error with their lines, the innermost last, without those of ampatch."""
    traceback = error.__traceback__
    while traceback is not None:
        if _package_of(traceback.tb_frame.f_globals.get("__name__")) != _OURS:
            yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _package_of(module: object) -> str:
    return str(module).partition(".")[0]


def _tensors(frame: FrameType, line: int, in_line: bool) -> dict[str, Tensor]:
    """A frame's floating tensors by name: those that its line names, if one of them is half.

    Else all of its locals, or with `in_line` those that its line names.

    A line names tensors of modules too, such as `self.weight`.  They are read from the modules'
    dictionaries: code of the user's could raise.
    """
    variables = dict(frame.f_locals)
    members: dict[str, object] = {}
    for name, module in variables.items():
        if isinstance(module, nn.Module):
            own = vars(module)
            for table in (own, *(value for value in own.values() if isinstance(value, dict))):
                members.update({f"{name}.{key}": value for key, value in table.items()})
    text = linecache.getline(frame.f_code.co_filename, line)
    words = {*re.findall(r"\w+", text), *re.findall(r"\b\w+\.\w+", text)}
    candidates = _floating(variables | members)
    named = {name: tensor for name, tensor in candidates.items() if name in words}
    has_half = any(tensor.dtype in HALF_DTYPES for tensor in named.values())
    return named if has_half or in_line else _floating(variables)


def _floating(values: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in values.items()
        if issubclass(type(value), Tensor) and value.is_floating_point()
    }
