"""Where a sweep runs, as it was asked for; checked before anything starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ampatch.config.validation import whole_number
from ampatch.errors import did_you_mean
from ampatch.sweep.execution.place import device_groups

ENGINES = ("local", "ray", "slurm")
PACKAGES = {"ray": "ray", "slurm": "submitit"}
_OF_CLUSTERS = ("ray", "slurm")
_ONLY_FOR = {
    "devices": ("local",),
    "address": ("ray",),
    "gpus_per_trial": _OF_CLUSTERS,
    "cpus_per_trial": _OF_CLUSTERS,
    "slurm": ("slurm",),
}


@dataclass(frozen=True)
class Where:
    """The engine and its options; those that were not given are None or empty.

    Raises `ValueError` for an engine that does not exist or lacks its package, for options
    of another engine, and for devices that are not there.
    """

    engine: str = "local"
    devices: tuple[str, ...] = ()
    jobs: int | None = None  # at most so many trials at a time
    address: str | None = None  # of a Ray cluster
    gpus_per_trial: float | None = None
    cpus_per_trial: int | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)  # for submitit
    nproc_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(
                f"--engine {self.engine}: there is no such engine.\n"
                f"Expected one of {', '.join(ENGINES)}.{did_you_mean(self.engine, ENGINES)}"
            )
        package = PACKAGES.get(self.engine)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--engine {self.engine}: needs the package {package}, which is not installed. "
                f"pip install 'ampatch[{self.engine}]'"
            )
        self._check_options()
        if self.devices:
            device_groups(self.devices, self.nproc_per_node or 1)

    def _check_options(self) -> None:
        for name, engines in _ONLY_FOR.items():
            if getattr(self, name) not in (None, (), {}) and self.engine not in engines:
                raise ValueError(
                    f"--{name.replace('_', '-')}: has no meaning with --engine {self.engine}, only "
                    f"with {' and '.join(engines)}."
                )
        if self.jobs is not None and self.devices:
            raise ValueError(
                "--jobs and --devices: give one of them. With --devices there is one trial at a "
                "time on each device; --jobs is for trials beside each other on a CPU."
            )
        for name in ("jobs", "cpus_per_trial", "nproc_per_node"):
            if getattr(self, name) is not None:
                whole_number(f"sweep({name}={getattr(self, name)!r})", getattr(self, name), least=1)
        if self.gpus_per_trial is not None and self.gpus_per_trial < 0:
            raise ValueError(f"--gpus-per-trial {self.gpus_per_trial:g}: expected 0 or more.")

    @property
    def side_by_side(self) -> bool:
        """Whether trials may run beside each other."""
        if self.engine != "local":
            return self.jobs != 1
        groups = len(self.devices) // (self.nproc_per_node or 1)
        return max(groups, self.jobs or 1) > 1


def names(devices: str | Iterable[str] | None) -> tuple[str, ...]:
    """Device names, given one by one or with commas between them."""
    if devices is None:
        return ()
    listed = devices.split(",") if isinstance(devices, str) else devices
    return tuple(name.strip() for name in listed if name.strip())
