"""The command `ampatch doctor`: versions, devices, and the speed of the half dtypes here.

A bug report should begin with its output.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ampatch._version import __version__

if TYPE_CHECKING:
    from ampatch.diagnose.speed import Speed

EXTRAS = (
    "numpy", "rich", "matplotlib", "pandas", "scikit-learn", "scipy", "ray", "tensorboard", "wandb",
)  # fmt: skip
_DTYPE_ORDER = ("float16", "bfloat16", "float32")  # float32 shows the noise
_SPEEDS_INTRO = (
    "\nSpeed relative to FP32, forward and backward, with the range of three measurements.\n"
    "Above 1 is faster. A difference under 10 %, or a range that includes 1, is a tie."
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show versions, devices and the speed of the half dtypes",
        description="Prints versions, devices and the speed of the half dtypes. Begin a bug "
        "report with it. Takes some seconds.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> int:
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"python {platform.python_version()} on {platform.platform()}, ampatch {__version__}")
        print(
            f"torch cannot be imported: {error}\nTo install it: pip install torch, or for another "
            "accelerator, or the CPU alone: https://pytorch.org/get-started/locally/"
        )
        return 1
    if options.json:
        print(json.dumps(as_dict(), indent=2))
        return 0
    from ampatch.diagnose.speed import faster_dtypes

    for name, value in _fact_texts(facts()):
        print(f"{name:<22}{value}")
    print(_SPEEDS_INTRO)
    for device, speeds in _measure_devices().items():
        for speed in sorted(speeds, key=lambda speed: _DTYPE_ORDER.index(speed.name)):
            is_base = speed.name == _DTYPE_ORDER[-1]
            note = "(against itself)" if is_base else f"{speed.name} {speed.verdict}"
            print(f"  {device:<6}{speed.name:<10}{speed.operation:<8}{speed.figure():<24}{note}")
        names = ", ".join(faster_dtypes(speeds)) or "no half dtype"
        print(f"  Faster than FP32 on {device}: {names}.")
    return 0


def as_dict() -> dict[str, Any]:
    """All facts and speeds, for JSON."""
    from ampatch.diagnose.speed import faster_dtypes

    measured = _measure_devices()
    timed: dict[str, Any] = {device: {} for device in measured}
    for device, speeds in measured.items():
        for speed in speeds:
            timed[device].setdefault(speed.name, {})[speed.operation] = speed.as_dict()
    best = {device: list(faster_dtypes(speeds)) for device, speeds in measured.items()}
    return {**facts(), "speed": timed, "fast": best}


def _measure_devices() -> dict[str, list[Speed]]:
    from ampatch.diagnose.speed import measure_speeds
    from ampatch.torch_private.devices import device_types

    return {device: measure_speeds(device) for device in device_types()}


def facts() -> dict[str, Any]:
    """All facts but the speeds."""
    import torch

    from ampatch import device_figures
    from ampatch.config.environment import PROCESS_VARIABLES, VARIABLES
    from ampatch.diagnose.tables import content

    in_environment = sorted(name for name in os.environ if name.startswith("AMPATCH_"))
    apex = importlib.util.find_spec("apex")
    variables = dict.fromkeys((*VARIABLES, *PROCESS_VARIABLES, *in_environment))
    return {
        "versions": {"python": platform.python_version(), "ampatch": __version__}
        | {name: _version(name) for name in ("torch", "wrapt")},
        "extras": {name: _version(name) for name in EXTRAS},
        "platform": platform.platform(),
        "native_part": native_part(),
        "missing_in_torch": content.missing(),
        "cpu_threads": torch.get_num_threads(),
        "torch_built_for": device_figures.toolkit_versions(),
        "accelerators": device_figures.describe_accelerators(),
        "apex": f"importable, from {apex.origin or 'a directory without __init__.py'}"
        if apex
        else "not installed",
        "environment": {name: os.environ.get(name) for name in variables},
    }


def _fact_texts(entries: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a name and its value as text."""
    for name, value in entries.items():
        if name in ("versions", "extras", "environment"):
            missing = "not set" if name == "environment" else "not installed"
            yield from ((key, missing if text is None else text) for key, text in value.items())
            continue
        if name == "torch_built_for":
            value = [f"{toolkit} {version}" for toolkit, version in value.items()]
            value = value or ["the CPU only"]
        shown = ", ".join(value) or "none" if isinstance(value, list) else str(value)
        yield name.replace("_", " "), shown


def native_part() -> str:
    """Whether the native part is active, and what keeps it from being built."""
    from ampatch import native

    return "; ".join(filter(None, [native.status().reason, native.missing()]))


def _version(package: str) -> str | None:
    """The installed version of `package`, or None; the package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
