"""Checks of single values: what counts, what is refused, and how the message begins."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from ampatch.config.validation import known_word, positive_number, truth_value, whole_number

WHAT = "f(x=...)"
positive, in_text = positive_number, partial(positive_number, or_text=True)
whole = partial(whole_number, least=3)
direction = partial(known_word, known=("up", "down"))


@pytest.mark.parametrize(
    ("check", "values", "expected"),
    [
        (positive, [2, 2.0, np.float32(2.0), torch.tensor(2.0)], 2.0),
        (in_text, ["2", " 2.0 ", "2e0"], 2.0),
        (whole, [3, np.int64(3), torch.tensor(3)], 3),
        (truth_value, [True, "True"], True),
        (truth_value, [False, "False"], False),
        (direction, ["up"], "up"),
    ],
)
def test_what_counts(check, values, expected):
    for value in values:
        actual = check(WHAT, value)
        assert actual == expected and type(actual) is type(expected)


@pytest.mark.parametrize(
    ("check", "values", "error", "says"),
    [
        (positive, ["2", True, None, [1.0], 1j], TypeError, "expected a positive number, got"),
        (in_text, [True, None, [1.0], 1j], TypeError, "expected a positive number, got"),
        (positive, [0, -1.0, math.inf, math.nan], ValueError, "must be above 0 and finite"),
        (partial(in_text, expected="a big one"), ["big"], ValueError, r"expected a big one\.$"),
        (whole, [2, np.int64(2)], ValueError, "expected at least 3"),
        (whole, [True, 3.0, "3", None], TypeError, "expected a whole number, got"),
        (truth_value, [1, "yes", None], TypeError, "expected True or False"),
        (direction, [3], ValueError, r'expected "up" or "down"\.'),
        (direction, ["dwon"], ValueError, 'expected "up" or "down". Did you mean "down"?'),
    ],
)
def test_what_is_refused(check, values, error, says):
    for value in values:
        with pytest.raises(error, match=r"^f\(x=...\): " + says):
            check(WHAT, value)
