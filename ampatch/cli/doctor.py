"""The command `ampatch doctor`: versions, devices, and the speed of the half types here.

A report about a problem should begin with it.
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
    "numpy", "rich", "matplotlib", "pandas", "scikit-learn", "scipy",
    "ray", "tensorboard", "wandb",
)  # fmt: skip
_SPEEDS = (
    "\nSpeed relative to FP32, forward and backward, with the range of three measurements.\n"
    "Above 1 is faster; less than 10 %, or a range that reaches across 1, is a tie."
)


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "doctor",
        help="versions, devices, and how fast half is here",
        description="Prints what a report about a problem should begin with. Takes some seconds.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(command=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns the exit code."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return _without_torch(options, str(error))
    if options.json:
        print(json.dumps(as_dict(), indent=2))
        return 0
    for name, value in _rows(facts()):
        print(f"{name:<22}{value}")
    print(_SPEEDS)
    for device, speeds in _measured().items():
        for line in speed_lines(device, speeds):
            print(f"  {line}")
        print(f"  Faster than FP32 on {device}: {', '.join(_fast(speeds)) or 'no half type'}.")
    return 0


def as_dict() -> dict[str, Any]:
    """Everything, for JSON."""
    measured = _measured()
    timed: dict[str, Any] = {}
    for device, speeds in measured.items():
        for one in speeds:
            of_dtype = timed.setdefault(device, {}).setdefault(one.name, {})
            of_dtype[one.operation] = one.as_dict()
    fast = {device: list(_fast(speeds)) for device, speeds in measured.items()}
    return {**facts(), "speed": timed, "fast": fast}


def _measured() -> dict[str, list[Speed]]:
    from ampatch.diagnose.speed import measure
    from ampatch.torch_private.devices import device_types

    return {device: measure(device) for device in device_types()}


def _fast(speeds: list[Speed]) -> tuple[str, ...]:
    from ampatch.diagnose.speed import fast

    return fast(speeds)


def _without_torch(options: argparse.Namespace, error: str) -> int:
    """The report where torch cannot be imported."""
    versions = {"python": platform.python_version(), "ampatch": __version__, "torch": None}
    if options.json:
        print(json.dumps({"versions": versions, "torch_error": error}, indent=2))
        return 1
    print(f"{'python':<22}{versions['python']} on {platform.platform()}")
    print(f"{'ampatch':<22}{__version__}")
    print(f"{'torch':<22}cannot be imported: {error}")
    print(
        "\nampatch needs torch. To install it: pip install torch\n"
        "For another accelerator, or the CPU alone: https://pytorch.org/get-started/locally/"
    )
    return 1


def facts() -> dict[str, Any]:
    """Everything but the speeds."""
    import torch

    from ampatch.config.environment import OF_THE_PROCESS, VARIABLES
    from ampatch.diagnose.tables import content
    from ampatch.torch_private import devices

    others = sorted(name for name in os.environ if name.startswith("AMPATCH_"))  # misspelt ones too
    variables = dict.fromkeys((*VARIABLES, *OF_THE_PROCESS, *others))
    return {
        "versions": {"python": platform.python_version(), "ampatch": __version__}
        | {name: _version(name) for name in ("torch", "wrapt")},
        "extras": {name: _version(name) for name in EXTRAS},
        "platform": platform.platform(),
        "native_part": native_part(),
        "missing_in_torch": content.missing(),
        "cpu_threads": torch.get_num_threads(),
        "torch_built_for": devices.built_for(),
        "accelerators": devices.described(),
        "apex": _apex(),
        "environment": {name: os.environ.get(name) for name in variables},
    }


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of a name and its value as text."""
    for name, version in {**found["versions"], **found["extras"]}.items():
        yield name, version or "not installed"
    for name in (
        *("platform", "native_part", "missing_in_torch", "cpu_threads"),
        *("torch_built_for", "accelerators", "apex"),
    ):
        value = found[name]
        if isinstance(value, dict):
            value = [f"{toolkit} {version}" for toolkit, version in value.items()]
            value = value or ["the CPU alone"]
        shown = ", ".join(value) or "none" if isinstance(value, list) else str(value)
        yield name.replace("_", " "), shown
    for name, value in found["environment"].items():
        yield name, "not set" if value is None else value


def native_part() -> str:
    """Whether it is in force, and what keeps it from being built."""
    from ampatch import native

    return "; ".join(filter(None, [native.status().reason, native.missing()]))


def _apex() -> str:
    """Whether `import apex` finds a package, and where."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "not installed"
    return f"importable, from {spec.origin or 'a directory without __init__.py'}"


def speed_lines(device: str, speeds: list[Speed]) -> Iterator[str]:
    """A line for each dtype and operation; FP32's, the last, are the noise of the machine."""
    for one in sorted(speeds, key=lambda one: ("float16", "bfloat16", "float32").index(one.name)):
        said = "(against itself)" if one.name == "float32" else f"{one.name} {one.verdict}"
        yield f"{device:<6}{one.name:<10}{one.operation:<8}{one.figure():<24}{said}"


def _version(package: str) -> str | None:
    """The installed version of `package`, or None; the package is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
