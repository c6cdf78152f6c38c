"""Which candidates pass: those that the sweep's tests do not tell from O0 by what matters."""

import dataclasses

import pytest
from sweep_made import trained

from ampatch.sweep.report.margin import Margin
from ampatch.sweep.report.rows import summarize
from ampatch.sweep.trial import BASE, Case, Trial
from ampatch.tune.verdict import TuneError, failure_reason, passes, row_of

LEVEL = Case("O3", "float16")
OTHERS = tuple(Case("O3", "float16", settings=(("loss_scale", n),)) for n in range(30))
NOISE = (0.0, 0.004, -0.003, 0.001)


def runs(case, losses, accuracies=None):
    """A good run per seed, with these last losses and accuracies."""
    pairs = enumerate(zip(losses, accuracies or [None] * len(losses)))
    return [
        trained(Trial(case, seed), [1.0] + [loss] * 39, accuracy=accuracy)
        for seed, (loss, accuracy) in pairs
    ]


def row(losses, accuracies=None, base=(0.5, 0.52, 0.48, 0.51), others=(), margin="1%"):
    base_accuracies = None if accuracies is None else [0.9, 0.91, 0.89, 0.9]
    every = runs(BASE, base[: len(losses)], base_accuracies) + runs(LEVEL, losses, accuracies)
    for other in others:
        every += runs(other, near(0.0), accuracies)
    return row_of(LEVEL, every, None, {}, Margin.of(margin))


def verdict(losses, accuracies=None, **others):
    return passes(row(losses, accuracies, **others))


def near(shift):
    return [loss + shift + noise for loss, noise in zip((0.5, 0.52, 0.48, 0.51), NOISE)]


@pytest.mark.parametrize(
    ("shift", "accuracies", "is_fine"),
    (
        (0.0, None, True),
        (0.1, None, False),
        (0.1, [0.9, 0.91, 0.89, 0.9], False),  # the loss is worse, the metric is not
        (0.0, [0.7, 0.72, 0.69, 0.7], False),
        (0.0, [0.95, 0.96, 0.94, 0.96], True),
    ),
)
def test_what_is_within_noise_passes_and_what_is_worse_does_not(shift, accuracies, is_fine):
    assert verdict(near(shift), accuracies) is is_fine


def test_a_difference_that_is_shown_to_be_smaller_than_the_margin_passes():
    worse = [loss + 0.02 + noise / 10 for loss, noise in zip((0.5, 0.52, 0.48, 0.51), NOISE)]
    assert not verdict(worse, margin="1%")
    assert verdict(worse, margin="10%")
    as_accurate = [0.9, 0.91, 0.89, 0.9]
    assert verdict(worse, accuracies=as_accurate, margin="10%")  # the last loss decides too
    assert not verdict(worse, accuracies=as_accurate, margin="0.1")  # the accuracy alone decides


def test_the_number_of_candidates_does_not_change_the_answer():
    """Holm's correction over 30 rows would let this one pass."""
    shifted = near(0.012)
    rows = runs(BASE, (0.5, 0.52, 0.48, 0.51)) + runs(LEVEL, shifted)
    rows += [run for other in OTHERS for run in runs(other, near(0.0))]
    assert next(row for row in summarize(rows) if row.label == LEVEL.label).outcome == "within"
    assert not verdict(shifted)
    assert not verdict(shifted, others=OTHERS)


def test_the_reason_names_what_is_worse_and_nothing_of_speed():
    failing = row(near(0.1), accuracies=[0.9, 0.91, 0.89, 0.9])
    failing = dataclasses.replace(failing, verdict="0.17x the speed of O0; " + failing.verdict)
    assert failure_reason(failing).startswith(
        "worse than O0: last loss 0.603 against 0.5025, difference"
    )


def test_a_row_that_starts_elsewhere_is_compared_with_nothing():
    elsewhere = runs(LEVEL, near(0.0))
    elsewhere[0].measured.losses["0"].values[0] = 3.0
    every = runs(BASE, (0.5, 0.52, 0.48, 0.51)) + elsewhere
    with pytest.raises(TuneError, match="it has a first loss 3 against 1 of O0.*--override-seeds"):
        passes(row_of(LEVEL, every, None, {}))


def test_a_failed_row_fails():
    broken = runs(LEVEL, near(0.0))
    broken[1] = dataclasses.replace(broken[1], exit_code=1)
    every = runs(BASE, (0.5, 0.52, 0.48, 0.51)) + broken
    assert not passes(row_of(LEVEL, every, None, {}))


@pytest.mark.parametrize(
    ("losses", "base", "said"),
    (
        ([0.5], (0.5,), "one seed.*--seeds"),
        ([0.6, 0.6, 0.6], (0.5, 0.5, 0.5), "the same with each seed.*--override-seeds"),
    ),
)
def test_what_cannot_be_tested_is_an_error_that_says_what_to_do(losses, base, said):
    with pytest.raises(TuneError, match=said):
        verdict(losses, base=base)
