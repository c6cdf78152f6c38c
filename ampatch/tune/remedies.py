"""Remedies for a level that does not train as O0 does: a module in FP32, or one of three settings.

The settings are tried first, because the cause may be in no module: Adam's eps is 0 in float16.  A
module in FP32 has FP32 weights, which would cure that too, and the module would be blamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampatch.config.optimizer_eps import HALF_EPS
from ampatch.config.overrides import matching_paths
from ampatch.sweep.kinds import UNKNOWN_KIND, Kind
from ampatch.sweep.trial import Case
from ampatch.tune.sensitivity import Findings, ranked

SETTINGS = {
    "loss_scale": "dynamic",
    "eps": HALF_EPS,
    "master_weights": True,
}
"""Arguments of `initialize` with the values to try; `eps` is an argument of the optimizer."""

WHY = {
    "loss_scale": "the static loss scale, at which gradients overflow or become 0",
    "eps": "the optimizer's eps, which is 0 in the half dtype of its weights",
    "master_weights": "half weights, which lose updates that are small beside them",
}
"""The cause that a setting removes."""


@dataclass(frozen=True)
class Remedy:
    """A module in FP32 by its path, or a setting by its name."""

    name: str
    is_setting: bool = False

    def __str__(self) -> str:
        return f"{self.name}={SETTINGS[self.name]!r}" if self.is_setting else self.name


def possible_remedies(findings: Findings, properties: Mapping[str, str], half: str) -> list[Remedy]:
    """The remedies for a level, the likeliest first.

    `properties`: the level's settings, as text.
    """
    settings = []
    if half == "float16" and properties["loss_scale"] != "dynamic":
        settings.append("loss_scale")
    has_half_weights = properties["cast_model_type"].endswith(half) and (
        properties["master_weights"] != "True"
    )
    if has_half_weights:
        dtype = getattr(torch, half)
        if any(eps and not torch.tensor(eps).to(dtype) for eps in findings.eps):
            settings.append("eps")
        settings.append("master_weights")
    modules = [Remedy(module.path) for module in ranked(findings.modules)]
    return [*(Remedy(name, is_setting=True) for name in settings), *modules]


def overrides(chosen: Iterable[Remedy], paths: Sequence[str]) -> dict[str, str]:
    """The modules among the remedies as `overrides` of `initialize`: globs over all `paths`."""
    modules = [remedy.name for remedy in chosen if not remedy.is_setting]
    return dict.fromkeys(globs_for(modules, paths), "float")


def settings(chosen: Iterable[Remedy]) -> dict[str, Any]:
    """The settings among the remedies, with their values."""
    return {remedy.name: SETTINGS[remedy.name] for remedy in chosen if remedy.is_setting}


def case(level: Case, chosen: Iterable[Remedy], paths: Sequence[str]) -> Case:
    """The row of a sweep that trains at a level with these remedies."""
    listed = sorted(chosen, key=str)
    values = settings(listed)
    modules = overrides(listed, paths)
    if modules:
        values["overrides"] = json.dumps(modules)
    return Case(level.opt_level, level.dtype, settings=tuple(values.items()))


def line(
    level: Case, chosen: Sequence[Remedy], paths: Sequence[str], kind: Kind = UNKNOWN_KIND
) -> str:
    """The line to paste into a script of this `kind`, with a second line for `eps`."""
    arguments = {"opt_level": level.opt_level, "dtype": level.dtype, **settings(chosen)}
    keywords = [
        f"{name}={json.dumps(value) if isinstance(value, str) else value}"
        for name, value in arguments.items()
        if name != "eps"
    ]
    modules = overrides(chosen, paths)
    if modules:
        keywords.append(f"overrides={json.dumps(modules)}")
    call = kind.setup_lines(keywords)
    if "eps" in settings(chosen):
        call += f"\nand eps={HALF_EPS:g} as an argument of the optimizer"
    return call


def globs_for(chosen: Iterable[str], all_paths: Iterable[str]) -> list[str]:
    """Globs over `all_paths` that match only the paths in `chosen` and their submodules.

    In globs of `initialize(overrides=...)`, `*` matches any text, dots too.  Paths that differ only
    in numbers share a glob if it matches no other path; otherwise each module has its own path.
    """
    modules, paths = set(chosen), set(all_paths)
    globs = set()
    prefixes = tuple(f"{path}." for path in modules)
    allowed = {path for path in paths if f"{path}.".startswith(prefixes)}
    for path in modules:
        glob = re.sub(r"\d+", "*", path)
        is_exact = (
            len(modules & matching_paths(glob, paths)) > 1
            and matching_paths(glob, paths) <= allowed
        )
        globs.add(glob if is_exact else path)
    return sorted(globs)
