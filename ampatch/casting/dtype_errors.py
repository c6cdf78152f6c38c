"""Notes on errors about dtypes: which tensors are half and which FP32, and what to do.

PyTorch's message names the two dtypes that met, or that there is no half kernel.  If ampatch made a
tensor half, the user needs to know which tensor.  `explain` searches the local variables of the
failing Python frame, after the error.  Calls without an error cost nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import linecache
import re
from collections.abc import Callable, Iterator
from types import FrameType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from ..config.opt_levels import HALF_DTYPES

_DTYPE_PHRASES = re.compile(
    "dtype|scalar type|data type|same type|Type does not|'Half'|'BFloat16'|c10::Half|c10::BFloat16|"
    "HalfTensor|BFloat16Tensor|HalfType|BFloat16Type|ScalarType|tensors of type|types other than|"
    "cdouble types|Float or Double tensors|Type promoting|must have the type"
)
"""Matches torch's messages about dtypes."""
_NORM_PHRASE = "expect parameter to have scalar type of Float"
"""Part of torch's message about a CPU norm of FP32 values with a half weight."""
_LISTS_SUPPORTED_DTYPES = re.compile(r"\bfloat,? (or |and )?double\b")
"""Matches messages that list the supported dtypes.  Not all name the arguments' dtypes."""
_INTEGER_FUNCTIONS = re.compile(r'"(bitwise|gcd|lcm|lshift|rshift)')
"""Matches messages of functions that have no FP32 kernel either."""
_LIBRARIES = ("builtins", "collections", "torch", "numpy")
"""Packages whose classes are not the script's own."""
_DTYPE_GROUPS = {
    **dict.fromkeys(("half", "float16", "bfloat16"), "half"),
    **dict.fromkeys(("float", "float32"), "single"),
    **dict.fromkeys(("double", "float64"), "double"),
    **dict.fromkeys(("bool", "byte", "char", "short", "int", "long"), "integer"),
    **dict.fromkeys(("uint8", "int8", "int16", "int32", "int64"), "integer"),
    **dict.fromkeys(("complexhalf", "complexfloat", "complexdouble"), "complex"),
}
"""By a dtype's name in torch's messages, in lower case: `half` of `c10::Half`, `HalfTensor`."""
_OVERFLOW_PHRASE = "Half without overflow"
"""Part of torch's message about a constant that float16 cannot hold: `masked_fill(mask, -1e9)`."""
_OVERFLOW_ADVICE = (
    "float16 holds numbers up to 65504. Where a mask is meant, write torch.finfo(x.dtype).min for "
    "the constant, or -torch.inf where no row is masked as a whole; else compute with x.float()."
)
_AMPATCH_PACKAGE = __name__.partition(".")[0]
_IS_EXPLAINED = "_ampatch_explained"


def explain(
    error: BaseException | None,
    cause: str,
    remedy: str,
    unpatched_name: Callable[[Any], str | None] = lambda value: None,
) -> None:
    """Add a note to an error about dtypes, once: which tensors are half, and the remedy.

    `cause`: why a tensor is half.  `remedy` continues "cast it yourself, or".
    `unpatched_name(value)` returns the name of a function of torch that the script bound before the
    patches were installed, and None for any other value.
    """
    if not isinstance(error, (RuntimeError, TypeError, ValueError)):
        return
    if hasattr(error, _IS_EXPLAINED):
        return
    if _OVERFLOW_PHRASE in str(error):
        _add_note(error, f"ampatch: {cause}, and {_OVERFLOW_ADVICE}")
        return
    if not _is_due_to_half(error):
        return
    lists_supported = _LISTS_SUPPORTED_DTYPES.search(str(error).lower()) is not None
    tensors = _half_tensors(error, in_line=lists_supported)
    if tensors is None and lists_supported:
        return  # the unsupported dtype is not half
    advice = f"{tensors or 'Cast the half tensor yourself, by .float(), or'} {remedy}"
    more = _note_on_own_class(error) + _note_on_unpatched_function(error, unpatched_name)
    _add_note(error, f"ampatch: {cause}. {advice}{more}")


def _is_due_to_half(error: BaseException) -> bool:
    """Whether a half tensor caused an error: it met an FP32 tensor, or there is no half kernel.

    The message then names half and FP32, half alone, the supported dtypes, or no dtype.  If it
    names other dtypes, FP32 would raise the same error.
    """
    text = str(error)
    if not _DTYPE_PHRASES.search(text) or _INTEGER_FUNCTIONS.search(text):
        return False
    if _LISTS_SUPPORTED_DTYPES.search(text.lower()) or _NORM_PHRASE in text:
        return True
    text = re.sub(r"complex<\w+>", "complexfloat", text)
    words = re.findall(r"[a-z]+\d*", re.sub(r"Tensor|Type|CPU|CUDA", "", text).lower())
    named = {_DTYPE_GROUPS[word] for word in words if word in _DTYPE_GROUPS}
    return named in ({"half", "single"}, {"half"}) or (not named and type(error) is RuntimeError)


def _add_note(error: BaseException, text: str) -> None:
    setattr(error, _IS_EXPLAINED, True)
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # before Python 3.11
        error.args = (f"{error}\n{text}", *error.args[1:])


def _half_tensors(error: BaseException, in_line: bool) -> str | None:
    """Describe the tensors of the innermost Python frame with a half tensor, or return None.

    With `in_line`, only the tensors in the failing line of the innermost frame count.
    """
    text = None
    frames = list(_frames(error))
    for frame, line in frames[-1:] if in_line else frames:
        tensors = _tensors_of_frame(frame, line, in_line)
        half_names = [name for name, value in tensors.items() if value.dtype in HALF_DTYPES]
        if half_names:
            named = "; ".join(f"{name} is {value.dtype}" for name, value in tensors.items())
            code = frame.f_code
            text = (
                f"In {code.co_name} ({code.co_filename}:{line}): {named}. Cast one of them "
                f"yourself, such as {half_names[0]}.float(), or"
            )
    return text


def _note_on_own_class(error: BaseException) -> str:
    """A note on an object of the script's own class with FP32 tensors, which are not cast."""
    for frame, _ in _frames(error):
        is_of_torch = _package_of(frame.f_globals.get("__name__")) == "torch"
        for name, value in () if is_of_torch else frame.f_locals.items():
            inside = value if type(value) in (list, tuple) else ()
            inside = value.values() if type(value) is dict else inside
            for item in (value, *inside):
                attributes = _fp32_attributes(item)
                if attributes:
                    cls = type(item).__name__
                    verb = "is" if item is value else "has"
                    return (
                        f" {name} {verb} a {cls}, whose {attributes[0]} is FP32: tensors in "
                        f"objects of a class of your own are not cast. Make {cls} a dataclass, "
                        "pass a dict, or pass the object with its tensors in half."
                    )
    return ""


def _note_on_unpatched_function(
    error: BaseException, unpatched_name: Callable[[Any], str | None]
) -> str:
    """A note on a function that the failing line calls by a name bound before the patches."""
    frame, line = list(_frames(error))[-1]
    text = linecache.getline(frame.f_code.co_filename, line)
    for dotted_name in re.findall(r"\b\w+(?:\.\w+)*", text):
        first, *rest = dotted_name.split(".")
        value = frame.f_locals.get(first)
        for attribute in rest:
            value = inspect.getattr_static(value, attribute, None)
        if (name := unpatched_name(value)) is not None:
            return (
                f" `{dotted_name}` has held `{name}` since before `initialize`, so this call is "
                f"not cast: write {name}(...), or hold it in an attribute of a module of the model."
            )
    return ""


def _fp32_attributes(value: object) -> list[str]:
    """The names of FP32 tensors in an object of the script's own class, if it is not a dataclass.

    Dataclasses are cast as inputs; a dataclass with FP32 tensors was made in the forward.
    """
    cls = type(value)
    if dataclasses.is_dataclass(cls):
        return []
    if _package_of(cls.__module__) in (*_LIBRARIES, _AMPATCH_PACKAGE):
        return []
    if issubclass(cls, (nn.Module, Tensor, torch.optim.Optimizer)):
        return []
    attributes: dict[str, object] = {}
    for base in cls.__mro__:  # through descriptors: the user's code could raise
        for name, member in vars(base).items():
            if name == "__dict__" and type(member) is GetSetDescriptorType:
                attributes.update(member.__get__(value))
            elif type(member) is MemberDescriptorType:  # of `__slots__`
                with contextlib.suppress(AttributeError):  # not set
                    attributes[name] = member.__get__(value)
    tensors = _floating_tensors(attributes)
    return [name for name, tensor in tensors.items() if tensor.dtype is torch.float32]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """An error's Python frames outside ampatch, each with its line, the innermost last."""
    traceback = error.__traceback__
    while traceback is not None:
        if _package_of(traceback.tb_frame.f_globals.get("__name__")) != _AMPATCH_PACKAGE:
            yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _package_of(module: object) -> str:
    return str(module).partition(".")[0]


def _tensors_of_frame(frame: FrameType, line: int, in_line: bool) -> dict[str, Tensor]:
    """The floating-point tensors that a frame's line names, or all of the frame's, by name.

    All of the frame's if none in the line is half, and `in_line` is False.  A line may name tensors
    of modules, such as `self.weight`.  They are read from the modules' `__dict__`, because the
    user's code could raise.
    """
    variables = dict(frame.f_locals)
    members: dict[str, object] = {}
    for name, module in variables.items():
        if isinstance(module, nn.Module):
            attributes = vars(module)
            dicts = [value for value in attributes.values() if isinstance(value, dict)]
            for entries in (attributes, *dicts):
                members.update({f"{name}.{key}": value for key, value in entries.items()})
    text = linecache.getline(frame.f_code.co_filename, line)
    words = {*re.findall(r"\w+", text), *re.findall(r"\b\w+\.\w+", text)}
    candidates = _floating_tensors(variables | members)
    named = {name: tensor for name, tensor in candidates.items() if name in words}
    has_half = any(tensor.dtype in HALF_DTYPES for tensor in named.values())
    return named if has_half or in_line else _floating_tensors(variables)


def _floating_tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in values.items()
        if issubclass(type(value), Tensor) and value.is_floating_point()
    }
