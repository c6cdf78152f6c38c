"""ignite's engines with ampatch's update functions: their arguments, metrics and checkpoints."""

import importlib.util
import warnings

import pytest
import torch
import torch.nn.functional as F
from framework_runs import batches, network, optimizer_of

import ampatch

if importlib.util.find_spec("ignite") is None:
    pytest.skip("ignite is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of what ignite imports
    from ignite.engine import Engine, Events
    from ignite.engine import supervised_training_step as in_float32
    from ignite.metrics import MeanSquaredError

    from ampatch.integrations.ignite import supervised_evaluation_step, supervised_training_step

LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def managed(level: str):
    model = network()
    settings = {"opt_level": level, "init_scale": 1024.0, "verbosity": 0}
    return ampatch.initialize(model, optimizer_of(model), **settings)


@LEVELS
def test_the_arguments_of_ignites_own_step(level):
    """Transforms, `model_fn` and `output_transform` see what they see in ignite's own."""
    arguments = {
        "prepare_batch": lambda batch, device, non_blocking: (batch[0] * 0.5, batch[1]),
        "model_fn": lambda model, x: {"logits": model(x)},
        "model_transform": lambda output: output["logits"],
        "output_transform": lambda x, y, y_pred, loss: (x.sum().item(), len(y_pred), loss.item()),
        "gradient_accumulation_steps": 3,
    }
    loader = batches()

    def outputs(step_of, model, optimizer):
        actual: list = []
        trainer = Engine(step_of(model, optimizer, F.cross_entropy, **arguments))
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: actual.append(engine.state.output)
        )
        trainer.run(loader, max_epochs=2)
        return actual

    model = network()
    expected = outputs(in_float32, model, optimizer_of(model))
    model, optimizer = managed(level)
    actual = outputs(supervised_training_step, model, optimizer)
    assert ampatch.step_counts(optimizer).taken == 2 * len(loader) // 3
    for a, b in zip(actual, expected, strict=True):
        assert a == pytest.approx(b, rel=0.02, abs=0.02)


def test_a_wrong_number_of_batches_is_refused():
    model, optimizer = managed("O1")
    with pytest.raises(ValueError, match=r"steps=0\): expected a number of batches, 1 or more"):
        supervised_training_step(model, optimizer, F.mse_loss, gradient_accumulation_steps=0)


@LEVELS
def test_metrics_get_fp32(level):
    """A sum of squares is 90,000 here: more than float16 has."""
    model = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(model.weight, 4.0)
    torch.nn.init.zeros_(model.bias)
    ampatch.initialize(model, opt_level=level, verbosity=0)
    evaluator = Engine(supervised_evaluation_step(model))
    MeanSquaredError().attach(evaluator, "error")
    data = [(torch.full((90, 8), 1.0), torch.zeros(90, 1))]
    assert evaluator.run(data).metrics["error"] == pytest.approx(32.0**2)
    assert evaluator.state.output[0].dtype is torch.float32
    pair = supervised_evaluation_step(model, model_transform=lambda y: (y.argmax(1), {"y": y}))
    classes, named = Engine(pair).run(data).output[0]
    assert classes.dtype is torch.int64 and named["y"].dtype is torch.float32
