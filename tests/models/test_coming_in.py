"""Models as they come: already in half, partly frozen (LoRA), SyncBatchNorm, weights of RNNs, lazy
modules, shared memory, state of torch.distributed.checkpoint.  And torchvision's detectors, which
call operators with kernels of their own, on a small backbone.
"""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from small_training import Made, data, managed, step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

import ampatch
from ampatch import auto
from ampatch.session.facade import open_sessions

BF16 = torch.bfloat16


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def train(model, optimizer, plain, reference, steps):
    """The same steps of both, one of them without ampatch."""
    for number in range(steps):
        inputs, targets = data(number)
        step(F.mse_loss(model(inputs).float(), targets), optimizer)
        assert not ampatch.step_was_skipped(optimizer)
        reference.zero_grad()
        F.mse_loss(plain(inputs), targets).backward()
        reference.step()


def values(tensors):
    return [tensor.detach().clone() for tensor in tensors]


# Already in half


def in_half(half):
    """Linear layers with weights in half, and a LayerNorm in FP32."""
    model = build().to(half)
    model[1].float()
    return model


def test_a_half_model_at_o0_trains_as_the_float_model_of_its_values(half):
    """O0 makes it an FP32 model, and gives it back in half."""
    plain, model = build().to(half).float(), build().to(half)
    make = lambda params: torch.optim.Adam(params, lr=1e-4)  # noqa: E731
    optimizer, reference = make(model.parameters()), make(plain.parameters())
    ampatch.initialize(model, optimizer, opt_level="O0", dtype=half, verbosity=0)
    train(model, optimizer, plain, reference, 10)
    assert all(map(torch.equal, ampatch.master_params(optimizer), plain.parameters()))
    ampatch.deactivate()
    assert {param.dtype for param in model.parameters()} == {half}  # as it came
    expected = [param.to(half) for param in plain.parameters()]
    assert all(map(torch.equal, model.parameters(), expected))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_given_in_half_train_as_they_are_and_that_is_said(level, half, caplog):
    """They stay the user's tensors, in the optimizer too; without FP32 values updates may stall."""
    model = in_half(half)
    frozen = model[3].bias.requires_grad_(False)
    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.1), copy.deepcopy(model).float()
    before, params = values(model.parameters()), list(model.parameters())
    ampatch.initialize(model, optimizer, opt_level=level, dtype=half, init_scale=256.0)
    words = "already half when ampatch.initialize"
    (message,) = [m for m in caplog.messages if words in m]
    assert "0.weight, 0.bias, 3.weight." in message and "model.float() before" in message
    train(model, optimizer, plain, torch.optim.SGD(plain.parameters(), lr=0.1), 4)
    ours = list(ampatch.master_params(optimizer))
    assert all(param is other for param, other in zip(ours, params, strict=True))
    assert [p.dtype for p in params] == [half, half, torch.float32, torch.float32, half, half]
    for param, expected, start in zip(params, plain.parameters(), before, strict=True):
        assert param is frozen or not torch.equal(param, start)
        torch.testing.assert_close(param.float(), expected, atol=0.02, rtol=0.02)
    assert torch.equal(frozen, before[-1])
    ampatch.deactivate()
    assert [p.dtype for p in params] == [p.dtype for p in before]


@pytest.mark.parametrize("level, verbosity, trains", [("O1", 0, True), ("O2", 1, False)])
def test_half_weights_are_not_spoken_of_where_quiet_or_frozen(level, verbosity, trains, caplog):
    model = in_half(BF16)
    model[0].requires_grad_(trains), model[3].requires_grad_(trains)
    managed(model, level, verbosity=verbosity)
    assert "already half when ampatch.initialize" not in caplog.text


# Partly frozen, mixed dtypes


class Lora(nn.Module):
    """A frozen Linear and a trainable update of low rank."""

    def __init__(self, inputs, outputs, base, adapter):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).to(base).requires_grad_(False)
        self.down = nn.Linear(inputs, 2, bias=False).to(adapter)
        self.up = nn.Linear(2, outputs, bias=False).to(adapter)

    def forward(self, x):
        low = self.up(self.down(x.to(self.down.weight.dtype)))
        return self.base(x.to(self.base.weight.dtype)) + low


def lora(base, adapter):
    torch.manual_seed(0)
    return nn.Sequential(Lora(4, 8, base, adapter), nn.Tanh(), Lora(8, 2, base, adapter))


@pytest.mark.parametrize("level, everything_in_the_optimizer", [("O1", False), ("O2", True)])
def test_lora_trains_float_adapters_beside_a_frozen_half_base(level, everything_in_the_optimizer):
    """The base stays in 2 bytes, where it is; nothing of it is copied or updated."""
    model, plain = lora(BF16, torch.float32), lora(BF16, torch.float32).float()
    trainable = [param for param in model.parameters() if param.requires_grad]
    frozen = [param for param in model.parameters() if not param.requires_grad]
    params = list(model.parameters()) if everything_in_the_optimizer else trainable
    optimizer = torch.optim.Adam(params, lr=1e-3)
    reference = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=1e-3)
    before, places = values(frozen), [param.data_ptr() for param in frozen]
    ampatch.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    train(model, optimizer, plain, reference, 8)
    held = list(ampatch.master_params(optimizer))
    assert all(a is b for a, b in zip(held, params, strict=True))
    assert {param.dtype for param in trainable} == {torch.float32}
    assert {param.dtype for param in frozen} == {BF16}
    assert all(map(torch.equal, before, frozen)) and places == [p.data_ptr() for p in frozen]
    assert len(optimizer.state) == len(trainable)
    theirs = [param for param in plain.parameters() if param.requires_grad]
    for ours, expected in zip(trainable, theirs, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-3, rtol=0)


# SyncBatchNorm


@pytest.mark.parametrize("when", ["before", "after"])
def test_sync_batchnorm(when, opt_level):
    """Kept in FP32 as BatchNorm is; in evaluation the two compute the same, on the CPU too."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Conv1d(3, 2, 3))

    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    reference = ampatch.initialize(net(), opt_level=opt_level, dtype=BF16, verbosity=0)
    model = convert(net()) if when == "before" else net()
    _, optimizer = managed(model, opt_level)
    model = convert(model) if when == "after" else model
    kept = BF16 if opt_level == "O3" else torch.float32
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert model[1].weight.dtype is model[1].running_mean.dtype is kept
    x = torch.randn(5, 2, 9)
    assert torch.equal(model.eval()(x), reference.eval()(x))
    step(model(x).float().square().mean(), optimizer)
    assert {value.dtype for value in model[0].state_dict().values()} == {kept}


# Recurrent models


def recurrent(kind=nn.LSTM):
    rnn = kind(4, 6, num_layers=2, bidirectional=True)
    return Made(lambda self, x: self.head(self.rnn(x)[0]), rnn=rnn, head=nn.Linear(12, 2))


def test_weights_of_rnns_are_flattened_whenever_their_data_is_new(opt_level, monkeypatch):
    """cuDNN wants them in one piece; where there is no cuDNN that can only be watched."""
    seen = []

    def flatten(self):
        seen.append({weight.dtype for weight in self._flat_weights})

    model = recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", flatten)
    ampatch.initialize(model, optimizer, opt_level=opt_level, dtype=BF16, verbosity=0)
    ampatch.deactivate()
    assert seen == ([{BF16}, {torch.float32}] if opt_level == "O3" else [])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_weights_of_rnns_are_in_one_piece_on_cuda(kind, opt_level):
    """cuDNN warns of scattered weights, and a warning is an error here."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    model = recurrent(kind).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level=opt_level, init_scale=64.0, verbosity=0)
    x = data()[0].cuda()
    for _ in range(2):
        step(model(x).float().square().mean(), optimizer)
    expected = model(x)
    ampatch.deactivate()
    output = model(x.to(model.head.weight.dtype))
    assert torch.allclose(output.float(), expected.float(), atol=0.01)


# Lazy modules, shared memory, distributed state


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_lazy_modules_start_at_the_first_forward(level):
    model, optimizer = managed(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), level)
    step(model(data()[0]).float().square().mean(), optimizer)
    assert type(model[0]) is nn.Linear and model[0].weight.dtype is torch.float32
    assert torch.isfinite(model[0].weight).all() and model[0].weight.grad is not None


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_lazy_modules_are_refused_until_they_have_weights(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ampatch.AmpatchError, match=r"Sequential.*'1\.weight'.*one fo.*before"):
        managed(model, level)
    assert model[0].weight.dtype is torch.float32 and not open_sessions()
    model(data()[0])
    _, optimizer = managed(model, level)
    step(model(data()[0]).float().square().mean(), optimizer)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_share_their_memory_go_on_sharing_it(level, frozen):
    """Two objects, tied by `.data`: in FP32 each step of one is seen in the other."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight.data = first.weight.data
    second.weight.requires_grad_(not frozen)
    model = nn.Sequential(first, nn.Tanh(), second)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    ampatch.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    for _ in range(2):
        before = first.weight.detach().clone()
        step(model(torch.ones(2, 4)).square().sum(), optimizer)
        assert torch.equal(first.weight, second.weight) and not torch.equal(first.weight, before)
    with torch.no_grad():
        first.weight.fill_(0.25)
    ampatch.deactivate()
    assert bool((first.weight == 0.25).all()) and bool((second.weight == 0.25).all())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_distributed_state_of_a_fresh_pair(level, caplog):
    """Its functions make a step of their own to create state; that changes no weight."""
    model, optimizer = managed(build(), level, kind=torch.optim.AdamW, verbosity=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, state = get_state_dict(model, optimizer)
    assert set(state["state"]) == set(dict(model.named_parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "scale_loss" not in caplog.text
    third = torch.full((8,), 1 / 3)
    set_model_state_dict(model, {**before, "0.bias": third})
    kind = torch.float32 if level == "O2" else BF16
    assert torch.equal(model.state_dict()["0.bias"], third.to(kind))


H = torch.bfloat16
SIZE = {"min_size": 32, "max_size": 48}
IMAGES = [torch.rand(3, 32, 40, generator=torch.Generator().manual_seed(n)) for n in range(2)]


class Backbone(nn.Module):
    out_channels = 32

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 4, 1), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, x):
        return {"0": self.body(x)}


def anchors():
    return AnchorGenerator(((8, 16),), ((0.5, 1.0),))


def of_regions(kind, **heads):
    pools = {
        name: MultiScaleRoIAlign(["0"], size, 2)
        for name, size in {"box_roi_pool": 3, **heads}.items()
    }
    proposals = {"rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20}
    return kind(
        Backbone(), num_classes=2, rpn_anchor_generator=anchors(), **pools, **proposals, **SIZE
    )


def one_stage(kind):
    anchors = AnchorGenerator(((8,),), ((1.0,),))
    return kind(Backbone(), num_classes=2, anchor_generator=anchors, score_thresh=0.0, **SIZE)


def ssd():
    backbone = Backbone()
    backbone.out_channels = [32]
    return SSD(backbone, DefaultBoxGenerator([[2]]), (32, 32), 2, score_thresh=0.0)


DETECTORS = {
    "Faster R-CNN": lambda: of_regions(detection.FasterRCNN),
    "Mask R-CNN": lambda: of_regions(detection.MaskRCNN, mask_roi_pool=4),
    "Keypoint R-CNN": lambda: of_regions(detection.KeypointRCNN, keypoint_roi_pool=4),
    "FCOS": lambda: one_stage(detection.FCOS),
    "RetinaNet": lambda: one_stage(detection.RetinaNet),
    "SSD": ssd,
}


def targets():
    boxes = torch.tensor([[5.3, 6.1, 20.7, 24.2], [10.1, 2.9, 30.6, 25.4]])
    points = torch.tensor([[[9.0, 9.0, 1.0]] * 17, [[20.0, 12.0, 1.0]] * 17])
    masks = torch.ones(2, 32, 40, dtype=torch.uint8)
    labels = torch.tensor([1, 1])
    return [
        {"boxes": boxes.clone(), "labels": labels, "masks": masks, "keypoints": points}
        for _ in IMAGES
    ]


def ran(detector, level):
    """The losses of two steps and the scores of an evaluation."""
    around, automatic = contextlib.nullcontext, None
    if level == "auto":
        automatic = auto.start({"dtype": H})
    torch.manual_seed(0)
    model = DETECTORS[detector]().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if level == "autocast":
        around = lambda: torch.autocast("cpu", H)  # noqa: E731
    elif automatic is None:
        ampatch.initialize(model, optimizer, opt_level=level, dtype=H, verbosity=0)
    losses, labels = [], targets()
    for number in range(2):
        torch.manual_seed(number)  # regions are sampled
        with around():
            loss = sum(model(IMAGES, labels).values())
        optimizer.zero_grad()
        if level in ("autocast", "auto"):
            loss.backward()
        else:
            with ampatch.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(labels, targets()))
    with torch.no_grad(), around():
        detections = model.eval()(IMAGES)
    ampatch.deactivate()
    return losses, [detection["scores"].float() for detection in detections]


@functools.cache
def under_autocast(detector):
    return ran(detector, "autocast")


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("detector", DETECTORS)
def test_a_detector_trains_and_detects_as_under_autocast(detector, level):
    losses, scores = under_autocast(detector)
    actual, scores_found = ran(detector, level)
    assert actual == pytest.approx(losses, rel=0.1)
    for expected, actual_scores in zip(scores, scores_found, strict=True):
        assert abs(len(expected) - len(actual_scores)) <= 0.3 * len(expected) + 2
        if len(expected) and len(actual_scores):
            assert actual_scores.max().item() == pytest.approx(expected.max().item(), abs=0.05)
