"""How means, their scatter and speeds are written."""

import math

import pytest

from ampatch.sweep.report.numbers import plus_minus, quantity, ratio


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
