"""What PyTorch refuses in the dtypes that our casts make, and what the error says elsewhere."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import ampatch

INDEX = torch.tensor([0, 2])
MASK = torch.tensor([[True] * 4, [False] * 4, [True] * 4])


@pytest.fixture
def o1(half):
    ampatch.initialize(
        nn.Linear(2, 2), opt_level="O1", dtype=half, patch_scope="process", verbosity=0
    )


def tensors(half, into_half: bool):
    torch.manual_seed(0)
    x, y = torch.randn(3, 4), torch.randn(2, 4)
    return (x.to(half), y) if into_half else (x, y.to(half))


@pytest.mark.parametrize("into_half", [True, False])
def test_assigning_items(into_half, half, o1):
    for index, part in ((INDEX, lambda y: y), (MASK, lambda y: y.reshape(-1)), (1, lambda y: y[0])):
        x, y = tensors(half, into_half)
        expected = x.clone()
        expected[index] = part(y.to(x.dtype))
        x[index] = part(y)
        assert torch.equal(x, expected)
    x, y = tensors(half, into_half)
    assert torch.index_put_(x, (INDEX,), y) is x and torch.equal(x[INDEX], y.to(x.dtype))


def test_in_a_model_s_forward(half):
    """Where the cast is ours: the layer's output is half, what it is written into FP32."""

    class Scatter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            pooled = torch.zeros(3, 4).index_add(0, INDEX, y).index_add_(0, INDEX, y)
            pooled[INDEX] = y
            inverse = torch.linalg.inv(y @ y.t() + torch.eye(2))
            return torch.fft.rfft(y).abs() + pooled.sum(), inverse

    model = ampatch.initialize(Scatter(), opt_level="O1", dtype=half, verbosity=0)
    spectrum, inverse = model(torch.randn(2, 4))
    assert spectrum.dtype is inverse.dtype is torch.float32
    (spectrum.sum() + inverse.sum()).backward()
    assert model.layer.weight.grad.dtype is torch.float32


FOURIER = ["fft", "ifft", "rfft", "fft2", "rfftn", "hfft", "ihfft"]


def test_fourier(half, o1):
    x = torch.randn(4, 6).to(half)
    for name in FOURIER:
        transform = getattr(torch.fft, name)
        assert torch.equal(transform(x), transform(x.float()))
        with ampatch.precision("half"):  # there is no kernel for it
            assert transform(x).dtype in (torch.complex64, torch.float32)


def test_short_time_fourier(half, o1):
    x, window = torch.randn(64).to(half), torch.hann_window(16)
    found = torch.stft(x, 16, window=window, return_complex=True)
    assert torch.equal(found, torch.stft(x.float(), 16, window=window, return_complex=True))
    back = torch.istft(found, 16, window=window.to(half))
    torch.testing.assert_close(back, x.float(), rtol=0.02, atol=0.02)


OLD_NAMES = ["inverse", "det", "logdet", "slogdet", "svd", "pinverse"]
OLD_NAMES += ["qr"] if torch.__version__ < (2, 15) else []  # which only raises an error since


@pytest.mark.filterwarnings("ignore:torch.qr:UserWarning")
def test_decompositions_by_their_old_names(half, o1):
    matrix = (torch.eye(3) * 4 + torch.ones(3, 3)).to(half)
    for name, where in itertools.product(OLD_NAMES, (torch, torch.Tensor)):
        found, expected = (getattr(where, name)(m) for m in (matrix, matrix.float()))
        for new, old in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert torch.equal(new, old), name


# Errors


class Refused(nn.Module):
    """Meets two dtypes in a function that promotes none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x)
        hidden = torch.relu(hidden)
        table = torch.zeros(3, 4)
        return torch.heaviside(hidden, table)


def said(error: BaseException) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", ())])


REMEDY = (
    "keep the call that made it in FP32: see `overrides=` of ampatch.initialize and "
    'ampatch.precision("float").'
)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_dtype_error_names_the_tensors_that_are_half_and_fp32(level, half):
    model = ampatch.initialize(Refused(), opt_level=level, dtype=half, verbosity=0)
    with pytest.raises(RuntimeError, match="heaviside") as caught:
        model(torch.randn(3, 4))
    text = said(caught.value)
    assert f"Refused is at {level}" in text and f"In forward ({__file__}:" in text
    assert f": hidden is {half}; table is torch.float32. Cast one of them yourself" in text
    assert text.endswith(f"such as hidden.float(), or {REMEDY}")


def test_a_half_tensor_without_a_name(half):
    class Nested(Refused):
        def forward(self, x):
            return torch.heaviside(torch.relu(self.layer(x)), x)

    model = ampatch.initialize(Nested(), opt_level="O1", dtype=half, verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(3, 4))
    assert said(caught.value).endswith(f"Cast the half tensor yourself, by .float(), or {REMEDY}")


OTHER_CAUSES = {
    "a mask of another type": lambda y: y.masked_fill_(torch.ones(3, 4, dtype=torch.uint8), 0.0),
    "indices that are no whole numbers": lambda y: F.embedding(y, torch.zeros(4, 4)),
    "an index of another type": lambda y: torch.zeros(3, 4).gather(0, y),
    "targets of another type": lambda y: F.nll_loss(y, torch.zeros(3)),
    "FP64": lambda y: torch.mm(y, torch.zeros(4, 4, dtype=torch.float64)),
    "complex numbers": lambda y: torch.mm(y, torch.zeros(4, 4, dtype=torch.complex64)),
    "an operator for whole numbers": lambda y: y & 1,
    "a mask of whole numbers": lambda y: F.scaled_dot_product_attention(
        *[y[None]] * 3, attn_mask=torch.ones(3, 3, dtype=torch.long)
    ),
    "words of the script's own": lambda y: refuse("labels must all be of the same type"),
}


def refuse(message):
    raise ValueError(message)


class Calling(nn.Linear):
    """Does something to its output."""

    def __init__(self, call):
        super().__init__(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(super().forward(x))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_error_about_other_dtypes_has_no_note(level, half):
    """In FP32 it is the same."""
    models, x = {name: Calling(call) for name, call in OTHER_CAUSES.items()}, torch.randn(3, 4)
    kinds = {}
    for name, model in models.items():
        with pytest.raises((RuntimeError, ValueError)) as plain:
            model(x)
        kinds[name] = type(plain.value)
    ampatch.initialize(list(models.values()), opt_level=level, dtype=half, verbosity=0)
    for name, model in models.items():
        with pytest.raises(kinds[name]) as caught:
            model(x)
        assert "ampatch" not in said(caught.value), name


ABOUT_HALF = {
    "two types named": lambda y: torch.dot(y[0], torch.zeros(4)),
    "named as classes": lambda y: nn.GRU(4, 4)(y),
    "none named": lambda y: torch.zeros(3, 4).scatter_(0, torch.zeros(3, 4).long(), y),
}


@pytest.mark.parametrize("call", ABOUT_HALF.values(), ids=ABOUT_HALF)
def test_an_error_that_half_has_caused_has_a_note(call):
    model = ampatch.initialize(Calling(call), opt_level="O2", dtype=torch.bfloat16, verbosity=0)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model(torch.randn(3, 4))
    assert "Calling is at O2" in said(caught.value)


CONSTANTS = {
    "masked_fill": lambda x, value: x.masked_fill(x > 0, value),
    "masked_fill_": lambda x, value: x.clone().masked_fill_(x > 0, value),
    "fill_": lambda x, value: x.clone().fill_(value),
    "full_like": torch.full_like,
    "new_full": lambda x, value: x.new_full((2,), value),
    "pad": lambda x, value: F.pad(x, (1, 1), value=value),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_float16_cannot_hold_is_explained(name, level):
    """bfloat16 holds it; what the note says to write does in both."""

    class Fills(nn.Linear):
        def forward(self, x, constant=None):
            x = super().forward(x)
            return CONSTANTS[name](x, constant or torch.finfo(x.dtype).min)

    x = torch.ones(2, 3)
    model = ampatch.initialize(Fills(3, 3), opt_level=level, dtype="bfloat16", verbosity=0)
    assert model(x).isfinite().all() and model(x, constant=-1e9).isfinite().all()
    ampatch.initialize(model, opt_level=level, dtype="float16", verbosity=0)
    assert model(x).isfinite().all()
    with pytest.raises(RuntimeError, match="without overflow") as error:
        model(x, constant=-1e9)
    note = said(error.value)
    assert f"Fills is at {level}" in note and "write torch.finfo(x.dtype).min" in note


def test_other_errors_are_left_as_they_are(half, o1):
    with pytest.raises(RuntimeError) as caught:
        torch.mm(torch.randn(2, 2), torch.randn(3, 2))
    assert not getattr(caught.value, "__notes__", ())
