"""apex's inner parts that scripts reach into: lists, handles, loss scalers."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

import ampatch
from ampatch.compat import apex as compat
from ampatch.compat.apex import lists
from ampatch.session.facade import open_sessions

HALF = torch.full((2, 2), 0.5, dtype=torch.float16)
SINGLE = torch.full((2, 2), 0.5)
functions = nn.functional


def start(level: str = "O1", **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return compat.amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


# Lists


def test_the_lists_hold_what_scripts_look_for(amp):
    assert lists.edits() == []  # without an edit nothing is added
    functional = (functions, "conv2d linear", "softmax layer_norm mse_loss gelu", "")
    expected = {
        "functional_overrides": functional,
        "torch_overrides": (torch, "mm bmm matmul einsum", "exp pow softmax sum", "add addcmul"),
        "tensor_overrides": (torch.Tensor, "__matmul__", "cpu __pow__", ""),
    }
    for title, (module, half, single, promoted) in expected.items():
        listed = getattr(amp.lists, title)
        assert listed.MODULE is module
        assert {*half.split()} <= {*listed.FP16_FUNCS}
        assert {*single.split()} <= {*listed.FP32_FUNCS}
        assert {*promoted.split()} <= {*listed.CASTS}
        names = [*listed.FP16_FUNCS, *listed.FP32_FUNCS, *listed.CASTS, *listed.SEQUENCE_CASTS]
        assert len(names) == len(set(names)) and all(hasattr(module, name) for name in names)
    banned = amp.lists.functional_overrides.BANNED_FUNCS
    assert [name for name, why in banned] == ["binary_cross_entropy"]
    assert {"cat", "stack"} <= {*amp.lists.torch_overrides.SEQUENCE_CASTS}


def test_a_name_taken_out_is_left_to_pytorch(amp):
    start()
    assert functions.softmax(HALF, -1).dtype is torch.float32  # what the tables say
    ampatch.deactivate()
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    amp.lists.functional_overrides.FP16_FUNCS.remove("linear")
    amp.lists.functional_overrides.BANNED_FUNCS.clear()
    amp.lists.torch_overrides.FP32_FUNCS.remove("exp")
    amp.lists.tensor_overrides.FP32_FUNCS.remove("cpu")
    model, _ = start()
    assert functions.softmax(HALF, -1).dtype is torch.float16
    assert nn.Softmax(-1)(HALF).dtype is torch.float16
    compiled = torch.compile(lambda x: functions.softmax(x, -1), backend="eager", fullgraph=True)
    assert compiled(HALF).dtype is torch.float16
    assert functions.softmax(SINGLE, -1).dtype is torch.float32
    assert model(SINGLE).dtype is torch.float32
    assert functions.binary_cross_entropy(HALF, HALF).dtype is torch.float16
    assert torch.exp(HALF).dtype is HALF.cpu().dtype is torch.float16
    assert torch.softmax(HALF, -1).dtype is torch.float32  # another list has it
    assert torch.mm(SINGLE, SINGLE).dtype is torch.float16


def test_a_name_put_in_follows_its_list_whatever_the_tables_say(amp):
    """In two lists, as softmax here, it is cast to half."""
    functional, of_torch = amp.lists.functional_overrides, amp.lists.torch_overrides
    functional.FP32_FUNCS.append("relu")
    functional.FP32_FUNCS.remove("mse_loss")
    functional.FP16_FUNCS += ["mse_loss", "softmax"]
    of_torch.FP16_FUNCS.remove("mm")
    of_torch.FP32_FUNCS += ["mm", "sigmoid"]
    amp.lists.tensor_overrides.FP16_FUNCS.append("sigmoid")
    start()
    assert functions.softmax(SINGLE, -1).dtype is torch.float16
    assert functions.relu(HALF).dtype is nn.ReLU()(HALF).dtype is torch.float32
    assert functions.mse_loss(SINGLE, SINGLE).dtype is torch.float16
    assert torch.mm(HALF, HALF).dtype is torch.float32
    assert torch.sigmoid(HALF).dtype is torch.float32
    assert SINGLE.sigmoid().dtype is torch.float16
    with amp.disable_casts():
        assert torch.mm(HALF, HALF).dtype is torch.float16
    ampatch.deactivate()
    assert functions.relu(HALF).dtype is torch.float16


def test_a_list_may_be_replaced_and_edited_between_initializes(amp):
    first, _ = start()
    amp.lists.functional_overrides.FP16_FUNCS = ["linear", "sigmoid"]
    second, _ = start()
    image = torch.ones(1, 1, 3, 3)
    assert functions.conv2d(image, image).dtype is torch.float32
    assert functions.sigmoid(SINGLE).dtype is second(SINGLE).dtype is torch.float16
    assert first(SINGLE).dtype is torch.float16
    amp.lists.functional_overrides.FP16_FUNCS.append("conv2d")
    start()
    assert functions.conv2d(image, image).dtype is torch.float16


def test_the_oldest_api_reads_the_lists_too(amp):
    amp.lists.functional_overrides.FP32_FUNCS.append("relu")
    handle = amp.init()
    assert functions.relu(HALF).dtype is torch.float32
    handle._deactivate()
    assert functions.relu(HALF).dtype is torch.float16


def test_uninstall_forgets_the_edits(amp):
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    start()
    compat.uninstall()
    ampatch.deactivate()
    compat.install()
    from apex import amp as again

    again.initialize(nn.Linear(4, 4), verbosity=0)
    assert functions.softmax(HALF, -1).dtype is torch.float32
    assert "softmax" in again.lists.functional_overrides.FP32_FUNCS


def test_wrong_edits_are_refused_before_anything_changes(amp):
    amp.lists.torch_overrides.FP16_FUNCS.append("no_such_function")
    with pytest.raises(AttributeError, match="no_such_function"):
        start()
    amp.lists.torch_overrides.FP16_FUNCS.pop()
    amp.lists.functional_overrides.BANNED_FUNCS.append(("relu", "because"))
    with pytest.raises(ampatch.AmpatchError, match="FP32_FUNCS"):
        start()
    assert not open_sessions()


# Handles


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_deactivate_ends_the_casts_and_leaves_the_rest(amp, level):
    model, optimizer = start(level, loss_scale=64.0)
    handle = amp._amp_state.handle
    assert handle._is_active and handle.is_active()
    if level == "O1":
        assert torch.mm(SINGLE, SINGLE).dtype is torch.float16
        assert amp.amp._DECORATOR_HANDLE.is_active()
        amp.amp._DECORATOR_HANDLE._deactivate()
    else:
        handle._deactivate()
    assert not handle._is_active
    assert torch.mm(SINGLE, SINGLE).dtype is torch.float32
    assert model(SINGLE).dtype is torch.float32
    seen = []
    with mock.patch.object(nn.Linear, "forward", lambda *call: seen.append(call[0].weight.dtype)):
        with contextlib.suppress(AttributeError):  # of None
            model(SINGLE).float()
    loss = model(SINGLE).float().sum()
    assert seen == [torch.float32 if level == "O1" else torch.float16]
    before = model.weight.detach().clone()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == pytest.approx(64 * loss.item())
        scaled.backward()
    for param in amp.master_params(optimizer):
        assert param.grad.tolist() in ([[1.0, 1.0]] * 2, [2.0, 2.0])  # unscaled
    optimizer.step()
    assert not torch.equal(before, model.weight)
    handle._deactivate()  # harmless twice

    other, _ = start("O1")  # and amp may begin again
    assert torch.mm(SINGLE, SINGLE).dtype is other(SINGLE).dtype is torch.float16
    assert amp._amp_state.handle.is_active()
    assert model(SINGLE).dtype is torch.float32  # the first stays without


def test_the_decorator_handle(amp):
    assert amp.amp._DECORATOR_HANDLE is None
    handle = amp.init()
    assert amp.amp._DECORATOR_HANDLE is handle and handle._is_active
    handle._deactivate()
    assert not handle._is_active
    assert amp.amp._DECORATOR_HANDLE is None
    amp.amp._DECORATOR_HANDLE = None
    again = amp.init()
    assert again is not handle and again.is_active()
    assert amp.amp.half_function is amp.half_function


@pytest.mark.parametrize(
    "level, dtype",
    [("O0", torch.float32), ("O1", torch.float16), ("O4", torch.bfloat16), ("O2", None)],
)
def test_init_obeys_the_environments_level(amp, level, dtype, monkeypatch):
    monkeypatch.setenv("AMPATCH_OPT_LEVEL", level)
    if dtype is None:
        with pytest.raises(ampatch.AmpatchError, match="knows no models"):
            amp.init()
        return
    handle = amp.init()
    assert torch.mm(SINGLE, SINGLE).dtype is dtype
    assert handle.is_active() == (level != "O0")
    with handle.scale_loss(torch.ones(()), torch.optim.SGD([nn.Parameter(SINGLE)], lr=0.1)) as loss:
        assert (loss.item() == 1.0) == (level == "O0")


class Criterion(nn.Module):
    """Its methods note the dtypes that they get."""

    def single(self, x):
        self.seen = {"single": x.dtype}
        return x.float().pow(2).mean()

    def half(self, x):
        self.seen["half"] = x.dtype
        return x

    def forward(self, x):
        loss = self.single(x)
        self.half(x.float())
        return loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
        self.head, self.criterion = nn.Linear(4, 2), Criterion()

    def forward(self, x):
        self.output = self.head(self.body(x))
        return self.criterion(self.output)


@pytest.fixture
def registered(amp):
    amp.register_float_function(Criterion, "single")
    amp.register_half_function(Criterion, "half")
    yield
    for name in ("single", "half"):
        ampatch.unregister_function(Criterion, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", ["init last", "init first"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_init_beside_initialize_casts_in_its_models_too(amp, registered, level, order, dtype):
    """espnet: `initialize`, `register_float_function`, `init`.  torch's functions stay as they are
    at O2 and O3, where calls that mix FP32 and half are cast, as after a registered function.
    """
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = amp.init() if order == "init first" else None
    dtype = torch.float16 if level == "O1" else dtype
    settings = {} if dtype is torch.float16 else {"cast_model_type": dtype}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    handle = handle or amp.init()
    single, losses = torch.float32, []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 2) + torch.arange(4.0)[:, None])
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
        assert model.criterion.seen == {"single": single, "half": dtype}
        assert model.output.dtype is dtype
    assert losses[-1] < 0.5 * losses[0]
    assert model.criterion(SINGLE.half()).dtype is torch.float32
    model.criterion.seen = {}
    compiled = torch.compile(lambda x: model(x), backend="eager")
    compiled(torch.ones(4, 2) + torch.arange(4.0)[:, None])
    assert model.criterion.seen == {"single": single, "half": dtype}
    handle._deactivate()
    model(torch.ones(4, 2) + torch.arange(4.0)[:, None])
    assert model.criterion.seen["single"] is (single if level == "O1" else dtype)


def test_init_leaves_a_model_at_o0_in_fp32(amp, registered):
    model = Net()
    amp.initialize(model, opt_level="O0", verbosity=0)
    amp.init()
    model(torch.randn(4, 2))
    assert {*model.criterion.seen.values(), model.output.dtype} == {torch.float32}


# Scalers and private modules


@pytest.mark.parametrize("scale", ["dynamic", 128.0], ids=["dynamic", "static"])
def test_loss_scalers_are_written(amp, scale):
    model, optimizer = start("O1", loss_scale=scale, num_losses=2)
    scalers = amp._amp_state.loss_scalers
    assert [scaler.dynamic for scaler in scalers] == [scale == "dynamic"] * 2
    scalers[1]._loss_scale = 2**20
    with amp.scale_loss(torch.ones((), requires_grad=True), optimizer, loss_id=1) as scaled:
        assert scaled.item() == 2.0**20
    if scale == "dynamic":
        scalers[0]._loss_scale, scalers[0]._unskipped, scalers[0]._scale_seq_len = 8.0, 2, 3
        scalers[0]._min_loss_scale = None
        assert scalers[0]._min_loss_scale == 2.0**-24  # the least there is
        scalers[0]._max_loss_scale, scalers[0]._min_loss_scale = 16.0, 4.0
        scales = []
        for bad in (False, False, True, True, True, False, False, False):
            optimizer.zero_grad()
            loss = model(SINGLE).float().sum() * (float("inf") if bad else 1.0)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            scales.append(scalers[0].loss_scale())
        assert scales == [16.0, 16.0, 8.0, 4.0, 4.0, 4.0, 4.0, 8.0]


def test_allow_incoming_model_not_fp32(amp, caplog):
    """apex makes masters of half weights then; here they are trained in half, which is said."""
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2")
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert "no FP32 master weights: weight, bias" in caplog.text


def test_private_modules_and_other_places():
    import apex
    from apex.amp._initialize import applier, to_type
    from apex.amp.frontend import initialize
    from apex.amp.handle import disable_casts, scale_loss
    from apex.contrib.optimizers import FP16_Optimizer

    assert FP16_Optimizer is apex.fp16_utils.FP16_Optimizer
    assert apex.optimizers.fused_adam.FusedAdam is apex.optimizers.FusedAdam
    assert apex.amp.initialize is initialize and apex.amp.scale_loss is scale_loss
    assert apex.amp.disable_casts is disable_casts
    assert to_type(torch.float16, SINGLE).dtype is torch.float16
    assert to_type(torch.float16, torch.ones(1, dtype=torch.long)).dtype is torch.long
    mapped = applier({"a": [SINGLE, (SINGLE, 3)]}, lambda tensor: tensor.half())
    assert mapped["a"][0].dtype is mapped["a"][1][0].dtype is torch.float16
    assert mapped["a"][1][1] == 3
    with pytest.raises(ImportError, match="register_half_function"):
        import apex.amp.wrap


def test_properties_and_messages_are_attributes_and_names(amp, capsys, monkeypatch):
    from apex.amp._amp_state import _amp_state, maybe_print, warn_or_err
    from apex.amp.frontend import Properties

    assert Properties().options == {
        "enabled": False,
        "opt_level": None,
        "cast_model_type": None,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": 1.0,
    }
    start("O2")
    assert isinstance(_amp_state.opt_properties, Properties)
    _amp_state.verbosity = 1
    for say in (maybe_print, _amp_state.maybe_print, amp._amp_state.maybe_print):
        say("said", True)
    _amp_state.verbosity = 0
    maybe_print("not said")
    assert capsys.readouterr().out == "said\n" * 3
    for tell in (warn_or_err, amp._amp_state.warn_or_err):
        with pytest.raises(RuntimeError, match="no good"):
            tell("no good")
    monkeypatch.setattr(_amp_state, "hard_override", True)
    warn_or_err("no good")
    assert "no good" in capsys.readouterr().out


def test_clipping_of_contrib_is_torchs(amp):
    from apex.contrib import clip_grad

    model, optimizer = start("O1", loss_scale=256.0)
    loss = model(SINGLE).float().sum() * 3
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    norm = clip_grad.clip_grad_norm_(model.parameters(), 1.0)  # unscales before
    own = torch.tensor([3.0, 3.0, 3.0, 3.0, 6.0, 6.0])
    assert norm.item() == pytest.approx(own.norm().item(), rel=1e-3)
    clipped = torch.cat([param.grad.flatten() for param in model.parameters()])
    torch.testing.assert_close(clipped, own / own.norm(), rtol=1e-3, atol=1e-3)
