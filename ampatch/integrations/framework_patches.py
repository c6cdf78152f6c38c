"""Puts ampatch's integration into a framework, before the script imports it.

The class that a script makes, or derives its own from, is replaced by one with the integration in
it; the framework's own mixed precision is left out.  Opt level and dtype come from the environment,
as in each trial of a sweep, which this is for.  It serves scripts that make one such object; where
the integration cannot come in, its own error says why.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import wrapt


def bring_in(framework: str) -> None:
    """Have the script's own line make an object that trains by ampatch."""
    _BRING_IN[framework]()


def leave_precision_out(note: Callable[[str, Any], None]) -> None:
    """Have Lightning's Trainer and Fabric train in FP32, whatever `precision` a script gives them.

    `note(half, frame)` hears of a half type and of the frame that asked for it.  For the others
    nothing is needed: their mixed precision is torch.autocast and GradScaler.
    """
    for module, owner in (
        ("lightning.pytorch.trainer.trainer", "Trainer"),
        ("pytorch_lightning.trainer.trainer", "Trainer"),
        ("lightning.fabric.fabric", "Fabric"),
        ("lightning_fabric.fabric", "Fabric"),
    ):
        wrapt.register_post_import_hook(functools.partial(_without_precision, owner, note), module)


def tell_losses(around: Callable[[Any], Any]) -> None:
    """Have accelerate's `backward` run in `around(loss)`, with the loss that the script gives it.

    It divides that by the number of accumulated batches.
    """

    def wrap(module: Any) -> None:
        plain = module.Accelerator.backward

        @functools.wraps(plain)
        def backward(self: Any, loss: Any, **named: Any) -> None:
            with around(loss):
                plain(self, loss, **named)

        module.Accelerator.backward = backward

    wrapt.register_post_import_hook(wrap, "accelerate.accelerator")


def _without_precision(owner: str, note: Callable[[str, Any], None], module: Any) -> None:
    make = getattr(module, owner).__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        given = str(named.pop("precision", None))
        if "16" in given:
            note("bfloat16" if "bf16" in given else "float16", sys._getframe(1))
        make(self, *args, **named)

    getattr(module, owner).__init__ = __init__


def _lightning() -> None:
    from .lightning import AmpatchPrecision

    for name in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            _with_plugin(importlib.import_module(name).Trainer, AmpatchPrecision)


def _fabric() -> None:
    from .lightning import AmpatchFabricPrecision

    for name in ("lightning.fabric", "lightning_fabric"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            _with_plugin(importlib.import_module(name).Fabric, AmpatchFabricPrecision)


def _with_plugin(owner: Any, plugin: Callable[[], Any]) -> None:
    make = owner.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **named: Any) -> None:
        given = named.pop("plugins", None) or []
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
        named.pop("precision", None)
        make(self, *args, plugins=[*listed, plugin()], **named)

    owner.__init__ = __init__


def _transformers() -> None:
    from transformers import TrainingArguments, trainer

    from .transformers import AmpatchTrainerMixin

    plain = trainer.Trainer
    managed = type("Trainer", (AmpatchTrainerMixin, plain), {"__module__": plain.__module__})
    # The first import puts another object into sys.modules than it returns.
    for module in (trainer, sys.modules["transformers"]):
        setattr(module, "Trainer", managed)  # noqa: B010 - for a type checker it is one class
    check: Any = TrainingArguments.__post_init__

    @functools.wraps(check)
    def __post_init__(self: Any) -> None:
        for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
            setattr(self, name, False)
        check(self)

    setattr(TrainingArguments, "__post_init__", __post_init__)  # noqa: B010


def _accelerate() -> None:
    import accelerate

    from .accelerate import AmpatchAccelerator

    plain = accelerate.Accelerator
    names = list(inspect.signature(plain.__init__).parameters)[1:]

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        given = {**dict(zip(names, args)), **named, "mixed_precision": "no"}
        AmpatchAccelerator.__init__(self, **given)

    managed = type("Accelerator", (AmpatchAccelerator,), {"__init__": __init__})
    accelerate.Accelerator = accelerate.accelerator.Accelerator = managed


_BRING_IN: dict[str, Callable[[], None]] = {
    "lightning": _lightning,
    "fabric": _fabric,
    "transformers": _transformers,
    "accelerate": _accelerate,
}
