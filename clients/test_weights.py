"""Libraries that hold, average, exchange or prune weights, by their own code, at O0 to O2.

Each program runs in FP32, under torch.autocast with GradScaler, and at each level.  Its numbers are
FP32's at O0; at O1 and O2 as near to FP32's as torch.amp's are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_task import CLASSES, DATASET, network
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ampatch

if torch.version.cuda is None:  # see test_timm.py
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

SCALE = 64.0
Loss = Callable[[], Tensor]


class Way:
    """How a program trains: in FP32, by torch.amp, or at an opt level."""

    def __init__(self, name: str, half: torch.dtype, **settings: Any) -> None:
        self.name, self.half, self.settings = name, half, {"init_scale": SCALE, **settings}
        is_scaled = half is torch.float16 and "loss_scale" not in settings
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=is_scaled)

    def start(self, model: nn.Module | list[nn.Module], *optimizers: Any) -> None:
        self.optimizer = optimizers[0] if optimizers else None
        if self.name.startswith("O"):
            options = {"opt_level": self.name, "dtype": self.half, "verbosity": 0}
            ampatch.initialize(model, list(optimizers), **options, **self.settings)

    def forward(self, call: Callable[[], Any]) -> Any:
        if self.name != "amp":  # a region that is off would be an island without casts
            return call()
        with torch.autocast("cpu", self.half):
            return call()

    def step(self, loss: Loss, **options: Any) -> None:
        self.optimizer.zero_grad()
        value = self.forward(loss)
        if self.name == "FP32":
            value.backward(**options)
            self.optimizer.step()
        elif self.name == "amp":
            self.scaler.scale(value).backward(**options)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            with ampatch.scale_loss(value, self.optimizer) as scaled:
                scaled.backward(**options)
            self.optimizer.step()


def numbers(program: Callable[[Way], Any], name: str, half: torch.dtype, **settings: Any) -> Tensor:
    torch.manual_seed(0)
    try:
        found = program(Way(name, half, **settings))
        return torch.cat([value.detach().float().flatten().clone() for value in found])
    finally:
        ampatch.deactivate()


def check(program: Callable[[Way], Any], half: torch.dtype, within: float, **settings: Any) -> None:
    """Right at each level: FP32's bits at O0, near its numbers at O1 and O2, and not FP32's."""
    exact = numbers(program, "FP32", half)
    assert exact.isfinite().all()
    assert torch.equal(numbers(program, "O0", half, **settings), exact)
    allowed = within * (1 if half is torch.float16 else 8)
    for name in ("amp", "O1", "O2"):
        found = numbers(program, name, half, **settings)
        apart = float((found - exact).norm() / exact.norm())
        assert 0 < apart < allowed, f"{name}: {apart}"


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [*DataLoader(DATASET, batch_size=16)][:count]


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def train(way: Way, model: nn.Module, then: Callable[[], Any] = lambda: None) -> None:
    for x, y in batches():
        way.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        then()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def half(request) -> torch.dtype:
    return request.param


# Averages


def ema_pytorch(model):
    from ema_pytorch import EMA

    average = EMA(model, beta=0.75, update_after_step=0, update_every=1)
    return average.update, lambda: average.ema_model.parameters()


def torch_ema(model):
    """`average_parameters` puts the averages into the model and takes them out again."""
    from torch_ema import ExponentialMovingAverage

    average = ExponentialMovingAverage(model.parameters(), decay=0.75)

    def read():
        with average.average_parameters():
            return [copy.deepcopy(p) for p in model.parameters()]

    return average.update, read


def diffusers(model, foreach=False):
    from diffusers.training_utils import EMAModel

    average = EMAModel(model.parameters(), decay=0.75, use_ema_warmup=True, foreach=foreach)

    def read():
        average.store(model.parameters())
        average.copy_to(model.parameters())
        found = [copy.deepcopy(p) for p in model.parameters()]
        average.restore(model.parameters())
        return found

    return lambda: average.step(model.parameters()), read


def timm(model, foreach=True):
    from timm.utils import ModelEmaV3

    average = ModelEmaV3(model, decay=0.75, foreach=foreach)
    return lambda: average.update(model), lambda: average.module.parameters()


AVERAGES = {
    "ema-pytorch": ema_pytorch,
    "torch_ema": torch_ema,
    "diffusers": diffusers,
    "diffusers foreach": lambda model: diffusers(model, foreach=True),
    "timm": timm,
    "timm one by one": lambda model: timm(model, foreach=False),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages(name, when, half):
    """Made before `initialize` or after; read, and the training goes on."""

    def program(way):
        model = network()
        optimizer = sgd(model)
        made = AVERAGES[name](model) if when == "before" else None
        way.start(model, optimizer)
        update, read = made or AVERAGES[name](model)
        train(way, model, update)
        mean = list(read())
        train(way, model, update)
        return [*mean, *read(), *model.parameters()]

    check(program, half, within=2e-3)


# Gradients and optimizers of their own


def test_higher(half):
    """Its model for an inner loop is one of its own, which is not managed: it computes in FP32."""
    import higher

    def program(way):
        model = plain()
        way.start(model, sgd(model))
        inner = sgd(model, 0.2)
        for (x, y), (u, v) in zip(batches(6)[::2], batches(6)[1::2], strict=True):

            def loss(x=x, y=y, u=u, v=v):
                with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (fast, by):
                    by.step(F.cross_entropy(fast(x), y))
                    return F.cross_entropy(fast(u), v)

            way.step(loss)
        return model.parameters()

    exact = numbers(program, "FP32", half)
    for level in ("O0", "O1", "O2"):
        assert torch.equal(numbers(program, level, half), exact)


@pytest.mark.parametrize("first", ["opacus", "initialize"])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_opacus(mode, first, half):
    """It clips each sample's gradient where it stands, so the loss may not be scaled."""
    from opacus import PrivacyEngine

    def program(way):
        model = plain()
        optimizer = sgd(model)
        if first == "initialize":
            way.start(model, optimizer)
        private, stepper, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(DATASET, batch_size=16),
            noise_multiplier=1e-4,
            max_grad_norm=1.0,
            poisson_sampling=False,
            noise_generator=torch.Generator().manual_seed(0),
            grad_sample_mode=mode,
        )
        if first == "opacus":
            way.start(private, stepper)
        for x, y in loader:
            stepper.zero_grad()
            value = way.forward(lambda x=x, y=y: F.cross_entropy(private(x), y))
            if way.name.startswith("O"):
                with ampatch.scale_loss(value, way.optimizer) as scaled:
                    scaled.backward()
            else:
                value.backward()
            stepper.step()
        return model.parameters()

    check(program, half, within=1e-3, loss_scale=1.0)


def test_adahessian(half):
    """It takes gradients of gradients over `param_groups`."""
    from torch_optimizer import Adahessian

    def program(way):
        model = plain()
        optimizer = Adahessian(model.parameters(), lr=0.05, seed=0)
        way.start(model, optimizer)
        for x, y in batches():
            way.step(lambda x=x, y=y: F.cross_entropy(model(x), y), create_graph=True)
        model.zero_grad()
        return model.parameters()

    exact, amp = numbers(program, "FP32", half), numbers(program, "amp", half)
    assert torch.equal(numbers(program, "O0", half), exact)
    for level in ("O1", "O2"):
        apart = (numbers(program, level, half) - amp).norm() / exact.norm()
        assert apart < (2e-2 if half is torch.float16 else 0.1)


def test_torch_pruning(half):
    """It exchanges layers' parameters for smaller ones, in a model that trains."""
    import torch_pruning

    def program(way):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        model.extend([nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES)])
        way.start(model, sgd(model))
        train(way, model)
        size = torch_pruning.importance.MagnitudeImportance(p=2)
        options = {"importance": size, "pruning_ratio": 0.5, "ignored_layers": [model[5]]}
        torch_pruning.pruner.MagnitudePruner(model, batches(1)[0][0], **options).step()
        way.optimizer = sgd(model)
        if way.name.startswith("O"):
            ampatch.add_optimizers(way.optimizer)
        train(way, model)
        assert model[0].weight.shape == (8, 8) and model[3].weight.shape == (8, 8)
        return model.parameters()

    check(program, half, within=2e-3)


# Models of other kinds


class AutoEncoder(nn.Module):
    """A model and a guide whose networks Pyro registers in its parameter store."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 8))

    def model(self, x):
        import pyro
        from pyro.distributions import Normal

        pyro.module("decoder", self.decoder)
        with pyro.plate("rows", len(x)):
            origin = torch.zeros(len(x), 2)
            code = pyro.sample("code", Normal(origin, torch.ones(len(x), 2)).to_event(1))
            pyro.sample("x", Normal(self.decoder(code).float(), 0.5).to_event(1), obs=x)

    def guide(self, x):
        import pyro
        from pyro.distributions import Normal

        pyro.module("encoder", self.encoder)
        with pyro.plate("rows", len(x)):
            mean, log_scale = self.encoder(x).float().chunk(2, -1)
            pyro.sample("code", Normal(mean, log_scale.exp()).to_event(1))


@pytest.mark.parametrize("loop", ["SVI.step", "own"])
def test_pyro_with_a_guide(loop, half):
    import pyro
    from pyro.infer import SVI, Trace_ELBO

    def program(way):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        both = AutoEncoder()
        if loop == "own":
            way.start(both, torch.optim.Adam(both.parameters(), lr=0.01))
            loss = Trace_ELBO().differentiable_loss
            for x, _ in batches():
                way.step(lambda x=x: loss(both.model, both.guide, x) / 16)
        else:
            way.start(both)
            inference = SVI(both.model, both.guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
            for x, _ in batches():
                way.forward(lambda x=x: inference.step(x))
        return both.parameters()

    check(program, half, within=2e-3)


def test_pyro_with_a_sampled_weight(half):
    """A `PyroSample` is no parameter: FP32 meets the half inputs of its layer, and it is said."""
    import pyro
    from pyro.distributions import Normal
    from pyro.nn import PyroModule, PyroSample

    pyro.clear_param_store()
    model = PyroModule[nn.Sequential](PyroModule[nn.Linear](8, 4), PyroModule[nn.Linear](4, 3))
    model[1].weight = PyroSample(Normal(0.0, 1.0).expand([3, 4]).to_event(2))
    ampatch.initialize(model, opt_level="O2", dtype=half, verbosity=0)
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(batches(1)[0][0])
    assert "ampatch" in caught.value.__notes__[0] and "overrides" in caught.value.__notes__[0]


def test_gpytorch_with_a_deep_kernel(half):
    import gpytorch

    torch.manual_seed(0)
    inputs = torch.rand(40, 8)
    targets = inputs.sum(-1).sin()

    class DeepKernel(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(inputs, targets, likelihood)
            torch.manual_seed(0)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.features = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

        def forward(self, x):
            found = self.features(x).float()
            return gpytorch.distributions.MultivariateNormal(self.mean(found), self.kernel(found))

    def program(way):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = DeepKernel(likelihood).train()
        way.start(model, torch.optim.Adam(model.parameters(), lr=0.01))
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        for _ in range(5):
            way.step(lambda: -evidence(model(inputs), targets))
        model.eval()
        with torch.no_grad():
            return [*model.parameters(), way.forward(lambda: likelihood(model(inputs[:5]))).mean]

    check(program, half, within=4e-2)


class Solved(nn.Module):
    """A network that is the right side of a differential equation, and a head."""

    def __init__(self, adjoint):
        super().__init__()
        torch.manual_seed(0)
        self.slope = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.flow, self.head, self.adjoint = Flow(self.slope), nn.Linear(8, CLASSES), adjoint

    def forward(self, x):
        import torchdiffeq

        solve = torchdiffeq.odeint_adjoint if self.adjoint else torchdiffeq.odeint
        times = torch.tensor([0.0, 1.0])
        return self.head(solve(self.flow, x, times, method="rk4", options={"step_size": 0.25})[-1])


class Flow(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, time, x):
        return self.slope(x)


@pytest.mark.parametrize("adjoint", [False, True])
def test_torchdiffeq(adjoint, half):
    """The adjoint solver calls the model again in the backward pass."""

    def program(way):
        model = Solved(adjoint)
        way.start(model, sgd(model))
        train(way, model)
        return model.parameters()

    check(program, half, within=2e-3)
