"""Installs ampatch's integration in a framework before the script imports it.

The framework's class is replaced by one with the integration, without the framework's own mixed
precision.  The trials of a sweep use this module; opt level and dtype come from their environment.
It works for scripts that make one such object.  If the integration cannot be used, its own error
says why.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import wrapt

_LIGHTNING = {
    "Trainer": ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
    "Fabric": ("lightning.fabric.fabric", "lightning_fabric.fabric"),
}


def install_integration(framework: str) -> None:
    """Have the script's `Trainer(...)`, `Fabric(...)` or `Accelerator(...)` train by ampatch."""
    _INSTALLERS[framework]()


def ignore_precision(report: Callable[[str, Any], None]) -> None:
    """Have Lightning's Trainer and Fabric train in FP32, whatever `precision` a script passes.

    `report(half, python_frame)` is called with a half dtype and the Python frame that passed
    it.  The other frameworks use torch.autocast and GradScaler, so nothing has to be replaced.
    """

    def construct(original: Callable, owner: Any, args: Any, kwargs: dict[str, Any]) -> None:
        precision = _pop_precision(kwargs)
        if "16" in precision:
            report("bfloat16" if "bf16" in precision else "float16", sys._getframe(1))
        original(*args, **kwargs)

    for owner, modules in _LIGHTNING.items():
        for module in modules:
            _wrap_at_import(module, f"{owner}.__init__", construct)


def _pop_precision(arguments: dict[str, Any]) -> str:
    """Remove the argument `precision` and Lightning's precision plugins; return the precision."""
    plugins = arguments.get("plugins") or []
    listed = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    arguments["plugins"] = [plugin for plugin in listed if not _is_lightnings_precision(plugin)]
    by_plugin = [plugin.precision for plugin in listed if _is_lightnings_precision(plugin)]
    by_argument = arguments.pop("precision", None)
    return str(by_plugin[0] if by_plugin else by_argument)


def _is_lightnings_precision(plugin: Any) -> bool:
    cls = type(plugin)
    is_ours = cls.__module__.startswith("ampatch.")
    return not is_ours and any(base.__name__ == "Precision" for base in cls.__mro__)


def wrap_backward(context: Callable[[Any], Any]) -> None:
    """Run accelerate's `backward` in the context manager `context(loss)`, with the script's loss.

    accelerate then divides the loss by the number of accumulated batches.
    """

    def backward(original: Callable, accelerator: Any, args: Any, kwargs: dict[str, Any]) -> None:
        with context(args[0] if args else kwargs["loss"]):
            original(*args, **kwargs)

    _wrap_at_import("accelerate.accelerator", "Accelerator.backward", backward)


def _wrap_at_import(module: str, name: str, wrapper: Callable) -> None:
    """Wrap a function of a module, now or when it is imported."""
    wrapt.register_post_import_hook(
        lambda imported: wrapt.wrap_function_wrapper(imported, name, wrapper), module
    )


def _install_lightning() -> None:
    from .lightning import AmpatchPrecision

    _add_plugin("Trainer", AmpatchPrecision)


def _install_fabric() -> None:
    from .lightning import AmpatchFabricPrecision

    _add_plugin("Fabric", AmpatchFabricPrecision)


def _add_plugin(owner: str, plugin: Callable[[], Any]) -> None:
    def construct(original: Callable, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        _pop_precision(kwargs)
        kwargs["plugins"].append(plugin())
        original(*args, **kwargs)

    for module in _LIGHTNING[owner]:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            wrapt.wrap_function_wrapper(module, f"{owner}.__init__", construct)


def _install_transformers() -> None:
    from transformers import TrainingArguments, trainer

    from .transformers import AmpatchTrainerMixin

    original = trainer.Trainer
    managed = type("Trainer", (AmpatchTrainerMixin, original), {"__module__": original.__module__})
    # At the first import, `import transformers` returns another object than `sys.modules` holds.
    for module in (trainer, sys.modules["transformers"]):
        setattr(module, "Trainer", managed)  # noqa: B010 - for a type checker it is one class
    check: Any = TrainingArguments.__post_init__

    @functools.wraps(check)
    def __post_init__(self: Any) -> None:
        for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
            setattr(self, name, False)
        check(self)

    setattr(TrainingArguments, "__post_init__", __post_init__)  # noqa: B010


def _install_accelerate() -> None:
    import accelerate

    from .accelerate import AmpatchAccelerator

    original = accelerate.Accelerator
    names = list(inspect.signature(original.__init__).parameters)[1:]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = {**dict(zip(names, args)), **kwargs, "mixed_precision": "no"}
        AmpatchAccelerator.__init__(self, **arguments)

    managed = type("Accelerator", (AmpatchAccelerator,), {"__init__": __init__})
    accelerate.Accelerator = accelerate.accelerator.Accelerator = managed


_INSTALLERS: dict[str, Callable[[], None]] = {
    "lightning": _install_lightning,
    "fabric": _install_fabric,
    "transformers": _install_transformers,
    "accelerate": _install_accelerate,
}
