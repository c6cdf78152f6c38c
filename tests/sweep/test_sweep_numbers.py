"""How means, their scatter and speeds are written and drawn."""

import math

import pytest
from matplotlib.figure import Figure

from ampatch.sweep.report.drawing import Bar, bars
from ampatch.sweep.report.numbers import decimals, plus_minus, quantity, ratio


@pytest.mark.parametrize(
    ("mean", "sd", "text"),
    [
        (0.97593, 0.01163, "0.976 ± 0.012"),
        (123.4, 12.0, "123 ± 12"),
        (1.0, 1e-9, "1 ± 1.0e-09"),
        (0.5, 0.0, "0.5000"),
        (0.5, None, "0.5000"),
        (2e-5, None, "2.00e-05"),
        (math.nan, 0.1, "nan"),
        (1e30, 2e29, "1.000e+30 ± 2.0e+29"),
        (-2e30, None, "-2.000e+30"),
        (None, None, "-"),
    ],
)
def test_scatter_decides_the_decimals(mean, sd, text):
    assert plus_minus(mean, sd) == text


def test_a_column_has_the_same_decimals():
    places = decimals([0.012, 0.0089, None, 0.0])
    assert places == 4
    assert plus_minus(0.97593, 0.01163, places) == "0.9759 ± 0.0116"
    assert plus_minus(0.97593, None, places) == "0.9759"
    assert decimals([0.5, 1e-5]) == 4  # not six for the sake of one row
    assert plus_minus(0.25, 1e-5, 4) == "0.25 ± 1.0e-05"
    assert decimals([None, 0.0]) is None
    astray = decimals([0.004, 3e5])  # one row diverged, and hides nothing of the other
    assert plus_minus(1.19861, 0.004, astray) == "1.1986 ± 0.0040"


def test_a_value_is_four_decimals_or_three_digits():
    assert [quantity(value) for value in (0.0, 0.25, 1e-4)] == ["0.0000", "0.2500", "1.00e-04"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.256, "1.26"),
        (0.104, "0.10"),
        (0.0152, "0.015"),
        (1.5e-4, "1.5e-04"),
        (34.56, "34.6"),
        (591.6, "592"),
    ],
)
def test_a_speed_far_from_1_shows_its_digits(value, text):
    assert ratio(value) == text


@pytest.mark.parametrize(("low", "scale"), [(0.9, "linear"), (0.002, "log")])
def test_speeds_that_are_far_apart_have_a_logarithmic_axis(low, scale):
    axes = Figure().subplots()
    bars(axes, [Bar("O0", 1.0, "", 0.9, 1.1), Bar("O1", 2.0, "", low, 2.1)])
    assert axes.get_xscale() == scale
    assert [bar.get_x() for bar in axes.patches] == ([1, 1] if scale == "log" else [0, 0])
