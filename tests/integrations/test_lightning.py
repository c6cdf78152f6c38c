"""The precision plugin of Lightning's Trainer, beside FP32 and Lightning's own mixed precision."""

import logging
import pickle
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from framework_runs import BATCH, dataset, network, optimizer_of
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

import ampatch
from ampatch.integrations.lightning import AmpatchFabricPrecision, AmpatchPrecision

pl = lightning.pytorch
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


pytestmark = [  # Lightning's, about itself and small data
    pytest.mark.filterwarnings(f"ignore:.*{message}")
    for message in ("LeafSpec", "does not have many workers", "should be consumed")
]


@pytest.fixture(autouse=True)
def quiet(caplog):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        caplog.set_level(logging.ERROR, name)


def module_class(package: Any = pl) -> Any:
    class Training(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.losses: list[float] = []
            self.seen: list[Any] = []

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            return F.cross_entropy(self.net(inputs), targets)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if outputs:
                self.losses.append(outputs["loss"].item())

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

    return Training


Training = module_class()


def loader() -> DataLoader:
    return DataLoader(dataset(), batch_size=BATCH)


def trainer(plugin: Any = None, package: Any = pl, **settings: Any) -> Any:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {"max_epochs": 1, **dict.fromkeys(quiet, False), **settings}
    if plugin is not None:
        settings["plugins"] = [plugin]
    return package.Trainer(accelerator="cpu", devices=1, **settings)


def amp(level: str = "O2", dtype: str = "float16", **settings: Any) -> AmpatchPrecision:
    return AmpatchPrecision(level, dtype, **{"init_scale": 1024.0, "verbosity": 0, **settings})


def fit(plugin: Any = None, kind: Any = None, **settings: Any) -> Any:
    module = (kind or Training)()
    trainer(plugin, **settings).fit(module, loader())
    return module


def assert_near(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
def test_trainers_of_both_packages_clip(package):
    """A plugin of the wrong package would leave gradients as they are, without a word."""

    class Clipped(module_class(package)):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.seen.append(torch.stack([grad.norm() for grad in grads]).norm() if grads else 0)

    module = Clipped()
    trainer(amp(), package, gradient_clip_val=0.01).fit(module, loader())
    assert 0.009 < max(module.seen) < 0.011


@pytest.mark.parametrize("by", ["self", "net"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_products_are_half_and_losses_are_not(level, by):
    class Seen(Training):
        def forward(self, inputs: Any) -> Any:
            return self.net(inputs)

        def training_step(self, batch: Any, index: int) -> Any:
            outputs = self.net(batch[0]) if by == "net" else self(batch[0])
            loss = F.cross_entropy(outputs, batch[1])
            self.seen.append(loss.dtype)
            return loss

        validation_step = predict_step = training_step

    inside: list[torch.dtype] = []
    module = Seen()
    module.net[0].register_forward_hook(lambda layer, args, out: inside.append(out.dtype))
    runs = trainer(amp(level, "bfloat16"), limit_val_batches=1, num_sanity_val_steps=0)
    runs.fit(module, loader(), loader())
    runs.predict(module, loader())
    assert inside == [torch.bfloat16] * (16 + 1 + 16)
    assert module.seen == [torch.float32] * (16 + 1 + 16)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


@LEVELS
def test_hooks_see_unscaled_gradients_and_losses_and_clip(level):
    class Hooks(Training):
        def on_before_backward(self, loss: Any) -> None:
            self.seen.append(loss.item())

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = lightning.pytorch.utilities.grad_norm(self.net, 2)
            self.seen.append(norms["grad_2.0_norm_total"])

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            nn.utils.clip_grad_value_(self.parameters(), 0.05)

    actual, expected = fit(amp(level), Hooks), fit(None, Hooks)
    assert_near(actual.seen, expected.seen)
    assert_near(actual.losses, expected.losses)


class TwoOptimizers(Training):
    """Manual optimization, toggled, with closures and without."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Linear(3, 3)

    def training_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = F.cross_entropy(self.net(inputs), targets)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)

        def closure() -> Any:
            loss = F.mse_loss(self.scale(self.net(inputs)), F.one_hot(targets, 3).float())
            second.zero_grad()
            self.manual_backward(loss)
            return loss

        with second.toggle_model():
            loss = second.step(closure)
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [optimizer_of(self.net), torch.optim.Adam(self.scale.parameters(), 0.01)]


@LEVELS
def test_manual_optimization_of_two_optimizers(level):
    assert_near(fit(amp(level), TwoOptimizers).losses, fit(None, TwoOptimizers).losses)


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Own])
def test_optimizers_that_call_their_closure(kind):
    class Owned(Training):
        def configure_optimizers(self) -> Any:
            more = {} if kind is Own else {"max_iter": 3}
            return kind(self.net.parameters(), lr=0.05, **more)

    def losses(plugin: Any) -> Any:
        return fit(plugin, Owned, limit_train_batches=4).losses

    expected = losses(None)
    assert_near(losses(amp(loss_scale=128.0)), expected)
    if kind is Own:  # it steps after its closure
        assert_near(losses(amp()), expected)
    else:
        with pytest.raises(ampatch.AmpatchError, match="under a dynamic loss scale"):
            losses(amp())


def test_schedulers_count_skipped_steps_as_with_lightnings_16_mixed():
    class Scheduled(Training):
        def on_train_batch_end(self, *args: Any) -> None:
            optimizer = self.optimizers()
            self.seen.append((optimizer.param_groups[0]["lr"], ampatch.step_counts(optimizer)))

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.net)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Scheduled()
    runs = trainer(amp(init_scale=2.0**24), limit_train_batches=12)
    runs.fit(module, loader())
    rate, counts = module.seen[-1]
    assert counts.skipped > 3
    assert rate == 0.05 * 0.5 ** (counts.taken + counts.skipped)
    assert runs.global_step == counts.taken + counts.skipped  # as with Lightning's own "16-mixed"


def test_a_second_fit_goes_on_with_the_loss_scale_and_nothing_is_left_behind():
    module, plugin = Training(), amp(init_scale=2.0**24)
    trainer(plugin, limit_train_batches=12).fit(module, loader())
    (scale,) = (entry["loss_scale"] for entry in plugin.state_dict().values())
    assert scale < 2.0**24
    assert type(next(module.parameters())) is nn.Parameter
    trainer(plugin, limit_train_batches=1).fit(module, loader())
    assert plugin.state_dict()["loss_scaler0"]["loss_scale"] == scale
    with pytest.raises(ampatch.AmpatchError, match="no ampatch session"):
        ampatch.loss_scale()


def test_an_exception_leaves_plain_weights_with_the_masters_values():
    class Fails(Training):
        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                self.seen.append({key: value.clone() for key, value in self.state_dict().items()})
                raise RuntimeError("the script's own")

    module = Fails()
    with pytest.raises(RuntimeError, match="own"):
        trainer(amp()).fit(module, loader())
    [seen] = module.seen
    assert all(torch.equal(value, seen[key]) for key, value in module.state_dict().items())
    assert not torch.equal(module.net[0].weight, module.net[0].weight.half().float())
    with pytest.raises(ampatch.AmpatchError, match="no ampatch session"):
        ampatch.loss_scale()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_prediction_and_frozen_weights_round_no_weight_but_at_o3(level):
    """O3 converts the weights; what was rounded stays so when the module is FP32 again."""

    class Frozen(Training):
        def predict_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            self.net[0].requires_grad_(False)
            return torch.optim.SGD(self.net[3].parameters(), 0.1)

    module = Frozen()
    expected = {name: value.detach().clone() for name, value in module.net.named_parameters()}
    if level == "O3":
        expected = {name: value.half().float() for name, value in expected.items()}
    trainer(amp(level)).predict(module, loader())
    for name, value in module.net.named_parameters():
        assert value.dtype is torch.float32 and torch.equal(value, expected[name]), name
    trainer(amp(level)).fit(module, loader())
    assert torch.equal(module.net[0].weight, expected["0.weight"])
    assert not torch.equal(module.net[3].weight, expected["3.weight"])


AVERAGES: dict[str, Any] = {
    "SWA": lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)
}
if hasattr(pl.callbacks, "EMAWeightAveraging"):  # since 2.6
    AVERAGES["EMA"] = lambda: pl.callbacks.EMAWeightAveraging(decay=0.9)


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_are_of_float32_weights(name):
    class Validated(Training):
        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(F.cross_entropy(self.net(batch[0]), batch[1]).item())

    def run(plugin: Any) -> Any:
        module, average = Validated(), AVERAGES[name]()
        runs = trainer(plugin, callbacks=[average], max_epochs=3, limit_train_batches=4)
        runs.fit(module, loader(), loader())
        return module

    module, expected = run(amp("O2", "bfloat16")), run(None)
    assert_near(module.seen, expected.seen)
    for value, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, atol=0.02, rtol=0)
    assert not torch.equal(module.net[0].weight, module.net[0].weight.bfloat16().float())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's
@LEVELS
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_modules(level, whole):
    def run(plugin: Any) -> Any:
        module = Training()
        if not whole:
            module.net = torch.compile(module.net, backend="eager")
        fitted = torch.compile(module, backend="eager") if whole else module
        trainer(plugin, limit_train_batches=3).fit(fitted, loader())
        return module.losses

    torch._dynamo.reset()
    assert_near(run(amp(level)), fit(None, limit_train_batches=3).losses)


def test_settings_are_refused_when_the_plugin_is_made():
    with pytest.raises(TypeError, match='AmpatchPrecision.*unknown setting.*"init_scale"'):
        AmpatchPrecision(init_scal=2.0)
    with pytest.raises(ValueError, match="opt_level"):
        AmpatchPrecision("O7")
    with pytest.raises(ValueError, match=r"precision=16-mixed.*AmpatchPrecision\(opt_level='O2'"):
        trainer(amp(), precision="16-mixed")
    with pytest.raises(ValueError, match=r"precision=16-mixed.*AmpatchFabricPrecision"):
        Fabric(accelerator="cpu", precision="16-mixed", plugins=[AmpatchFabricPrecision()])


def test_trainer_and_fabric_name_the_plugin_that_is_for_them():
    net = network()
    with pytest.raises(TypeError, match="Fabric.*AmpatchFabricPrecision"):
        Fabric(accelerator="cpu", plugins=[amp()]).setup(net)
    assert type(next(net.parameters())) is nn.Parameter
    with pytest.raises(Exception, match="AmpatchFabricPrecision"):
        trainer(AmpatchFabricPrecision())


def fabric_of(init_scale: float = 1024.0) -> tuple[Fabric, AmpatchFabricPrecision]:
    plugin = AmpatchFabricPrecision("O2", init_scale=init_scale, verbosity=0)
    return Fabric(accelerator="cpu", devices=1, plugins=[plugin]), plugin


def test_modules_of_one_fabric_share_a_loss_scale():
    body, head = nn.Linear(8, 16), nn.Linear(16, 3)
    fabric, plugin = fabric_of()
    outer, first = fabric.setup(body, torch.optim.SGD(body.parameters(), 0.1))
    two = fabric.setup_module(head)
    second = fabric.setup_optimizers(torch.optim.SGD(two.parameters(), 0.1))
    inputs, targets = next(iter(loader()))
    fabric.backward(F.cross_entropy(two(outer(inputs)), targets))
    grads = [p.grad.clone() for p in (*body.parameters(), *head.parameters())]
    fabric.backward(F.cross_entropy(two(outer(inputs)), targets) * 1e38)  # both overflow, once
    for optimizer in (first, second):
        optimizer.step()
        assert ampatch.step_was_skipped(optimizer)
    assert plugin.state_dict()["loss_scaler0"]["loss_scale"] == 512.0
    ampatch.deactivate()
    expected = F.cross_entropy(head(body(inputs)), targets)
    wanted = torch.autograd.grad(expected, (*body.parameters(), *head.parameters()))
    torch.testing.assert_close(grads, list(wanted), atol=1e-3, rtol=1e-2)


def test_modules_of_an_earlier_plugin_join_the_later_one():
    """As when a notebook's cell runs again; every cell's plugin begins its loss scale anew."""
    nets = [network(), network()]
    for scale in (1024.0, 512.0):
        fabric, plugin = fabric_of(scale)
        models = [fabric.setup(net, optimizer_of(net))[0] for net in nets]
    assert plugin.state_dict()["loss_scaler0"]["loss_scale"] == 512.0
    assert ampatch.state_dict(of=nets[0]) == ampatch.state_dict(of=nets[1]) == plugin.state_dict()
    inputs, _ = next(iter(loader()))
    seen = []
    for net in nets:
        net[0].register_forward_hook(lambda layer, *call: seen.append(layer.weight.dtype))
    assert {model(inputs).dtype for model in models} == {torch.float32}
    assert seen == [torch.float16] * 2


def test_a_fabric_sets_up_again_after_deactivate_and_a_copied_plugin_is_told_too():
    """The copy is that of a process which Fabric starts."""
    plugin = fabric_of()[1]
    seen: list[torch.dtype] = []
    for own in (plugin, plugin, pickle.loads(pickle.dumps(plugin))):
        fabric, net = Fabric(accelerator="cpu", devices=1, plugins=[own]), network()
        optimizer = fabric.setup(net, optimizer_of(net))[1]
        assert next(ampatch.master_params(optimizer)) is net[0].weight
        net[0].register_forward_hook(lambda layer, *call: seen.append(layer.weight.dtype))
        net(next(iter(loader()))[0])
        assert seen.pop() is torch.float16
        ampatch.deactivate()
    net = network()  # a Fabric without the plugin
    optimizer = Fabric(accelerator="cpu", devices=1).setup(net, optimizer_of(net))[1]
    with pytest.raises(ampatch.AmpatchError):
        ampatch.step_counts(optimizer)
