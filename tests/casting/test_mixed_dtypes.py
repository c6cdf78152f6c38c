"""What PyTorch refuses in the dtypes that our casts make, and what the error says elsewhere."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch


def test_values_that_are_written_in_take_the_dtype_of_what_they_are_written_into(half):
    """Half into FP32 and FP32 into half, which PyTorch refuses."""
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    indices = torch.tensor([0, 2])
    mask = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    parts = ((indices, lambda y: y), (mask, lambda y: y.reshape(-1)), (1, lambda y: y[0]))
    for into, of in ((half, torch.float32), (torch.float32, half)):
        y = torch.randn(2, 4).to(of)
        for index, part in parts:
            x = torch.randn(3, 4).to(into)
            expected = x.clone()
            expected[index] = part(y.to(into))
            x[index] = part(y)
            assert torch.equal(x, expected)
        assert torch.index_put_(x, (indices,), y) is x and torch.equal(x[indices], y.to(into))


def test_what_has_no_half_kernel_is_fp32_under_precision_half_too(half):
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    x = torch.randn(4, 6).to(half)
    with ampatch.precision("half"):
        for name in ("fft", "ifft", "rfft", "fft2", "rfftn", "hfft", "ihfft"):
            assert getattr(torch.fft, name)(x).dtype in (torch.complex64, torch.float32)


class Calling(nn.Linear):
    """Does something to its output."""

    def __init__(self, call):
        super().__init__(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(super().forward(x))


def managed(call, level, dtype=torch.bfloat16):
    return ampatch.initialize(Calling(call), opt_level=level, dtype=dtype, verbosity=0)


def said(error: BaseException) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", ())])


AT_O1 = (
    "run the call that produced the half tensor in FP32: see `overrides=` of ampatch.initialize "
    'and ampatch.precision("float").'
)
IN_HALF = (
    'keep the module in FP32: overrides={"name.of.the.module": "float"} of ampatch.initialize; or '
    "use O1, which runs operators without a half kernel in FP32."
)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_dtype_error_names_the_tensors_that_are_half_and_fp32(level, half):
    def refused(hidden):
        hidden = torch.relu(hidden)
        table = torch.zeros(3, 4)
        return torch.heaviside(hidden, table)

    with pytest.raises(RuntimeError, match="heaviside") as caught:
        managed(refused, level, half)(torch.randn(3, 4))
    text = said(caught.value)
    assert f"Calling is at {level}" in text and f"In refused ({__file__}:" in text
    assert f": hidden is {half}; table is torch.float32. Cast one of them yourself" in text
    assert text.endswith(f"such as hidden.float(), or {AT_O1 if level == 'O1' else IN_HALF}")


def test_a_half_tensor_without_a_name():
    class Nested(nn.Linear):
        def forward(self, x):
            return torch.heaviside(torch.relu(super().forward(x)), x)

    model = ampatch.initialize(Nested(4, 4), opt_level="O1", dtype="bfloat16", verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(3, 4))
    assert said(caught.value).endswith(f"Cast the half tensor yourself, by .float(), or {AT_O1}")


OTHER_CAUSES = {
    "a mask of another type": lambda y: y.masked_fill_(torch.ones(3, 4, dtype=torch.uint8), 0.0),
    "indices that are no whole numbers": lambda y: F.embedding(y, torch.zeros(4, 4)),
    "an index of another type": lambda y: torch.zeros(3, 4).gather(0, y),
    "targets of another type": lambda y: F.nll_loss(y, torch.zeros(3)),
    "FP64": lambda y: torch.mm(y, torch.zeros(4, 4, dtype=torch.float64)),
    "shapes that do not fit": lambda y: torch.mm(y, torch.randn(3, 2)),
    "complex numbers": lambda y: torch.mm(y, torch.zeros(4, 4, dtype=torch.complex64)),
    "an operator for whole numbers": lambda y: y & 1,
    "a mask of whole numbers": lambda y: F.scaled_dot_product_attention(
        *[y[None]] * 3, attn_mask=torch.ones(3, 3, dtype=torch.long)
    ),
    "words of the script's own": lambda y: refuse("labels must all be of the same type"),
    "a kernel for other numbers": lambda y: quantile_of_whole_numbers(y),
}


def quantile_of_whole_numbers(hidden):
    counts = torch.arange(4)
    return torch.quantile(counts, 0.5)


def refuse(message):
    raise ValueError(message)


def test_an_error_about_something_else_has_no_note(opt_level):
    """In FP32 it is the same."""
    models, x = {name: Calling(call) for name, call in OTHER_CAUSES.items()}, torch.randn(3, 4)
    kinds = {}
    for name, model in models.items():
        with pytest.raises((RuntimeError, ValueError)) as plain:
            model(x)
        kinds[name] = type(plain.value)
    ampatch.initialize(list(models.values()), opt_level=opt_level, dtype="bfloat16", verbosity=0)
    for name, model in models.items():
        with pytest.raises(kinds[name]) as caught:
            model(x)
        assert "ampatch" not in said(caught.value), name


ABOUT_HALF = {
    "two types named": lambda y: torch.dot(y[0], torch.zeros(4)),
    "named as classes": lambda y: nn.GRU(4, 4)(y),
    "none named": lambda y: torch.zeros(3, 4).scatter_(0, torch.zeros(3, 4).long(), y),
    "FP32 named alone": lambda y: F.layer_norm(y.float(), [4], torch.ones(4, dtype=y.dtype)),
    "without a word of dtypes": lambda y: F.prelu(y.float(), torch.ones(1, dtype=y.dtype)),
}


NO_KERNEL = {
    "slogdet": torch.linalg.slogdet,
    "inverse": torch.inverse,
    "qr": torch.linalg.qr,
    "svd": torch.linalg.svd,
    "fft": torch.fft.fft,
    "stft": lambda y: torch.stft(
        y.flatten(), 8, window=torch.hann_window(8, dtype=y.dtype), return_complex=True
    ),
    "quantile": lambda y: torch.quantile(y, 0.5),
    "eigh": torch.linalg.eigh,
    "ctc_loss": lambda y: F.ctc_loss(
        y[:, None, :].log_softmax(-1), torch.ones(1, 1).long(), torch.tensor([4]), torch.tensor([1])
    ),
    "lstsq": lambda y: torch.linalg.lstsq(y, y),
    "pinv": torch.linalg.pinv,
    "matrix_rank": torch.linalg.matrix_rank,
    "histogram": lambda y: torch.histogram(y.detach(), 4),
    "numpy": lambda y: y.detach().numpy(),
}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_error_that_half_has_caused_has_a_note(level):
    for name, call in {**ABOUT_HALF, **NO_KERNEL}.items():
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            managed(call, level)(torch.rand(4, 4))
        text = said(caught.value)
        assert f"Calling is at {level}" in text, name
        assert text.endswith(IN_HALF) or name in ABOUT_HALF, name
        ampatch.deactivate()


class Batch:
    """As scripts have them: apex called their `to(dtype)`."""

    def __init__(self, x):
        self.x, self.count = x, 3


class Slotted:
    """Holds a tensor in a slot; another is not set, and every other look raises."""

    __slots__ = ("unset", "x")

    def __init__(self, x):
        self.x = x

    def __getattr__(self, name):
        raise ImportError(name)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", [Batch, Slotted])
@pytest.mark.parametrize(
    "verb, inside", [("is", lambda batch: batch), ("has", lambda batch: [batch])]
)
def test_an_object_of_the_scripts_own_class_is_named(level, kind, verb, inside):
    """Looking for it never raises."""

    class Model(nn.Linear):
        def forward(self, inputs):
            batch = inputs[0] if isinstance(inputs, list) else inputs
            return super().forward(batch.x)

    model = ampatch.initialize(Model(4, 4), opt_level=level, dtype="bfloat16", verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        model(inside(kind(torch.ones(2, 4))))
    text = said(caught.value)
    assert f"inputs {verb} a {kind.__name__}, whose x is FP32" in text
    assert "a dataclass, pass a dict" in text
    assert model(inside(kind(torch.ones(2, 4).bfloat16()))).dtype is torch.float32


def test_a_dataclass_that_the_forward_makes_is_not_told_to_become_one():
    @dataclasses.dataclass
    class Item:
        x: torch.Tensor

    class Model(nn.Linear):
        def forward(self, inputs):
            item = Item(torch.ones(2, 4))
            return super().forward(item.x)

    model = ampatch.initialize(Model(4, 4), opt_level="O2", dtype="bfloat16", verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4))
    assert "a dataclass" not in said(caught.value)


class MakesWeight(nn.Module):
    def forward(self, x):
        self.weight = nn.Parameter(torch.eye(4))
        return x @ self.weight


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_parameter_that_a_forward_makes_and_uses_is_named(level):
    model = nn.Sequential(nn.Linear(4, 4), MakesWeight())
    ampatch.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 4))
    assert "self.weight is torch.float32. Cast one of them yourself" in said(caught.value)


class Bare(nn.Module):
    def __init__(self):
        """Without torch's tables."""


class Own(nn.Module):
    def named_parameters(self):
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", [Bare, Own])
def test_no_module_in_the_frame_keeps_the_note_away_or_half_copies_in_place(kind):
    odd = kind()

    def call(hidden):
        module = odd
        return hidden @ torch.eye(4), module

    model = managed(call, "O2")
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 4))
    assert "Calling is at O2" in said(caught.value) and model.weight.dtype is torch.float32


CONSTANTS = {
    "masked_fill": lambda x, value: x.masked_fill(x > 0, value),
    "masked_fill_": lambda x, value: x.clone().masked_fill_(x > 0, value),
    "fill_": lambda x, value: x.clone().fill_(value),
    "full_like": torch.full_like,
    "new_full": lambda x, value: x.new_full((2,), value),
    "pad": lambda x, value: F.pad(x, (1, 1), value=value),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_constant_that_float16_cannot_hold_is_explained(level):
    """bfloat16 holds it; what the note says to write does in both."""
    for name, fill in CONSTANTS.items():

        def filled(x, fill=fill, constants=(constants := [-1e9])):
            return fill(x, constants[-1] or torch.finfo(x.dtype).min)

        x = torch.ones(2, 4)
        assert managed(filled, level, torch.bfloat16)(x).isfinite().all(), name
        model = managed(filled, level, torch.float16)
        with pytest.raises(RuntimeError, match="without overflow") as error:
            model(x)
        note = said(error.value)
        assert f"Calling is at {level}" in note and "write torch.finfo(x.dtype).min" in note
        constants.append(None)
        for dtype in (torch.float16, torch.bfloat16):
            assert managed(filled, level, dtype)(x).isfinite().all(), name
        ampatch.deactivate()
