"""Losses whose oracle needs values or CUDA; all others are in `op_db`, whose tests have them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from autocast_oracle import to
from op_samples import ints, r

import ampatch


def test_ctc_is_in_fp32(half):
    """Its kernel knows no half, and is not given any."""
    scores, targets, lengths = (
        r(6, 2, 4),
        ints(3, 2, 3) + 1,
        (torch.tensor([6, 6]), torch.tensor([3, 2])),
    )
    expected = F.ctc_loss(scores.log_softmax(-1), targets, *lengths)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    assert torch.equal(F.ctc_loss(scores.log_softmax(-1), targets, *lengths), expected)
    found = F.ctc_loss(scores.to(half).log_softmax(-1), targets, *lengths)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    rounded = scores.log_softmax(-1).to(half)
    expected = F.ctc_loss(rounded.float(), targets, *lengths)
    assert torch.equal(F.ctc_loss(rounded, targets, *lengths), expected)


def test_weighted_multi_margin_runs_in_fp32(half):
    scores, targets, weight = r(3, 4).to(half), ints(4, 3), r(4)
    expected = F.multi_margin_loss(scores.float(), targets, weight=weight)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    found = F.multi_margin_loss(scores, targets, weight=weight)
    assert found.dtype is torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize("full", [False, True])
def test_gaussian_nll_is_plain_arithmetic(full, half):
    """No row for it nor for the logarithm's sum: only `log` and the square are cast, to FP32."""
    args = r(3, 4), r(3, 4) + 1, r(3, 4)
    expected = F.gaussian_nll_loss(*args, full=full)
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    assert torch.equal(F.gaussian_nll_loss(*args, full=full), expected)
    found = F.gaussian_nll_loss(*to(half, args), full=full)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
