"""Globs for overrides: right, and short where names differ in numbers."""

from __future__ import annotations

import random

import pytest

from ampatch.config.overrides import named
from ampatch.tune.remedies import shortest

LAYERS = [f"encoder.layers.{n}" for n in range(12)]
PATHS = [
    *("encoder", "encoder.layers", "decoder", "decoder.norm", "decoder.linear", *LAYERS),
    *(f"{layer}.{name}" for layer in LAYERS for name in ("norm", "norm.scale", "linear")),
    *("heads.h[0]", "heads.h0", "heads.h1", "heads.h*", "heads.hot"),
]


@pytest.mark.parametrize(
    "chosen, globs",
    (
        (["decoder.norm", "decoder.linear"], ["decoder.linear", "decoder.norm"]),
        ([f"{layer}.norm" for layer in LAYERS], ["encoder.layers.*.norm"]),
        ([f"{layer}.norm" for layer in LAYERS[1:3]], [f"{layer}.norm" for layer in LAYERS[1:3]]),
        (LAYERS, ["encoder.layers.*"]),
        (["heads.h0", "heads.h1"], ["heads.h0", "heads.h1"]),  # the glob matches more
        ([], []),
    ),
)
def test_numbers_are_left_open_where_that_names_no_other(chosen, globs):
    assert shortest(chosen, PATHS) == globs


def test_globs_match_what_was_chosen_and_nothing_outside_it():
    choose = random.Random(0)
    for _ in range(200):
        chosen = choose.sample(PATHS, choose.randint(1, 9))
        globs = shortest(chosen, PATHS)
        matched = set().union(*(named(glob, PATHS) for glob in globs))
        assert matched >= set(chosen)
        for path in matched:
            assert any(path == one or path.startswith(f"{one}.") for one in chosen), (chosen, globs)
