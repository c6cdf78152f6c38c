"""Every loss of torch.nn.functional against autocast for CUDA, and FP32's values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from autocast_oracle import check_like_autocast, to
from op_samples import ints, r, signs

import ampatch

REDUCTIONS = ("none", "mean", "sum")


def probabilities(*shape: int) -> torch.Tensor:
    """Rows that add up to one."""
    return r(*shape).softmax(-1)


LOSSES = {  # arguments, and those of variants; each with every reduction
    "l1_loss": [((r(3, 4), r(3, 4) + 1), {})],
    "mse_loss": [((r(3, 4), r(3, 4) + 1), {})],
    "smooth_l1_loss": [((r(3, 4), r(3, 4) + 1), {}), ((r(3, 4), r(3, 4)), {"beta": 0.5})],
    "huber_loss": [((r(3, 4), r(3, 4) + 1), {}), ((r(3, 4), r(3, 4)), {"delta": 0.5})],
    "kl_div": [
        ((probabilities(3, 4).log(), probabilities(3, 4)), {}),
        ((probabilities(3, 4).log(), probabilities(3, 4).log()), {"log_target": True}),
    ],
    "nll_loss": [
        ((probabilities(3, 4).log(), ints(4, 3)), {}),
        ((probabilities(3, 4).log(), ints(4, 3)), {"weight": r(4)}),
        ((r(2, 4, 3, 3), ints(4, 2, 3, 3)), {}),
        ((r(2, 4, 3), ints(4, 2, 3)), {"ignore_index": 1}),
    ],
    "cross_entropy": [
        ((r(3, 4), ints(4, 3)), {}),
        ((r(3, 4), ints(4, 3)), {"weight": r(4), "label_smoothing": 0.1}),
        ((r(3, 4), probabilities(3, 4)), {}),
        ((r(2, 4, 3, 3), ints(4, 2, 3, 3)), {}),
    ],
    "linear_cross_entropy": [
        ((r(3, 5), r(4, 5), ints(4, 3)), {}),
        ((r(3, 5), r(4, 5), ints(4, 3)), {"label_smoothing": 0.1}),
    ],
    "binary_cross_entropy_with_logits": [
        ((r(3, 4), r(3, 4)), {}),
        ((r(3, 4), r(3, 4)), {"weight": r(3, 4), "pos_weight": r(4)}),
    ],
    "poisson_nll_loss": [((r(3, 4), r(3, 4)), {}), ((r(3, 4), r(3, 4)), {"full": True})],
    "hinge_embedding_loss": [((r(3, 4), signs(3, 4)), {})],
    "cosine_embedding_loss": [((r(3, 4), r(3, 4), signs(3)), {})],
    "margin_ranking_loss": [((r(3), r(3), signs(3)), {"margin": 0.5})],
    "multi_margin_loss": [((r(3, 4), ints(4, 3)), {}), ((r(3, 4), ints(4, 3)), {"p": 2})],
    "multilabel_margin_loss": [((r(3, 4), ints(4, 3, 4)), {})],
    "multilabel_soft_margin_loss": [((r(3, 4), ints(2, 3, 4).float()), {})],
    "soft_margin_loss": [((r(3, 4), signs(3, 4)), {})],
    "triplet_margin_loss": [
        ((r(3, 4), r(3, 4), r(3, 4)), {}),
        ((r(3, 4), r(3, 4), r(3, 4)), {"swap": True, "p": 1}),
    ],
    "triplet_margin_with_distance_loss": [((r(3, 4), r(3, 4), r(3, 4)), {})],
}
NO_ORACLE = {"binary_cross_entropy", "ctc_loss", "gaussian_nll_loss"}
"""Refused by autocast, and two that read values or need CUDA; each has its test below."""


def test_no_loss_is_left_out():
    losses = {
        name
        for name in dir(F)
        if (name.endswith("_loss") or "entropy" in name) and not name.startswith("_")
    }
    assert losses | {"kl_div"} == {*LOSSES, *NO_ORACLE}


CASES = [
    pytest.param(name, variant, reduction, id=f"{name}-{variant}-{reduction}")
    for name, variants in LOSSES.items()
    for variant in range(len(variants))
    for reduction in REDUCTIONS
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")
@pytest.mark.parametrize("name, variant, reduction", CASES)
def test_losses_are_autocasts(name, variant, reduction, half):
    args, kwargs = LOSSES[name][variant]

    function = getattr(F, name)
    settings = {key: value for key, value in kwargs.items() if not isinstance(value, torch.Tensor)}
    weights = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
    check_like_autocast(
        lambda *args, **weights: function(*args, **weights, **settings, reduction=reduction),
        args,
        half,
        weights,
    )


def test_ctc_takes_the_fp32_that_log_softmax_gives(half):
    """No row: its kernel knows no half, and is not given any."""
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
    with pytest.raises(RuntimeError, match="not implemented"):
        F.ctc_loss(scores.log_softmax(-1).to(half), targets, *lengths)


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
