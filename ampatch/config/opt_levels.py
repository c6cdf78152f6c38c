"""The opt levels: their default settings, and the user's settings checked against them.

An opt level is a frozen `Properties`.  With the user's other settings, which are checked here, it
gives another frozen `Properties`, so code that reads it need not check again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import did_you_mean
from ..log import LOG_ONCE, logger
from ..torch_private.devices import host_computes_in_bfloat16
from .scale_settings import SCALE_SETTING_NAMES, ScaleSettings, checked_static_scale
from .validation import known_word, positive_number, truth_value, whole_number

HALF_DTYPES = (torch.float16, torch.bfloat16)

_DTYPE_NAMES = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
}


@dataclasses.dataclass(frozen=True)
class Properties:
    """The precision settings of one training, complete and checked.

    `cast_model_type` is the dtype of the model's weights and inputs (None: they are not cast),
    `dtype` the half dtype, `loss_scale` `"dynamic"` or a positive float.  The limits of the scale
    are positive floats.
    """

    opt_level: str
    dtype: torch.dtype = torch.float16
    enabled: bool = True
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: str | float = 1.0
    cast_model_outputs: torch.dtype | None = None
    num_losses: int = 1
    verbosity: int = 1
    min_loss_scale: float = ScaleSettings.min_loss_scale
    max_loss_scale: float = ScaleSettings.max_loss_scale
    init_scale: float = ScaleSettings.init_scale
    growth_interval: int = ScaleSettings.growth_interval
    growth_factor: float = ScaleSettings.growth_factor
    backoff_factor: float = ScaleSettings.backoff_factor
    max_consecutive_skips: int = 50
    allow_banned: bool = True
    patch_scope: str = "model"

    def format_settings(self) -> str:
        """A line for each setting of the opt level, and for others that are not the default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        level_names = ("opt_level", "dtype", *LEVEL_SETTINGS)
        values = {name: value for name, value in vars(self).items() if name in level_names}
        values |= {name: value for name, value in vars(self).items() if value != defaults[name]}
        return "".join(f"\n  {name:<21} {value}" for name, value in values.items())

    @property
    def casts_model(self) -> bool:
        """Whether weights and inputs are converted (O0, O2, O3)."""
        return self.cast_model_type is not None

    @property
    def uses_half_copies(self) -> bool:
        """Whether weights stay FP32, and modules have half copies while a forward runs (O2)."""
        return self.cast_model_type in HALF_DTYPES and self.master_weights is not False

    @property
    def keeps_norms(self) -> bool:
        """Whether BatchNorm computes with FP32 weights in a half model.

        At O2 its statistics are FP32, and its kernels need weights of the same dtype.
        """
        half = self.cast_model_type in HALF_DTYPES
        return half and (self.uses_half_copies or bool(self.keep_batchnorm_fp32))

    @property
    def scale_settings(self) -> ScaleSettings:
        """The settings of a dynamic loss scale."""
        return ScaleSettings(**{name: getattr(self, name) for name in SCALE_SETTING_NAMES})


def level_defaults(name: str, dtype: torch.dtype) -> Properties:
    """The defaults of opt level `name` ("O0" to "O3") for the half dtype `dtype`."""
    scale: str | float = "dynamic" if dtype is torch.float16 else 1.0
    return {
        "O0": Properties("O0", dtype, cast_model_type=torch.float32, master_weights=False),
        "O1": Properties("O1", dtype, patch_torch_functions=True, loss_scale=scale),
        "O2": Properties(
            "O2",
            dtype,
            cast_model_type=dtype,
            keep_batchnorm_fp32=True,
            master_weights=True,
            loss_scale=scale,
        ),
        "O3": Properties(
            "O3", dtype, cast_model_type=dtype, keep_batchnorm_fp32=False, master_weights=False
        ),
    }[name]


LEVELS = ("O0", "O1", "O2", "O3")

# The names of O1 and O2 in bfloat16 in ROCm's apex.
_BFLOAT16_LEVELS = {"O4": "O1", "O5": "O2"}
LEVELS_IN_WORDS = (
    "O0, O1, O2 or O3, or O4 and O5, which are O1 and O2 in bfloat16 (the letter O, not the digit "
    "zero)"
)

# Settings that the opt level decides; an argument of None leaves them to the level.
MODEL_SETTINGS = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
)
LEVEL_SETTINGS = (*MODEL_SETTINGS, "loss_scale")

# The other arguments of `initialize` that are settings.
SETTING_ARGUMENTS = tuple(
    field.name
    for field in dataclasses.fields(Properties)
    if field.name not in ("opt_level", "dtype")
)


def properties_for(opt_level: Any, dtype: Any = torch.float16, **settings: Any) -> Properties:
    """The checked `Properties` for an opt level and the user's other settings.

    None leaves a setting of `LEVEL_SETTINGS` to the opt level, and a setting of the dynamic loss
    scale at its default.  Raises `TypeError` or `ValueError` naming the argument.
    """
    name, half = level_name(opt_level), half_dtype(dtype)
    if name in _BFLOAT16_LEVELS:
        name, half = _BFLOAT16_LEVELS[name], torch.bfloat16
    defaults = level_defaults(name, half)
    scale = {key: settings[key] for key in SCALE_SETTING_NAMES if settings.get(key) is not None}
    checked = vars(ScaleSettings().with_changes("ampatch.initialize(...)", scale)) | {
        key: _VALIDATORS[key](_user_call(key, value), value)
        for key, value in settings.items()
        if not (key in SCALE_SETTING_NAMES or (value is None and key in LEVEL_SETTINGS))
    }
    properties = dataclasses.replace(defaults, **checked)
    _refuse_contradictions(properties, settings)
    return properties


def _user_call(argument: str, value: Any) -> str:
    """The argument with its value, as errors name it."""
    return f"ampatch.initialize({argument}={value!r})"


def level_name(value: Any) -> str:
    """The name of an opt level.  Raises `ValueError` for anything else."""
    if value not in (*LEVELS, *_BFLOAT16_LEVELS):
        raise ValueError(
            f"ampatch.initialize(opt_level={value!r}): unknown opt level {value!r}. "
            f"Expected {LEVELS_IN_WORDS}.{did_you_mean_level(value)}"
        )
    return str(value)


def did_you_mean_level(value: Any) -> str:
    """Returns `' Did you mean "O1"?'` for o1 and 01, and '' for values that are not a near miss."""
    text = str(value)
    meant = text.upper().replace("0", "O", text.startswith("0"))
    return f' Did you mean "{meant}"?' if meant in (*LEVELS, *_BFLOAT16_LEVELS) else ""


def warn_of_slow_float16(properties: Properties, parameters: Iterable[Tensor]) -> None:
    """Warn once that float16 is slow on the CPU, if some of these weights are there."""
    is_used = properties.enabled and properties.opt_level != "O0"
    if not is_used or properties.dtype is not torch.float16:
        return
    if not any(parameter.device.type == "cpu" for parameter in parameters):
        return
    slow = (
        "The model is on the CPU, where float16 products are often many times slower than float32"
    )
    advice = (
        ". For speed use bfloat16: dtype=torch.bfloat16, ampatch run --dtype bfloat16 or "
        "AMPATCH_DTYPE=bfloat16."
        if host_computes_in_bfloat16()
        else ', and so are bfloat16 products on this one. For speed stay in FP32: opt_level="O0".'
    )
    logger.warning(slow + advice, extra=LOG_ONCE)


def half_dtype(value: Any) -> torch.dtype:
    """`torch.float16` or `torch.bfloat16` from a dtype or its name."""
    user_call = _user_call("dtype", value)
    dtype = _supported_dtype(user_call, value)
    if dtype not in HALF_DTYPES:
        raise ValueError(
            f"{user_call}: dtype is the half dtype. "
            f'Expected torch.float16 or torch.bfloat16; for FP32 use opt_level="O0".'
        )
    return dtype


def loss_scale_value(what: str, value: Any) -> str | float:
    """`"dynamic"` or a positive float that FP32 can invert; numbers may come as strings."""
    if isinstance(value, str) and value.strip().lower() == "dynamic":
        return "dynamic"
    expected = '"dynamic" or a positive number, such as 128.0 or "128.0"'
    return checked_static_scale(positive_number(what, value, expected, or_text=True))


def _supported_dtype(user_call: str, value: Any) -> torch.dtype:
    """float16, bfloat16 or float32, from the dtype or its name."""
    dtype = value
    if isinstance(value, str):
        dtype = _DTYPE_NAMES.get(value.removeprefix("torch.").lower(), value)
    if dtype in _DTYPE_NAMES.values():
        return dtype
    hint = did_you_mean(value, _DTYPE_NAMES) if isinstance(value, str) else ""
    raise (ValueError if isinstance(value, (str, torch.dtype)) else TypeError)(
        f"{user_call}: ampatch does not compute in this dtype. "
        f"Expected torch.float16, torch.bfloat16 or torch.float32.{hint}"
    )


def _model_type(user_call: str, value: Any) -> torch.dtype | None:
    """A supported dtype; None for False, which in apex means that the model is not cast."""
    return None if value is False else _supported_dtype(user_call, value)


_count = functools.partial(whole_number, least=1)

_VALIDATORS: dict[str, Callable[[str, Any], Any]] = {
    "enabled": truth_value,
    "cast_model_type": _model_type,
    "patch_torch_functions": truth_value,
    "keep_batchnorm_fp32": truth_value,
    "master_weights": truth_value,
    "loss_scale": loss_scale_value,
    "cast_model_outputs": lambda user_call, value: (
        value if value is None else _supported_dtype(user_call, value)
    ),
    "num_losses": _count,
    "verbosity": functools.partial(whole_number, least=0),
    "max_consecutive_skips": _count,
    "allow_banned": truth_value,
    "patch_scope": functools.partial(
        known_word,
        known=("process", "model"),
        expected='"model" (only inside managed models) or "process" (cast every call)',
    ),
}


def _refuse_contradictions(properties: Properties, settings: dict[str, Any]) -> None:
    """Raise `ValueError` for settings that contradict each other."""
    user_call = f"ampatch.initialize(opt_level={properties.opt_level!r}"

    def refuse(argument: str, why: str) -> NoReturn:
        raise ValueError(f"{user_call}, {argument}={settings[argument]!r}): {why}")

    if properties.patch_torch_functions:
        if properties.casts_model:
            refuse(
                "cast_model_type"
                if settings.get("cast_model_type") is not None
                else "patch_torch_functions",
                "patch_torch_functions=True keeps the model's weights in FP32, so the model's "
                'type cannot be cast too. Use opt_level="O2" to cast the model, or leave '
                "cast_model_type and patch_torch_functions to the opt level.",
            )
        for name in ("keep_batchnorm_fp32", "master_weights"):
            if getattr(properties, name) is not None:
                refuse(
                    name,
                    "with patch_torch_functions=True all weights stay FP32, those of batch norm "
                    'too. Leave it out, or use opt_level="O2".',
                )
