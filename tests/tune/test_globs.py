"""Globs for overrides: few, and right."""

from __future__ import annotations

import fnmatch
import random

import pytest

from ampatch.tune.globs import shortest

PATHS = [
    "encoder",
    "encoder.layers",
    *(f"encoder.layers.{n}" for n in range(12)),
    *(f"encoder.layers.{n}.{name}" for n in range(12) for name in ("norm1", "norm2", "linear")),
    "decoder",
    "decoder.norm",
    "decoder.linear",
]
ODD = ["heads.h[0]", "heads.h0", "heads.h1", "heads.h*", "heads.hot"]


@pytest.mark.parametrize(
    "chosen, globs",
    (
        (["decoder.norm"], ["decoder.norm"]),
        (["decoder"], ["decoder"]),
        (["decoder.norm", "decoder.linear"], ["decoder.*"]),
        ([f"encoder.layers.{n}.norm1" for n in range(12)], ["*.norm1"]),
        ([path for path in PATHS if "norm" in path], ["*.norm*"]),
        (PATHS, ["*"]),
        ([], []),
        (["heads.h[0]", "heads.h*"], ["heads.h*", "heads.h[0]"]),
        (["heads.h0", "heads.h1"], ["heads.h0", "heads.h1"]),
        (
            ["decoder.norm", *(f"encoder.layers.{n}.linear" for n in range(12))],
            ["decoder.norm", "encoder.layers.*.linear"],
        ),
    ),
)
def test_globs_are_few(chosen, globs):
    paths = ODD if "heads" in "".join(chosen) and chosen is not PATHS else PATHS
    assert shortest(chosen, paths) == globs


def test_globs_match_what_was_chosen_and_nothing_outside_it():
    choose = random.Random(0)
    for _ in range(200):
        chosen = choose.sample(PATHS, choose.randint(1, 9))
        globs = shortest(chosen, PATHS)
        matched = {path for path in PATHS for glob in globs if fnmatch.fnmatchcase(path, glob)}
        assert matched >= set(chosen)
        for path in matched:
            assert any(path == one or path.startswith(f"{one}.") for one in chosen), (chosen, globs)
