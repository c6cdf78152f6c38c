"""Checks of single values: what counts, what is refused, and how the message begins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ampatch.config.validation import positive_number, truth_value, whole_number, word

WHAT = "f(x=...)"


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2.0), torch.tensor(2.0)])
def test_a_positive_number(value):
    found = positive_number(WHAT, value)
    assert found == 2.0 and type(found) is float


@pytest.mark.parametrize("value", ["2", " 2.0 ", "2e0"])
def test_a_number_in_a_string_counts_only_where_it_is_asked_for(value):
    assert positive_number(WHAT, value, or_text=True) == 2.0
    with pytest.raises(TypeError, match="expected a positive number, got str"):
        positive_number(WHAT, value)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_a_number_that_is_not_positive_and_finite(value):
    with pytest.raises(ValueError, match=r"^f\(x=...\): must be above 0 and finite"):
        positive_number(WHAT, value)


@pytest.mark.parametrize("value", [True, None, [1.0], 1j])
def test_no_number(value):
    for or_text in (False, True):
        with pytest.raises(TypeError, match=r"^f\(x=...\): expected a positive number, got"):
            positive_number(WHAT, value, or_text=or_text)


def test_text_that_is_no_number():
    with pytest.raises(ValueError, match=r"^f\(x=...\): expected a big one\.$"):
        positive_number(WHAT, "big", "a big one", or_text=True)


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_a_whole_number(value):
    found = whole_number(WHAT, value, least=3)
    assert found == 3 and type(found) is int
    with pytest.raises(ValueError, match="expected at least 4"):
        whole_number(WHAT, value, least=4)


@pytest.mark.parametrize("value", [True, 3.0, "3", None])
def test_no_whole_number(value):
    with pytest.raises(TypeError, match="expected a whole number, got"):
        whole_number(WHAT, value)


def test_a_truth_value():
    assert [truth_value(WHAT, value) for value in (True, "True", False, "False")] == [
        *(True, True),
        *(False, False),
    ]
    for value in (1, "yes", None):
        with pytest.raises(TypeError, match="expected True or False"):
            truth_value(WHAT, value)


def test_a_word():
    assert word(WHAT, "up", ("up", "down")) == "up"
    with pytest.raises(ValueError, match=r'^f\(x=...\): expected "up" or "down"\.'):
        word(WHAT, 3, ("up", "down"))
    with pytest.raises(ValueError, match='expected this. Did you mean "down"?'):
        word(WHAT, "dwon", ("up", "down"), "this")
