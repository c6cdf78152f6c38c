"""Errors about dtypes, explained: which tensors are half and FP32, and what to do.

PyTorch says which two dtypes met, or that it has no kernel for half.  If ampatch made a tensor
half, the user needs to know which one it is.  The answer is looked for after the error, in the
locals of the failing frame.  Calls without an error cost nothing more.
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

from ..config.opt_levels import HALF_TYPES

_ABOUT = (
    *("dtype", "scalar type", "data type", "same type", "Type does not"),
    *("'Half'", "'BFloat16'", "c10::Half", "c10::BFloat16", "HalfTensor", "BFloat16Tensor"),
    *("HalfType", "BFloat16Type", "ScalarType", "tensors of type", "types other than"),
    *("cdouble types", "Float or Double tensors"),
)
_SUPPORTED = re.compile(r"\bfloat,? (or |and )?double\b")
"""In messages that say what there is a kernel for, and not always what was given."""
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
"""What torch's messages call dtypes, in small letters: `c10::Half`, `torch.HalfTensor`, `Half`."""
_CONSTANT = "Half without overflow"
"""In torch's message about a constant that float16 cannot hold, as of `masked_fill(mask, -1e9)`."""
_LARGEST = (
    "float16 holds numbers up to 65504. Where a mask is meant, write torch.finfo(x.dtype).min for "
    "the constant, or -torch.inf where no row is masked as a whole; else compute with x.float()."
)
_OURS = __name__.partition(".")[0]
_NOTED = "_ampatch_noted"


def note(
    error: BaseException | None,
    cause: str,
    remedy: str,
    listed: Callable[[Any], str | None] = lambda value: None,
) -> None:
    """Add to an error about dtypes which tensors are half, and the remedy; once per error.

    `cause` says why anything is half here.  `remedy` goes on after "cast it yourself, or".
    `listed(value)` is the name of the function that a value has held since before the patches.
    """
    if not isinstance(error, (RuntimeError, TypeError, ValueError)) or hasattr(error, _NOTED):
        return
    if _CONSTANT in str(error):
        _add(error, f"ampatch: {cause}, and {_LARGEST}")
        return
    if not _is_due_to_half(error):
        return
    lists = _SUPPORTED.search(str(error).lower()) is not None
    found = _halves(error, in_line=lists)
    if found is None and lists:
        return  # the kernel was given something else
    own = found or "Cast the half tensor yourself, by .float(), or"
    _add(error, f"ampatch: {cause}. {own} {remedy}{_passed_on(error)}{_held_long(error, listed)}")


def _is_due_to_half(error: BaseException) -> bool:
    """Whether a message is about half: beside FP32, or without a kernel.

    It names these two dtypes, half alone, those of a kernel that there is, or, torch's, none.  One
    that names other dtypes has another cause: in FP32 it would be the same.
    """
    text = str(error)
    if not any(word in text for word in _ABOUT) or _FOR_WHOLE_NUMBERS.search(text):
        return False
    if _SUPPORTED.search(text.lower()):
        return True
    text = re.sub(r"complex<\w+>", "complexfloat", text)
    words = re.findall(r"[a-z]+\d*", re.sub(r"Tensor|Type|CPU|CUDA", "", text).lower())
    named = {_KINDS[word] for word in words if word in _KINDS}
    return named in ({"half", "single"}, {"half"}) or (not named and type(error) is RuntimeError)


def _add(error: BaseException, text: str) -> None:
    setattr(error, _NOTED, True)
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # before Python 3.11
        error.args = (f"{error}\n{text}", *error.args[1:])


def _halves(error: BaseException, in_line: bool) -> str | None:
    """The tensors of the innermost frame that holds a half one; None without one.

    `in_line`: it is the innermost of all, and in its line.
    """
    found, frames = None, list(_frames(error))
    for frame, line in frames[-1:] if in_line else frames:
        tensors = _tensors(frame, line, in_line)
        halves = [name for name, value in tensors.items() if value.dtype in HALF_TYPES]
        if halves:
            named = "; ".join(f"{name} is {value.dtype}" for name, value in tensors.items())
            code = frame.f_code
            found = (
                f"In {code.co_name} ({code.co_filename}:{line}): {named}. Cast one of them "
                f"yourself, such as {halves[0]}.float(), or"
            )
    return found


def _passed_on(error: BaseException) -> str:
    """An object of the script's own class that holds FP32 tensors: inputs in it are not cast."""
    for frame, _ in _frames(error):
        is_torchs = _package_of(frame.f_globals.get("__name__")) == "torch"
        for name, value in () if is_torchs else frame.f_locals.items():
            inside = value if type(value) in (list, tuple) else ()
            inside = value.values() if type(value) is dict else inside
            for one in (value, *inside):
                held = _held(one)
                if held:
                    kind, what = type(one).__name__, "is" if one is value else "has"
                    return (
                        f" {name} {what} a {kind}, whose {held[0]} is FP32: tensors in objects of "
                        f"a class of your own are not cast. Make {kind} a dataclass, pass a dict, "
                        "or pass the object with its tensors in half."
                    )
    return ""


def _held_long(error: BaseException, listed: Callable[[Any], str | None]) -> str:
    """What the failing line calls that is no name of torch's: it was taken before the patches."""
    frame, line = list(_frames(error))[-1]
    text = linecache.getline(frame.f_code.co_filename, line)
    for words in re.findall(r"\b\w+(?:\.\w+)*", text):
        first, *rest = words.split(".")
        value = frame.f_locals.get(first)
        for word in rest:
            value = inspect.getattr_static(value, word, None)
        if (name := listed(value)) is not None:
            return (
                f" `{words}` has held `{name}` since before `initialize`, so this call is not "
                f"cast: write {name}(...), or hold it in an attribute of a module of the model."
            )
    return ""


def _held(value: object) -> list[str]:
    """The attributes of an object of the script's own class that are FP32 tensors."""
    kind = type(value)
    if _package_of(kind.__module__) in (*_NOT_THE_SCRIPTS, _OURS):
        return []
    if issubclass(kind, (nn.Module, Tensor, torch.optim.Optimizer)):
        return []
    own: dict[str, object] = {}
    for cls in kind.__mro__:  # by descriptors: no code of the user's runs, which could raise
        for name, member in vars(cls).items():
            if name == "__dict__" and type(member) is GetSetDescriptorType:
                own.update(member.__get__(value))
            elif type(member) is MemberDescriptorType:  # a slot
                with contextlib.suppress(AttributeError):  # not set
                    own[name] = member.__get__(value)
    return [name for name, one in _floating(own).items() if one.dtype is torch.float32]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames of an error with their lines, the innermost last; without our own."""
    traceback = error.__traceback__
    while traceback is not None:
        if _package_of(traceback.tb_frame.f_globals.get("__name__")) != _OURS:
            yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _package_of(module: object) -> str:
    return str(module).partition(".")[0]


def _tensors(frame: FrameType, line: int, in_line: bool) -> dict[str, Tensor]:
    """A frame's floating tensors by their names: those of its line, if one of them is half.

    Else all of them, or, with `in_line`, none.

    In the line modules' own tensors have names too, such as `self.weight`.  They are taken from the
    modules' dictionaries: no code of the user's runs, which could raise.
    """
    found = dict(frame.f_locals)
    members: dict[str, object] = {}
    for name, module in found.items():
        if isinstance(module, nn.Module):
            own = vars(module)
            for table in (own, *(one for one in own.values() if isinstance(one, dict))):
                members.update({f"{name}.{key}": value for key, value in table.items()})
    text = linecache.getline(frame.f_code.co_filename, line)
    words = {*re.findall(r"\w+", text), *re.findall(r"\b\w+\.\w+", text)}
    named = {name: one for name, one in _floating(found | members).items() if name in words}
    is_told = any(value.dtype in HALF_TYPES for value in named.values())
    return named if is_told or in_line else _floating(found)


def _floating(values: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in values.items()
        if issubclass(type(value), Tensor) and value.is_floating_point()
    }
