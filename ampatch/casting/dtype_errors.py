"""Errors about dtypes, explained: which tensors are half and FP32, and what to do.

PyTorch says which two dtypes met.  If ampatch made one of them half, the user needs to know
which tensor it is.  The answer is looked for after the error, in the locals of the failing
frame.  Calls without an error cost nothing more.
"""

from __future__ import annotations

import linecache
import re
from types import FrameType

from torch import Tensor, nn

from ..config.opt_levels import HALF_TYPES

_ABOUT = (
    *("dtype", "scalar type", "data type", "same type", "Type does not"),
    *("'Half'", "'BFloat16'", "c10::Half", "c10::BFloat16", "HalfTensor", "BFloat16Tensor"),
    *("HalfType", "BFloat16Type"),
)
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
_REMEDY = (
    "keep the call that made it in FP32: see `overrides=` of ampatch.initialize and "
    'ampatch.precision("float").'
)
_NOTED = "_ampatch_noted"


def note(error: BaseException | None, cause: str) -> None:
    """Add to an error about dtypes which tensors are half, and the remedy; once per error.

    `cause` says why anything is half here.
    """
    if not isinstance(error, (RuntimeError, TypeError, ValueError)) or hasattr(error, _NOTED):
        return
    if _CONSTANT in str(error):
        _add(error, f"ampatch: {cause}, and {_LARGEST}")
        return
    if _is_due_to_half(error):
        _add(error, _describe(error, cause))


def _is_due_to_half(error: BaseException) -> bool:
    """Whether a message is about half beside FP32: it names these two dtypes, or, torch's, none.

    One that names other dtypes has another cause: in FP32 it would be the same.
    """
    text = str(error)
    if not any(word in text for word in _ABOUT):
        return False
    text = re.sub(r"complex<\w+>", "complexfloat", text)
    words = re.findall(r"[a-z]+\d*", re.sub(r"Tensor|Type|CPU|CUDA", "", text).lower())
    named = {_KINDS[word] for word in words if word in _KINDS}
    return named == {"half", "single"} or (not named and type(error) is RuntimeError)


def _add(error: BaseException, text: str) -> None:
    setattr(error, _NOTED, True)
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # before Python 3.11
        error.args = (f"{error}\n{text}", *error.args[1:])


def _describe(error: BaseException, cause: str) -> str:
    """With the tensors of the innermost frame that holds a half one, if there is such a frame."""
    traceback, found = error.__traceback__, ""
    while traceback is not None:
        frame, line = traceback.tb_frame, traceback.tb_lineno
        tensors = _tensors(frame, line) if _package(frame) != _OURS else {}
        halves = [name for name, value in tensors.items() if value.dtype in HALF_TYPES]
        if halves:
            named = "; ".join(f"{name} is {value.dtype}" for name, value in tensors.items())
            code = frame.f_code
            found = (
                f" In {code.co_name} ({code.co_filename}:{line}): {named}. Cast one of them "
                f"yourself, such as {halves[0]}.float(), or"
            )
        traceback = traceback.tb_next
    return (
        f"ampatch: {cause}.{found or ' Cast the half tensor yourself, by .float(), or'} {_REMEDY}"
    )


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _tensors(frame: FrameType, line: int) -> dict[str, Tensor]:
    """A frame's floating tensors by their names: those of its line, if one of them is half.

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
    return named if is_told else _floating(found)


def _floating(values: dict[str, object]) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
