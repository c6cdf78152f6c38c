"""Right and wrong calls of ampatch: `mypy --strict` and pyright read them, and nothing runs.

An error that is expected is marked by its comment; a comment without an error is an error too.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from typing_extensions import assert_type

import ampatch as amp
from ampatch.compat import apex as compat
from ampatch.compat.apex import amp as apex_amp
from ampatch.compat.apex.optimizers import FusedAdam
from ampatch.compat.apex.parallel.larc import LARC
from ampatch.types import OptLevel, Overrides


class Net(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x


class Critic(nn.Module):
    pass


class Standing:
    """As the optimizers of Lightning and Fabric."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)


net, critic = Net(), Critic()
sgd, adam = SGD(net.parameters(), lr=0.1), Adam(critic.parameters())
scheduler = StepLR(sgd, 30)
loss = torch.zeros(())


def models_and_optimizers(perhaps: Adam | None, any_optimizer: Optimizer) -> None:
    assert_type(amp.initialize(net), Net)
    assert_type(amp.initialize(net, sgd), tuple[Net, SGD])
    assert_type(amp.initialize(net, any_optimizer), tuple[Net, Optimizer])
    assert_type(amp.initialize(net, sgd, True, "O2"), tuple[Net, SGD])
    assert_type(
        amp.initialize((net, critic), (sgd, adam)), tuple[tuple[Net, Critic], tuple[SGD, Adam]]
    )
    assert_type(amp.initialize([net], [sgd]), tuple[list[Net], list[SGD]])
    assert_type(amp.initialize(net, perhaps), Net | tuple[Net, Adam])
    models: list[nn.Module] = [net, critic]
    optimizers: list[Optimizer] = [sgd, adam]
    assert_type(amp.initialize(models, optimizers), tuple[list[nn.Module], list[Optimizer]])
    [first, second], [one, two] = amp.initialize([net, critic], [sgd, adam], num_losses=2)
    first.train()
    second.eval()
    one.zero_grad()
    two.add_param_group({})
    nothing: list[nn.Module] = []
    amp.initialize(nothing, sgd, patch_scope="process")
    amp.initialize(net, LARC(sgd))
    amp.initialize(net, Standing(sgd))
    model, optimizer = amp.initialize(net, FusedAdam(net.parameters()))
    assert_type(optimizer, FusedAdam)
    model.encode(loss)

    amp.initialize()  # type: ignore[call-overload]
    amp.initialize(sgd, net)  # type: ignore[call-overload]
    amp.initialize(net.parameters())  # type: ignore[call-overload]
    amp.initialize(net, scheduler)  # type: ignore[call-overload]
    amp.initialize(net, (sgd, 0.1))  # type: ignore[type-var]
    # Outside its strict mode pyright takes a list of different things for a list of anything.
    amp.initialize([net, "net"], sgd)  # type: ignore[type-var]
    amp.initialize([net], [sgd, "sgd"])  # type: ignore[type-var]
    # It works: torch says that it is a function.  `net.compile()` keeps the type.
    amp.initialize(torch.compile(net), sgd)  # type: ignore[call-overload]
    _, _ = amp.initialize(net)  # type: ignore[misc]


def settings(level: OptLevel, text: str, rules: Overrides) -> None:
    amp.initialize(net, sgd, opt_level=level, overrides=rules)
    amp.initialize(
        net,
        sgd,
        enabled=False,
        opt_level="O2",
        cast_model_type=torch.float16,
        patch_torch_functions=False,
        keep_batchnorm_fp32="True",
        master_weights=True,
        loss_scale="dynamic",
        cast_model_outputs="float32",
        num_losses=2,
        verbosity=0,
        min_loss_scale=1.0,
        max_loss_scale=2**20,
        dtype=torch.bfloat16,
        overrides={"decoder.*": "float", nn.Softmax: "float", torch.bmm: "half"},
        init_scale=1024,
        growth_interval=100,
        growth_factor=2.0,
        backoff_factor=0.5,
        max_consecutive_skips=10,
        allow_banned=False,
        process_group=None,
        patch_scope="model",
    )
    amp.initialize(net, cast_model_type=False, loss_scale=128.0, dtype="bfloat16")
    amp.initialize(net, overrides=Path("tuned/overrides.json"))

    amp.initialize(net, sgd, opt_level="O6")  # type: ignore[call-overload]
    amp.initialize(net, sgd, opt_level=text)  # type: ignore[call-overload]
    amp.initialize(net, sgd, optlevel="O1")  # type: ignore[call-overload]
    amp.initialize(net, sgd, loss_scale=[128.0])  # type: ignore[call-overload]
    amp.initialize(net, sgd, dtype="float32")  # type: ignore[call-overload]
    amp.initialize(net, sgd, cast_model_type=True)  # type: ignore[call-overload]
    amp.initialize(net, sgd, keep_batchnorm_fp32="yes")  # type: ignore[call-overload]
    amp.initialize(net, sgd, num_losses="2")  # type: ignore[call-overload]
    amp.initialize(net, sgd, overrides={"decoder": "fp32"})  # type: ignore[dict-item]
    amp.initialize(net, sgd, patch_scope="global")  # type: ignore[call-overload]


def members() -> None:
    assert_type(amp.add_models(net), Net)
    assert_type(amp.add_models((net, critic), to=sgd), tuple[Net, Critic])
    assert_type(amp.add_optimizers(sgd), SGD)
    assert_type(amp.unwrap(net), Net)
    amp.deactivate()
    assert_type(amp.cache_info().hits, int)
    amp.observe(object())()
    amp.log_metrics(accuracy=0.5, loss=torch.ones(()))

    amp.add_models(sgd)  # type: ignore[type-var]
    amp.add_optimizers(net)  # type: ignore[type-var]
    amp.log_metrics(accuracy="high")  # type: ignore[arg-type]
    amp.log_metrics("accuracy", 0.5)  # type: ignore[arg-type]
    level: amp.OptLevel = "O2"
    amp.initialize(net, opt_level=level)


def one_block() -> Tensor:
    with amp.scale_loss(loss, sgd) as scaled_loss:
        assert_type(scaled_loss, Tensor)
        torch.autograd.backward(scaled_loss)
        return scaled_loss  # no path ends without a value: the block lets exceptions through


def loop(perhaps: Tensor | None) -> None:
    with amp.scale_loss(loss, [sgd, adam], loss_id=1, delay_unscale=True) as scaled_loss:
        torch.autograd.backward(scaled_loss)
    amp.scale_loss(loss, (sgd, Standing(sgd)), model=net)
    assert_type(amp.master_params(sgd), Iterator[Tensor])
    nn.utils.clip_grad_norm_(amp.master_params(sgd), 1.0)
    assert_type(amp.step_was_skipped(sgd), bool)
    assert_type(amp.step_counts(sgd).taken, int)
    assert_type(amp.loss_scale(), float)
    assert_type(amp.loss_scale_settings()["init_scale"], float)
    amp.set_loss_scale(128)
    amp.set_loss_scale_settings(growth_interval=100, min_loss_scale=1.0)
    torch.save(amp.state_dict(of=net), "scales.pt")
    amp.load_state_dict(torch.load("scales.pt"), of=sgd)

    amp.scale_loss(loss)  # type: ignore[call-arg]
    amp.scale_loss(0.5, sgd)  # type: ignore[arg-type]
    amp.scale_loss(perhaps, sgd)  # type: ignore[arg-type]
    amp.scale_loss(loss, net)  # type: ignore[arg-type]
    amp.scale_loss(loss, sgd, loss_id="first")  # type: ignore[arg-type]
    amp.master_params(net)  # type: ignore[arg-type]
    amp.set_loss_scale_settings(growth=2.0)  # type: ignore[call-arg]
    amp.load_state_dict([1.0])  # type: ignore[arg-type]


@amp.half_function
def attend(q: Tensor, k: Tensor, *, scale: float = 1.0) -> Tensor:
    return q @ k * scale


@amp.disable_casts()
def exact(x: Tensor) -> tuple[Tensor, int]:
    return x, 1


@amp.float_function
class Exponential(torch.autograd.Function):
    @staticmethod
    def half_life(x: Tensor) -> float:
        return 0.5


class Layer(nn.Module):
    @amp.promote_function
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    @amp.float_function
    def below(x: Tensor) -> Tensor:
        return x

    @amp.float_function
    @staticmethod
    def above(x: Tensor) -> Tensor:
        return x


def decorated() -> None:
    assert_type(attend(loss, loss, scale=2.0), Tensor)
    assert_type(exact(loss), tuple[Tensor, int])
    assert_type(Exponential.half_life(loss), float)
    assert_type(Layer().forward(loss, loss), Tensor)
    assert_type(Layer.below(loss), Tensor)
    assert_type(Layer.above(loss), Tensor)
    amp.register_half_function(torch.nn.functional, "linear")
    amp.register_float_function("package.module.function")
    amp.register_promote_function(Net, "encode")
    amp.unregister_function("package.module.function")

    attend(loss)  # type: ignore[call-arg]
    attend(loss, loss, scale="big")  # type: ignore[arg-type]
    Layer().forward(loss)  # type: ignore[call-arg]
    Layer.below(1)  # type: ignore[arg-type]
    amp.half_function(3)  # type: ignore[type-var]
    amp.precision("double")  # type: ignore[arg-type]
    amp.register_half_function(3, "linear")  # type: ignore[arg-type]


def blocks(stack: contextlib.ExitStack) -> Tensor:
    stack.enter_context(amp.precision("float"))
    with amp.disable_casts(), amp.precision("half"):
        return loss


def diagnostics() -> None:
    with amp.debug(net, stop_at="any") as debugger:
        debugger.reset()
    with amp.report(net) as casts, amp.gradient_range(net) as gradients:
        assert_type(casts.as_dict(), dict[str, Any])
        gradients.report(lost=0.01)

    amp.debug(sgd)  # type: ignore[arg-type]
    amp.debug(net, stop_at="all")  # type: ignore[arg-type]
    amp.report("net")  # type: ignore[arg-type]
    amp.gradient_range(sgd)  # type: ignore[arg-type]


def oldest() -> None:
    handle = amp.init(loss_scale=128.0)
    wrapped = handle.wrap_optimizer(sgd)
    with wrapped.scale_loss(loss) as scaled_loss, handle.scale_loss(loss, sgd) as other:
        assert_type((scaled_loss, other), tuple[Tensor, Tensor])

    amp.init(level="O1")  # type: ignore[call-arg]
    handle.wrap_optimizer(net)  # type: ignore[arg-type]


def of_apex() -> None:
    compat.install()
    assert_type(
        apex_amp.initialize(net, sgd, opt_level="O2", loss_scale="dynamic"), tuple[Net, SGD]
    )
    with apex_amp.scale_loss(loss, sgd) as scaled_loss:
        assert_type(scaled_loss, Tensor)
    compat.uninstall()

    apex_amp.initialize(net, sgd, opt_level="O7")  # type: ignore[call-overload]
    apex_amp.initialize(net, sgd, overrides={})  # type: ignore[call-overload]
    apex_amp.scale_loss(loss, net)  # type: ignore[arg-type]
