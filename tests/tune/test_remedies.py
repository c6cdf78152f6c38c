"""What is tried at a level, in which order, and how it is written down."""

import dataclasses
import itertools
import json
import math
import random

import pytest
import torch
from torch import nn

import ampatch
from ampatch.config.opt_levels import properties_for
from ampatch.config.overrides import matching_paths
from ampatch.sweep.kinds import Kind
from ampatch.sweep.trial import Case
from ampatch.tune.module_call import CallErrors
from ampatch.tune.remedies import Remedy, case, globs_for, line, possible_remedies
from ampatch.tune.search import max_trials, smallest_passing_set
from ampatch.tune.sensitivity import Findings, Sensitivity

PATHS = ["stem", "body", "body.0", "body.0.norm", "body.1", "body.1.norm", "head"]


def findings(eps=(1e-8,), **errors):
    modules = [
        Sensitivity(path, "Linear", (CallErrors(error, 0.0, 0.0, 0.0),))
        for path, error in errors.items()
    ]
    return Findings(100, modules=modules, paths=PATHS, eps=list(eps))


def names(level, half, eps=(1e-8,), **settings):
    properties = dataclasses.asdict(properties_for(level, half, **settings))
    properties = {name: str(value) for name, value in properties.items()}
    return [
        str(remedy)
        for remedy in possible_remedies(findings(eps, stem=0.1, head=0.5), properties, half)
    ]


@pytest.mark.parametrize(
    "level, half, settings, expected",
    (
        ("O3", "float16", {}, ["loss_scale='dynamic'", "eps=0.001", "master_weights=True"]),
        ("O3", "float16", {"loss_scale": "dynamic"}, ["eps=0.001", "master_weights=True"]),
        ("O3", "float16", {"eps": (1e-3,)}, ["loss_scale='dynamic'", "master_weights=True"]),
        ("O3", "bfloat16", {}, ["master_weights=True"]),  # it has FP32's range
        ("O2", "float16", {}, []),
        ("O2", "float16", {"loss_scale": 128.0}, ["loss_scale='dynamic'"]),
        ("O1", "float16", {}, []),
    ),
)
def test_settings_that_a_level_lacks_come_before_modules(level, half, settings, expected):
    assert names(level, half, **settings) == [*expected, "head", "stem"]


def test_a_candidate_is_a_row_with_its_settings_and_globs():
    chosen = [Remedy("body.1.norm"), Remedy("loss_scale", True), Remedy("body.0.norm")]
    row = case(Case("O3", "float16"), chosen, PATHS)
    assert dict(row.settings) == {"loss_scale": "dynamic", "overrides": '{"body.*.norm": "float"}'}
    assert row == case(Case("O3", "float16"), chosen[::-1], PATHS)
    assert json.loads(row.environment["AMPATCH_SETTINGS"]) == dict(row.settings)


def test_eps_is_none_of_initializes_settings():
    row = case(Case("O3", "float16"), [Remedy("eps", True)], PATHS)
    assert "eps=0.001" in row.label and "AMPATCH_SETTINGS" not in row.environment
    assert "eps=0.001 as an argument" in line(Case("O3", "float16"), [Remedy("eps", True)], PATHS)


@pytest.mark.parametrize("name", ("ampatch", "framework"))  # there already, or by the sweep alone
@pytest.mark.parametrize(
    "framework, expected",
    (
        ("lightning", "trainer = Trainer(..., plugins=[AmpatchPrecision({})])"),
        ("transformers", "trainer = MyTrainer(..., {})"),
        ("accelerate", "accelerator = AmpatchAccelerator(..., {})"),
        ("fabric", "fabric = Fabric(..., plugins=[AmpatchFabricPrecision({})])"),
    ),
)
def test_in_a_framework_they_are_keywords_of_the_integration(name, framework, expected):
    said = line(Case("O2", "float16"), [Remedy("head")], PATHS, Kind(name, framework))
    first, *_, last = said.splitlines()
    assert first.startswith("from ampatch.integrations.")
    assert last == expected.format('opt_level="O2", dtype="float16", overrides={"head": "float"}')


def test_the_line_to_paste_runs(monkeypatch):
    chosen = [Remedy("loss_scale", True), Remedy("master_weights", True), Remedy("0")]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = line(Case("O3", "float16"), chosen, ["0", "1"])
    exec(text, {"ampatch": ampatch, "model": model, "optimizer": optimizer})
    with torch.no_grad():
        seen, forward = {}, nn.Linear.forward

        def seeing(part, x):
            seen[part] = x.dtype
            return forward(part, x)

        monkeypatch.setattr(nn.Linear, "forward", seeing)
        model(torch.ones(1, 2))
    assert seen == {model[0]: torch.float32, model[1]: torch.float16}
    assert ampatch.loss_scale() == 2.0**16


# Globs: right, and short where names differ in numbers

LAYERS = [f"encoder.layers.{n}" for n in range(12)]
PLACES = [
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
    assert globs_for(chosen, PLACES) == globs


def test_globs_match_what_was_chosen_and_nothing_outside_it():
    choose = random.Random(0)
    for _ in range(200):
        chosen = choose.sample(PLACES, choose.randint(1, 9))
        globs = globs_for(chosen, PLACES)
        matched = set().union(*(matching_paths(glob, PLACES) for glob in globs))
        assert matched >= set(chosen)
        for path in matched:
            assert any(path == root or path.startswith(f"{root}.") for root in chosen), (
                chosen,
                globs,
            )


# The search finds the smallest set, by few candidates, each once


def noting(tried, needed):
    """Whether a candidate has what is `needed`; notes each in `tried`."""

    def passes(chosen):
        tried.append(chosen)
        return needed <= chosen

    return passes


@pytest.mark.parametrize("size", (1, 2, 7, 64, 300))
@pytest.mark.parametrize("faults", (1, 2, 3))
def test_what_is_needed_is_found_exactly_wherever_it_stands(size, faults):
    choose = random.Random(size * faults)
    for _ in range(40):
        needed, tried = set(choose.sample(range(size), min(faults, size))), []
        result = smallest_passing_set(range(size), noting(tried, needed), limit=size + 99)
        assert result.passes and result.is_decided
        assert set(result.needed) == needed
        assert len(set(tried)) == len(tried) == result.trials  # none twice


@pytest.mark.parametrize("size", (10, 100, 1000))
def test_likely_remedies_are_found_within_the_default_number(size):
    """Faults among the most sensitive modules: at most about 2 log2(n) candidates."""
    for first, second in itertools.product(range(5), repeat=2):
        needed = {first, second}
        result = smallest_passing_set(range(size), needed.issubset, max_trials(size))
        assert set(result.needed) == needed and result.is_decided
        assert result.trials <= max_trials(size) <= 2 * math.ceil(math.log2(size + 1)) + 8


def test_where_not_even_all_pass_there_is_nothing_needed():
    result = smallest_passing_set(range(16), lambda chosen: False, limit=99)
    assert not result.passes and result.is_decided and result.needed == ()
    assert result.trials == 5  # 1, 2, 4, 8 and 16 in place


def test_where_the_trials_end_the_best_candidate_is_the_answer_and_says_so():
    needed = {40, 90, 95}
    result = smallest_passing_set(range(100), needed.issubset, limit=12)
    assert result.passes and not result.is_decided and result.trials == 12
    assert needed < set(result.needed) and len(result.needed) < 100
    result = smallest_passing_set(range(100), needed.issubset, limit=3)  # none has passed
    assert not result.passes and not result.is_decided
