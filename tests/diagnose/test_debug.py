"""`ampatch.debug`: constructed overflows, and whether the right place is named."""

import gc
import logging
import threading
import weakref

import pytest
import torch
import torch.distributed
from small_training import Made, managed, pass_back
from torch import nn

import ampatch
from ampatch.diagnose.histogram import Histogram
from ampatch.torch_private import dispatch_modes


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.function(gradient), None


def backward_by(function) -> nn.Module:
    """Harmless forward; its backward is `function`."""
    return Made(lambda module, x: Passed.apply(x, function))


def linear(weight: float) -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def test_a_plain_model_and_what_comes_from_outside(caplog):
    model = nn.Sequential(nn.Identity(), nn.Sequential(Made(lambda module, x: torch.exp(x))))
    with ampatch.debug(model) as debugger:
        for _ in range(2):
            model(torch.tensor([1.0, 100.0]))
        report = debugger.report
        assert (report.module, report.module_class) == ("1.0", "Made")
        assert report.largest_input == 100.0
        [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "1.0 (Made)" in error.getMessage()
        debugger.reset()
        assert debugger.report is None
        model(torch.tensor([1.0, float("nan")]))
    assert debugger.report.value == "nan" and not debugger.report.input_is_finite


def test_wrong_arguments():
    with pytest.raises(ValueError, match='\'first\'.*"unabsorbed" or "any"'):
        ampatch.debug(stop_at="first")
    with pytest.raises(ValueError, match="lost=1.5"):
        Histogram().static_scale(1.5)


# What the dynamic loss scale absorbs


def debugged_steps(function, count, *, lr=0.0, stop_at="unabsorbed", **settings):
    """The debugger after `count` steps of a small model with `function` in its backward."""
    model = nn.Sequential(linear(0.5), backward_by(function), linear(0.5))
    settings = {"level": "O2", "init_scale": 2.0**10, **settings}
    model, optimizer = managed(model, dtype=torch.float16, lr=lr, **settings)
    with ampatch.debug(model, stop_at=stop_at) as debugger:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            pass_back(loss, optimizer)
            optimizer.step()
    return debugger


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_that_the_scale_absorbs_are_listed_and_no_finding(level):
    """float16 ends at 65504: 1000 times a gradient of 1 fits from scale 32 on."""
    debugger = debugged_steps(lambda gradient: gradient * 1000, 8, level=level)
    assert debugger.report is None
    assert [
        (report.step, report.loss_scale, report.value, report.at_scale_1)
        for report in debugger.passed_over
    ] == [(step, 2.0 ** (10 - step), "inf", 2000.0) for step in range(5)]
    first = debugger.passed_over[0]
    assert (first.operator, first.module, first.parameters) == ("aten.mul", "1", ["0.weight"])
    assert first.where == "gradient of the parameter 0.weight"
    assert first.largest_input == 2.0 * 2**10 and first.input_is_finite
    ampatch.deactivate()
    debugger = debugged_steps(lambda gradient: gradient * 1000, 1, level=level, stop_at="any")
    assert (debugger.report.phase, debugger.report.step, debugger.step) == ("backward", 0, 1)
    assert debugger.passed_over == [] and "0.weight" in debugger.report.parameters


@pytest.mark.parametrize(
    ("function", "settings", "at_1"),
    [
        (lambda gradient: gradient * 1000, {"loss_scale": 1024.0}, 2000.0),
        (lambda gradient: gradient * 60000, {}, 120000.0),
        (lambda gradient: gradient / 0, {}, float("inf")),
        (lambda gradient: (gradient - gradient) / 0, {}, float("inf")),
        (lambda gradient: gradient * 1000, {"min_loss_scale": 64.0}, 2000.0),
        (lambda gradient: gradient * 60000, {"init_scale": 1.0}, 120000.0),
    ],
    ids=["static", "large", "division", "nan", "floor", "scale 1"],
)
def test_what_no_scale_absorbs_is_reported_at_once(function, settings, at_1):
    debugger = debugged_steps(function, 2, **settings)
    assert (debugger.report.step, debugger.report.phase) == (0, "backward")
    assert debugger.report.at_scale_1 == at_1 and debugger.report.module == "1"
    assert debugger.passed_over == []


def test_an_operator_that_cannot_be_computed_again_is_waited_for_until_scale_1():
    def overwriting(gradient):
        return gradient.clone().mul_(60000).mul_(60000)

    debugger = debugged_steps(overwriting, 6, init_scale=8.0)
    assert [report.loss_scale for report in debugger.passed_over] == [8.0, 4.0, 2.0]
    assert (debugger.report.step, debugger.report.loss_scale) == (3, 1.0)


def test_a_pass_outside_of_a_block_has_no_scale_to_absorb():
    bomb = backward_by(lambda gradient: gradient * 60000)
    model = nn.Sequential(linear(0.5), bomb, linear(0.5))
    model, optimizer = managed(model, "O1", torch.float16)
    with ampatch.debug(model) as debugger:
        pass_back(model(torch.ones(1, 4)).sum() * 1e-6, optimizer)
        assert debugger.report is None
        model(torch.ones(1, 4)).sum().backward()
    assert debugger.report.loss_scale is None and debugger.report.phase == "backward"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_hook_that_the_script_sets_later_is_seen(level):
    model, optimizer = managed(linear(0.5), level, torch.float16, init_scale=16.0)
    with ampatch.debug(model) as debugger:
        model.weight.register_hook(lambda gradient: gradient * float("nan"))
        pass_back(model(torch.ones(1, 4)).sum(), optimizer)
    assert (debugger.report.operator, debugger.report.phase) == ("aten.mul", "backward")


def test_a_skip_that_no_backward_pass_explains_is_counted():
    model, optimizer = managed(linear(0.5), "O1", torch.float16, lr=0.0, init_scale=16.0)
    with ampatch.debug(model) as debugger:
        for factor in (1.0, float("inf"), 1.0):
            with ampatch.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled:
                scaled.backward()
                model.weight.grad.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
    assert debugger.report is None and debugger.passed_over == []
    assert debugger.unseen_skips == 1


@pytest.mark.parametrize(
    "level, weight, operator, value",
    [
        ("O1", float("nan"), "aten._to_copy", "nan"),
        ("O2", float("nan"), "aten._to_copy", "nan"),
        ("O3", float("nan"), "aten.mm", "nan"),
        ("O2", 1e6, "aten._to_copy", "inf"),
    ],
)
def test_a_weight_is_named_by_the_first_operator_that_reads_it(level, weight, operator, value):
    """At O1 and O2 that is the cast of the weights; a NaN has come from outside."""
    model, _ = managed(linear(weight), level, torch.float16)
    with ampatch.debug(model) as debugger:
        model(torch.ones(1, 4))
    report = debugger.report
    assert (report.operator, report.value) == (operator, value)
    assert report.input_is_finite == (value == "inf")
    assert value == "nan" or report.largest_input == weight


@pytest.mark.parametrize("scale, at_1", [("dynamic", None), (2.0, 2e38)])
def test_complex_gradients(scale, at_1):
    """The loss passes at this scale, the gradient of the complex weight does not."""
    model = nn.ParameterList([torch.full((2,), 1e-30 + 0j, dtype=torch.complex64)])
    model, optimizer = managed(model, "O1", torch.float16, loss_scale=scale, init_scale=2.0)
    with ampatch.debug(model) as debugger:
        pass_back((model[0] * 2e38).real.sum(), optimizer)
    assert len(debugger.passed_over) == (at_1 is None)
    report = debugger.report or debugger.passed_over[0]
    assert (report.dtype, report.phase) == (torch.complex64, "backward")
    assert report.parameters == ["0"] and report.at_scale_1 == pytest.approx(2e38, rel=1e-3)


# The operator


def of_steps(forward):
    return Made(forward, linear=nn.Linear(4, 4))


def report_of(forward, x, *, level=None, backward=False):
    model = of_steps(forward)
    if level is not None:
        ampatch.initialize(model, opt_level=level, verbosity=0)
    with ampatch.debug(model) as debugger:
        output = model(x)
        if backward:
            output.sum().backward()
    return debugger.report


def becomes_nan(module, x):
    big = torch.mm(x, x.new_full((4, 4), 300.0))
    return (big - big).view(-1).detach().softmax(0)


def two_origins(module, x):
    first = torch.exp(x * 100)
    return torch.log(x * 0) + first


def masked(module, x):
    return x.masked_fill(torch.ones(2, 4, dtype=torch.bool), float("-inf")).softmax(-1)


ONE, HUNDRED = torch.ones(2, 4), torch.full((2, 4), 200.0)
CAST = "_to_copy inf float16"
FOUND = {  # forward, input, level, operator with its value and dtype, largest input, line
    **{
        f"exp at {level}": (lambda m, x: torch.exp(x).relu() * 2 + 1, HUNDRED, level,
                            f"exp inf {dtype}", 200.0, "torch.exp(x)")
        for level, dtype in zip(("O0", "O1", "O2", "O3"), ("float32",) * 2 + ("float16",) * 2)
    },
    **{
        f"cast at {level}": (lambda m, x: m.linear(x), ONE * 1e5, level, CAST, 1e5, "")
        for level in ("O1", "O2", "O3")
    },
    **{
        f"inf and then nan at {level}": (becomes_nan, HUNDRED, level, "mm inf float16", 300.0,
                                         "torch.mm")
        for level in ("O1", "O2", "O3")
    },
    "the earlier of two": (two_origins, ONE, None, "exp inf float32", 100.0, "torch.exp"),
    "in place": (lambda m, x: x.clone().exp_(), HUNDRED, None, "exp_ inf float32", 200.0, "exp_"),
    "nan of a mask": (masked, ONE, None, "_softmax nan float32", None, "softmax(-1)"),
}  # fmt: skip


@pytest.mark.parametrize("forward, x, level, expected, largest, line", FOUND.values(), ids=FOUND)
def test_the_operator_dtype_input_and_line(forward, x, level, expected, largest, line):
    report = report_of(forward, x, level=level)
    operator, value, dtype = expected.split()
    assert (report.operator, report.value) == (f"aten.{operator}", value)
    assert report.dtype is getattr(torch, dtype)
    module = "linear" if operator == "_to_copy" else ""
    assert (report.module, report.phase, report.largest_input) == (module, "forward", largest)
    assert report.input_is_finite == (largest is not None)
    assert "test_debug.py:" in report.location and line in report.location
    assert report.operator in str(report)
    assert f"Largest finite input: {'unknown' if largest is None else f'{largest:g}'}" in str(
        report
    )


MASK = torch.tensor([[True, False, False, False]])


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x.masked_fill(MASK, float("-inf")),
        lambda m, x: (x + torch.full((4,), -torch.inf)) * 2,
        lambda m, x: torch.empty(1000).fill_(1.0) + x.sum(),
        lambda m, x: torch.log(x * 0).clamp(min=-5.0),  # it never comes out
    ],
)
def test_what_the_code_writes_itself_and_what_never_comes_out_is_no_finding(forward):
    assert report_of(forward, ONE) is None


def test_memory_that_was_never_written_is_named():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    try:
        report = report_of(lambda m, x: torch.empty(4).add_(x), torch.ones(2, 4)[0])
        assert report.operator == "aten.empty" and "torch.empty(4)" in report.location
        assert report_of(lambda m, x: torch.empty(4).copy_(x) * 2, torch.ones(4)) is None
        report = report_of(lambda m, x: torch.empty(4).copy_(x).exp_(), torch.full((4,), 100.0))
        assert report.operator == "aten.exp_" and report.input_is_finite
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("numbers_nodes", [True, False])
def test_backward_names_the_line_of_the_forward(numbers_nodes, monkeypatch):
    """Not the line where a torch does not number the nodes of its graphs."""
    if not numbers_nodes:
        monkeypatch.setattr(dispatch_modes, "running_backward_node", lambda: (False, -1))
        monkeypatch.setattr(dispatch_modes, "newest_node", lambda: -1)
        report = report_of(lambda m, x: torch.exp(x), torch.full((2, 4), 100.0))
        assert report.operator == "aten.exp"

    def forward(module, x):
        h = module.linear(x) * 0
        root = torch.sqrt(h)  # finite; its gradient is not
        return root + 1

    report = report_of(forward, torch.ones(2, 4), backward=True)
    assert report.operator == "aten.div"
    assert set(report.parameters) == {"linear.weight", "linear.bias"}
    if numbers_nodes:
        assert (report.phase, report.module) == ("backward", "")
        assert "torch.sqrt(h)" in report.location


def test_the_loss_outside_of_the_model():
    model, optimizer = managed(nn.Linear(2, 1), "O1", torch.float16)
    with ampatch.debug(model) as debugger:
        loss = torch.log(model(torch.ones(1, 2)).sum() * 0)
        pass_back(loss, optimizer)
    report = debugger.report
    assert (report.module, report.operator, report.where) == (None, "aten.log", "loss")
    assert "outside of the model" in str(report) and "torch.log(" in report.location


def test_an_optimizer_that_writes_nan_into_half_weights():
    """Adam's eps of 1e-8 is 0 in float16: 0 / 0 for a weight without gradient."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    ampatch.initialize(model, optimizer, opt_level="O3", verbosity=0)
    with ampatch.debug(model) as debugger:
        pass_back(model(torch.zeros(1, 2)).sum(), optimizer)
        optimizer.step()
    report = debugger.report
    assert (report.phase, report.module) == ("step", None)
    assert report.parameters == ["0.weight"] and report.where == "weight 0.weight"
    assert report.operator == "aten.addcdiv_" and "in the optimizer's step" in str(report)
    assert "Adam: eps=1e-08 is 0 in torch.float16" in report.advice
    assert str(report).endswith(report.advice) and "eps=0.001" in report.advice


def test_foreach_operators():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30, foreach=True)
    with ampatch.debug(model) as debugger:
        model(torch.full((1, 2), 1e30)).sum().backward()
        optimizer.step()
    assert debugger.report.phase == "step" and debugger.report.operator.startswith("aten._foreach_")


def test_every_model_is_watched_without_one():
    torch.manual_seed(0)  # the inf that goes in is no finding, the NaN of inf - inf is
    generator, critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 1))
    with ampatch.debug() as debugger:
        critic(generator(torch.ones(1, 2)) * 0).log().sum().backward()
        assert debugger.report is not None or critic[0].weight.grad.isfinite().all()
        debugger.reset()
        critic(generator(torch.full((1, 2), torch.inf)))
    assert debugger.report.module == "Sequential.0" and not debugger.report.input_is_finite


def test_what_runs_inside_a_checkpoint_is_forward():
    def forward(module, x):
        return torch.utils.checkpoint.checkpoint(
            lambda y: torch.exp(module.linear(y).abs() * 1e3), x, use_reentrant=False
        )

    report = report_of(forward, torch.full((2, 4), 1e3), backward=True)
    assert report.operator == "aten.exp" and report.phase == "forward"


def test_the_rank_is_named(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    try:
        report = report_of(lambda m, x: torch.exp(x), torch.full((2, 4), 100.0))
    finally:
        torch.distributed.destroy_process_group()
    assert report.rank == 0 and "on rank 0" in str(report)


def test_forwards_in_several_threads():
    """Those of other threads are watched by their outputs; names do not mix."""
    ready = threading.Barrier(2, timeout=30)

    def forward(module, x):
        ready.wait()
        y = torch.exp(x)
        ready.wait()
        return y

    model = nn.Sequential(nn.Sequential(of_steps(forward)))
    with ampatch.debug(model) as debugger:
        other = threading.Thread(target=model, args=(torch.full((2, 4), 100.0),))
        other.start()
        model(torch.ones(2, 4))
        other.join()
    report = debugger.report
    assert (report.module, report.operator, report.where) == ("0.0", "", "output of 0.0")
    assert report.largest_input == 100.0 and "an operator that is not visible" in str(report)


def test_nothing_is_kept_alive():
    model = of_steps(lambda module, x: torch.exp(module.linear(x) * 1e9))
    gone = weakref.ref(model)
    debugger = ampatch.debug(model)
    model(torch.ones(2, 4)).sum().backward()
    debugger.remove()
    del model
    gc.collect()
    assert gone() is None and debugger.report is not None


def test_an_exception_in_the_forward_leaves_the_names_right():
    def forward(module, x):
        if x.sum() < 0:
            raise ValueError("bad batch")
        return torch.exp(x)

    model = nn.Sequential(of_steps(forward))
    with ampatch.debug(model) as debugger:
        with pytest.raises(ValueError, match="bad batch"):
            model(-torch.ones(2, 4))
        loss = torch.log(torch.zeros(1)) * model(torch.ones(2, 4)).sum()
        assert debugger.report is None and loss.isinf()
        model(torch.full((2, 4), 100.0))
    assert debugger.report.module == "0"


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_compiled_models_run_on():
    model = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend="eager")
    with ampatch.debug(model) as debugger:
        model(torch.ones(1, 2)).sum().backward()
        assert debugger.report is None
        model(torch.full((1, 2), torch.inf))
    assert debugger.report is not None
