"""What the benchmarks compare is the same work in every situation, and the situation is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bench_modules import load

import ampatch

systems, tasks, speed = load("systems"), load("tasks"), load("speed")

MODELS = ("MLP, 8 layers", "transformer, d=16", "GAN")
EAGER = [name for name in systems.SITUATIONS if name != "compile"]


@pytest.fixture(autouse=True)
def a_group_of_one(monkeypatch):
    for name, value in {**systems.ranks()[0], "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def moved(name, system, situation):
    """How far a step moves every weight."""
    torch.manual_seed(0)
    task = tasks.TASKS[name]()
    parameters = [p for module in task.modules for p in module.parameters()]
    before = [p.detach().double().clone() for p in parameters]
    try:
        systems.make_step(task, system, systems.How(situation=situation))()
        return torch.cat([(p.detach() - old).flatten() for p, old in zip(parameters, before)])
    finally:
        ampatch.deactivate()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("situation", EAGER)
@pytest.mark.parametrize("name", MODELS)
def test_o1_does_the_work_of_autocast_and_that_of_fp32(name, situation):
    ours, theirs = moved(name, "O1", situation), moved(name, systems.AUTOCAST, situation)
    plain = moved(name, systems.FP32, situation)
    assert plain.norm() > 0
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    assert (ours - plain).norm() < 0.1 * plain.norm()


def test_micro_batches_add_up():
    once, added = (moved(MODELS[0], systems.FP32, which) for which in ("plain", "accumulation"))
    assert (added - systems.MICRO_BATCHES * once).norm() < 0.01 * added.norm()


def test_a_checkpointed_layer_runs_twice():
    calls = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    forward = model[0].forward
    model[0].forward = lambda x: calls.append(x) or forward(x)
    systems.checkpointed([model])
    model(torch.randn(2, 4)).sum().backward()
    assert len(calls) == 2


def test_a_native_column_has_a_variable_of_its_own():
    assert systems.environment("O1 native") == {"AMPATCH_NATIVE": "1"}
    assert systems.environment("O1") == systems.environment("autocast") == {"AMPATCH_NATIVE": "0"}


@pytest.mark.parametrize("part", [None, object()], ids=["none", "built"])
def test_native_columns_are_there_if_the_part_is(part, monkeypatch):
    monkeypatch.setattr(systems, "native", SimpleNamespace(part=part))
    found = systems.with_native(["autocast", "O1"])
    assert found == ["autocast", "O1"] + (["O1 native"] if part else [])


@pytest.mark.parametrize("lever", speed.LEVERS)
def test_what_a_lever_takes_away_is_there(lever):
    assert all(hasattr(owner, name) for owner, name, _ in speed.LEVERS[lever])
    assert any(system.endswith(f" without {lever}") for system in speed.TABLES["levers"].systems)
