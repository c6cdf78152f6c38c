"""The wording of errors: what was done, what was expected, what to do.  And nothing half done."""

import re

import pytest
import torch
from torch import nn
from torch_snapshot import changes, snapshot
from warm_python import python

import ampatch
from ampatch.session.facade import open_sessions

MISSING_WITH = r"'with ampatch.scale_loss\(loss, .*\) as scaled_loss: scaled_loss.backward\(\)'"


def training(**kwargs):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **kwargs)


L = torch.tensor(3.0)
MODEL = nn.Linear(2, 2)
half_function = ampatch.register_half_function
BAD_INITIALIZE = [
    ({"opt_level": "O7"}, ValueError, "opt_level='O7'): unknown opt level 'O7'. Expected O0, O1, "),
    ({"opt_level": None}, ValueError, "opt_level=None"),
    ({"opt_level": 1}, ValueError, "opt_level=1"),
    ({"opt_level": "o1"}, ValueError, '(the letter O, not the digit zero). Did you mean "O1"?'),
    ({"opt_level": "01"}, ValueError, 'Did you mean "O1"?'),
    (
        {"optlevel": "O1"},
        TypeError,
        'ize(optlevel=...): there is no such argument. Did you mean "opt_',
    ),
    ({"dtype": torch.float32}, ValueError, 'torch.bfloat16; for FP32 use opt_level="O0".'),
    ({"dtype": "floaty16"}, ValueError, 'Did you mean "float16"?'),
    ({"dtype": 16}, TypeError, "dtype=16"),
    ({"dtype": torch.int8}, ValueError, "dtype=torch.int8"),
    ({"loss_scale": "big"}, ValueError, 'expected "dynamic" or a positive number'),
    ({"loss_scale": float("inf")}, ValueError, "must be above 0 and finite"),
    ({"loss_scale": [1]}, TypeError, 'loss_scale=[1]): expected "dynamic" or a positive number'),
    ({"loss_scale": True}, TypeError, 'or "128.0", got bool'),
    ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ValueError, "min_loss_scale <= max_loss_sc"),
    ({"min_loss_scale": 0.0}, ValueError, "min_loss_scale=0.0"),
    ({"growth_factor": 1.0}, ValueError, "growth_factor=1.0: expected a number above 1."),
    ({"backoff_factor": 1.0}, ValueError, "backoff_factor=1.0: expected a number below 1."),
    ({"growth_interval": 0}, ValueError, "growth_interval=0"),
    ({"num_losses": "2"}, TypeError, "expected a whole number, got str"),
    ({"verbosity": -1}, ValueError, "verbosity=-1"),
    ({"enabled": "yes"}, TypeError, "enabled='yes'"),
    ({"keep_batchnorm_fp32": "maybe", "opt_level": "O2"}, TypeError, '"False"), got str'),
    ({"keep_batchnorm_fp32": True}, ValueError, 'Leave it out, or use opt_level="O2".'),
    ({"master_weights": True}, ValueError, "all weights stay FP32"),
    ({"cast_model_type": torch.float16}, ValueError, 'Use opt_level="O2" to cast the model'),
    ({"patch_torch_functions": True, "opt_level": "O2"}, ValueError, "patch_torch_functions=True"),
    ({"cast_model_outputs": torch.int32}, ValueError, "cast_model_outputs=torch.int32"),
    ({"patch_scope": "thread"}, ValueError, 'ed "model" (only inside managed models) or "process"'),
    ({"overrides": ["a"]}, TypeError, "overrides=['a']"),
    ({"overrides": {"0": "floot"}}, ValueError, 'Did you mean "float"?'),
    ({"overrides": {"deco.*": "float"}}, ValueError, "no submodule matches 'deco.*'"),
    ({"overrides": {3: "float"}}, TypeError, "a module path (globs allowed)"),
    ({"overrides": {training: "float"}}, TypeError, "register_float_function"),
    ({"overrides": {torch.Tensor.add_: "float"}}, TypeError, "works in place"),
    ({"overrides": {torch.mm: "half"}, "opt_level": "O2"}, TypeError, "name.of.the.module"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_INITIALIZE)
def test_initialize_refuses_and_leaves_everything_as_it_was(arguments, kind, message):
    model, optimizer = training()
    before, own, state = snapshot(), dict(vars(optimizer)), list(model.parameters())
    with pytest.raises(kind, match=re.escape(message)):
        ampatch.initialize(model, optimizer, **arguments)
    assert changes(before, snapshot()) == []
    assert vars(optimizer) == own
    assert all(new is old for new, old in zip(model.parameters(), state, strict=True))
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_models_and_optimizers_that_do_not_fit():
    (model, optimizer), (_, foreign) = training(), training()
    module = r"models=...\): expected a torch.nn.Module.*got "
    listed = "same object is listed twice"
    own = r"none of the model's parameters. Expected an optim.*initialize\(\[\], optimizer\)"
    for error, says, *arguments in (
        (TypeError, module + ".*SGD", optimizer, model),
        (TypeError, module + "int", [model, 3], optimizer),
        (TypeError, r"optimizers=...\): expected a torch.optim.O", model, [optimizer, "adam"]),
        (ValueError, listed, [model, model], optimizer),
        (ValueError, r"initialize\(optimizers=.*" + listed, model, [optimizer, optimizer]),
        (ValueError, own, model, foreign),
    ):
        with pytest.raises(error, match=says):
            ampatch.initialize(*arguments)
    assert "step" not in vars(optimizer) and "step" not in vars(foreign)


def test_an_optimizer_that_would_leave_half_weights_as_they_are(half):
    """torch 2.13's fused SGD on the CPU, without an error."""
    with pytest.raises(ValueError, match='Use fused=False, or opt_level="O2"'):
        ampatch.initialize(*training(fused=True), opt_level="O3", dtype=half)


def test_scale_loss_before_initialize_and_with_strangers():
    (model, optimizer), (_, foreign) = training(), training()
    loss = model(torch.randn(4, 4)).sum()
    with pytest.raises(ampatch.AmpatchError, match="no ampatch session is open. Call ampatch.init"):
        ampatch.scale_loss(loss, optimizer)
    ampatch.initialize(model, optimizer)
    for arguments in (foreign, [optimizer, foreign]):
        with pytest.raises(ampatch.AmpatchError, match=r"loss\(<SGD>\): this optimizer was n"):
            ampatch.scale_loss(loss, arguments)
    with pytest.raises(ValueError, match="optimizers=.*at least one"):
        ampatch.scale_loss(loss, [])  # nothing would unscale the gradients


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss_scale": 8.0}, {"dtype": torch.bfloat16}, {"opt_level": "O0"}, {"enabled": False}],
    ids=str,
)
@pytest.mark.parametrize("is_observed", (False, True))
def test_scale_loss_without_with(settings, is_observed):
    """Of every kind of block, and training goes on as if it had not been written."""
    model, optimizer = ampatch.initialize(*training(), **settings)
    loss = model(torch.randn(4, 4)).float().square().sum()
    stop = ampatch.observe(object()) if is_observed else lambda: None
    for slip in (lambda block: block.backward(), lambda block: block.item()):
        with pytest.raises(AttributeError, match=MISSING_WITH):
            slip(ampatch.scale_loss(loss, optimizer))
    with ampatch.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    stop()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("enabled", (True, False))
def test_scale_loss_of_a_handle_without_with(enabled):
    handle, (model, optimizer) = ampatch.init(enabled=enabled), training()
    loss = model(torch.randn(4, 4)).sum()
    wrapped = handle.wrap_optimizer(optimizer)
    for block in (handle.scale_loss(loss, optimizer), wrapped.scale_loss(loss)):
        with pytest.raises(AttributeError, match=MISSING_WITH):
            block.backward()


def test_a_stranger_is_told_which_optimizers_are_managed():
    model, first = training()
    second, third = (torch.optim.Adam([param]) for param in list(model.parameters())[:2])
    ampatch.initialize(model, [first, second, third])
    foreign = torch.optim.AdamW(model.parameters())
    for call in (lambda: ampatch.scale_loss(L, foreign), lambda: ampatch.step_counts(foreign)):
        with pytest.raises(ampatch.AmpatchError, match="manages: SGD, 2 of Adam. Pass one of"):
            call()


@pytest.mark.parametrize(
    "is_there, advice",
    [
        (True, "use bfloat16: dtype=torch.bfloat16, ampatch run --dtype bfloat16 or AMPATCH_D"),
        (False, 'so are bfloat16 products on this one. For speed stay in FP32: opt_level="O0".'),
    ],
)
def test_the_warning_about_float16_on_a_cpu_is_given_once_per_process(is_there, advice, tmp_path):
    """With the advice that helps here: few CPUs have instructions for bfloat16."""
    script = tmp_path / "train.py"
    script.write_text(
        "import platform, torch, ampatch\n"
        "platform.machine = lambda: 'x86_64'\n"
        f"torch.cpu._is_amx_tile_supported = lambda: {is_there}\n"
        "torch.cpu._is_avx512_bf16_supported = lambda: False\n"
        "for level in ('O1', 'O2', 'O3'):\n"
        "    ampatch.initialize(torch.nn.Linear(2, 2), opt_level=level)\n"
        "    ampatch.deactivate()\n"
    )
    done = python(script)
    assert done.returncode == 0 and done.stderr.count("many times slower") == 1, done.stderr
    assert advice in done.stderr


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda o: ampatch.scale_loss(3.0, o), TypeError, "float. Pass the loss itself, not"),
        (lambda o: ampatch.scale_loss(None, o), TypeError, "got None"),
        (lambda o: ampatch.scale_loss(torch.tensor(3), o), TypeError, "got torch.int64"),
        (lambda o: ampatch.scale_loss(torch.tensor(1j), o), TypeError, "got torch.complex64"),
        (lambda o: ampatch.scale_loss(L, o, 2), ValueError, "numbered from 0. Call initialize("),
        (lambda o: ampatch.scale_loss(L, o, "0"), TypeError, "loss_id='0'"),
        (lambda o: ampatch.loss_scale(1), ValueError, "ampatch.loss_scale(loss_id=1)"),
        (lambda o: ampatch.set_loss_scale(-1.0), ValueError, "must be above 0 and finite"),
        (lambda o: ampatch.set_loss_scale("dynamic"), ValueError, "expected a positive number"),
        (lambda o: ampatch.unwrap(training()[0]), ampatch.AmpatchError, "use copy.deepcopy"),
        (lambda o: ampatch.load_state_dict({"a": 1}), ValueError, "expected ['loss_scaler0']"),
        (lambda o: ampatch.precision("fp8"), ValueError, 'expected "float" or "half"'),
        (lambda o: half_function(torch, "nothing_such"), AttributeError, "nothing was registered"),
        (lambda o: half_function("nodots"), ValueError, "one dotted string"),
        (lambda o: half_function(None, "conv"), TypeError, "name='conv'): expected a module or cl"),
        (lambda o: ampatch.unregister_function(torch, 3), TypeError, "(module=<module 'torch'"),
        (
            lambda o: ampatch.log_metrics(acc="high"),
            TypeError,
            "log_metrics(acc='high'): expected a",
        ),
        (
            lambda o: ampatch.log_metrics("accuracy", 0.4),
            TypeError,
            "expected numbers by name, such as ampatch.log_metrics(accuracy=0.9).",
        ),
        (
            lambda o: ampatch.scale_loss(L, training()[1]),
            ampatch.AmpatchError,
            "call optimizer = ampatch.add_optimizers(optimizer)",
        ),
        (
            lambda o: ampatch.initialize(o, training()[0]),
            TypeError,
            "got torch.optim.sgd.SGD. The model comes first, then the optimizer.",
        ),
        *(
            (call, ampatch.AmpatchError, "was not given to ampatch.initialize")
            for call in (
                lambda o: ampatch.scale_loss(L, MODEL),
                lambda o: ampatch.scale_loss(L, [MODEL]),
                lambda o: ampatch.step_was_skipped(MODEL),
                lambda o: ampatch.step_counts(MODEL),
                lambda o: ampatch.unwrap(o),
            )
        ),
        (lambda o: ampatch.master_params(None), TypeError, "master_params(optimizer=...): "),
        (
            lambda o: ampatch.initialize(MODEL, process_group="gloo"),
            TypeError,
            "expected None or a process group, such as torch.distributed.group.WORLD",
        ),
        (lambda o: ampatch.cached_weights, AttributeError, "removed in 0.2.0: "),
        (lambda o: ampatch.log_metrics(acc=None), TypeError, "of one element, got NoneType"),
        (lambda o: ampatch.log_metrics(acc=L.expand(2)), TypeError, "got torch.Tensor"),
        (lambda o: ampatch.add_optimizers(None), TypeError, "...): expected a torch.optim.Opt"),
        (lambda o: ampatch.add_optimizers([o, o]), ValueError, "the same object is listed twice"),
    ],
)
def test_the_other_calls(call, kind, message):
    ampatch.initialize(*(arguments := training()))
    with pytest.raises(kind, match=re.escape(message)):
        call(arguments[1])
    assert len(open_sessions()) == 1


@pytest.mark.parametrize("settings", [{"verbosity": 0}, {}], ids=["quiet", "another rank"])
def test_nothing_is_said_at_verbosity_zero_and_by_other_ranks(settings, caplog, monkeypatch):
    if not settings:
        monkeypatch.setenv("RANK", "1")
    caplog.set_level("DEBUG")
    ampatch.initialize(*training(), **settings)
    torch.nn.functional.binary_cross_entropy(torch.rand(3).half(), torch.rand(3).half())
    assert caplog.text == ""


def test_nothing_is_printed_and_a_message_repeats_a_few_times_at_most(caplog, capsys):
    ampatch.initialize(*training())
    for _ in range(10):
        ampatch.log.logger.warning("again and again")
    assert caplog.text.count("again and again") == 3
    ampatch.initialize(*training())  # counts anew
    ampatch.log.logger.warning("again and again")
    assert caplog.text.count("again and again") == 4
    assert capsys.readouterr().out == ""


def test_more_loss_scalers_are_advised_only_where_they_help():
    _, optimizer = ampatch.initialize(*training(), verbosity=0)
    with pytest.raises(ValueError, match=r"loss_id=-1.*numbered from 0\.$"):
        ampatch.scale_loss(L, optimizer, loss_id=-1)
