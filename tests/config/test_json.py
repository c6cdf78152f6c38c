"""Overrides and settings from JSON: a path, `AMPATCH_OVERRIDES`, `AMPATCH_SETTINGS`, options."""

from unittest import mock

import pytest
import torch
from torch import nn

import ampatch
from ampatch.cli import main
from ampatch.config import environment

TEXT = '{"0": "float"}'


def precisions(**settings):
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x)

    model = nn.Sequential(Seen(2, 2), Seen(2, 2))
    ampatch.initialize(model, opt_level="O2", verbosity=0, **settings)
    model(torch.ones(1, 2))
    return seen


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "overrides.json"
    path.write_text(TEXT)
    return path


MIXED = [torch.float32, torch.float16]


def test_a_path_or_its_text_names_the_file(file):
    assert precisions(overrides=file) == MIXED
    assert precisions(overrides=str(file)) == MIXED
    assert precisions(overrides=TEXT) == MIXED


@pytest.mark.parametrize("by_file", (True, False))
def test_the_variable_replaces_the_scripts_overrides_and_says_so(monkeypatch, file, by_file):
    monkeypatch.setenv("AMPATCH_OVERRIDES", str(file) if by_file else TEXT)
    observer = mock.Mock(spec=["on_replaced"])
    stop = ampatch.observe(observer)
    assert precisions(overrides={"1": "float"}) == MIXED
    stop()
    observer.on_replaced.assert_called_once_with({"overrides": ({"1": "float"}, {"0": "float"})})


def test_those_from_outside_hold_for_every_call_and_a_call_without_such_a_module_is_told(
    monkeypatch, file, caplog
):
    """A script may initialize a generator and a discriminator by themselves."""
    monkeypatch.setenv("AMPATCH_OVERRIDES", str(file))
    assert precisions() == MIXED
    other = nn.ModuleDict({"head": nn.Linear(2, 2)})
    ampatch.initialize(other, opt_level="O2")
    assert "no submodule of this initialize matches '0'" in caplog.text
    monkeypatch.delenv("AMPATCH_OVERRIDES")
    with pytest.raises(ValueError, match="no submodule matches"):
        ampatch.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0, overrides=file)


@pytest.mark.parametrize(
    "name, text, said",
    (
        ("OVERRIDES", "no/such.json", "cannot be read: No such file"),
        ("OVERRIDES", '{"0": ', "cannot be read: .*Expected a JSON file"),
        ("OVERRIDES", '{"0": 3}', "expected a JSON object of globs"),
        ("OVERRIDES", '{"0": "flaot"}', 'expected "float" or "half"'),
        ("SETTINGS", "{", "JSON object"),
        ("SETTINGS", "[1]", "JSON object"),
        ("SETTINGS", '{"batchnorm": 1}', "batchnorm"),
    ),
)
def test_what_cannot_be_read_is_refused_and_changes_nothing(monkeypatch, name, text, said):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if name == "OVERRIDES":
        with pytest.raises(ValueError, match=f"overrides.*{said}"):
            ampatch.initialize(model, opt_level="O3", verbosity=0, overrides=text)
    monkeypatch.setenv(f"AMPATCH_{name}", text)
    with pytest.raises(ValueError, match=f"AMPATCH_{name}.*{said}"):
        ampatch.initialize(model, opt_level="O3", verbosity=0)
    assert model(torch.ones(2, 2)).dtype is model[0].weight.dtype is torch.float32


def test_run_has_an_option_for_it_and_auto_refuses_it(capsys, file, tmp_path, monkeypatch):
    monkeypatch.setenv("AMPATCH_OVERRIDES", "")
    script = tmp_path / "plain.py"
    script.write_text("")
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", "--overrides", "no/such.json", str(script)])
    assert "--overrides: no/such.json: cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", "--auto", "--overrides", str(file), str(script)])
    assert "never says which module is the model" in capsys.readouterr().err


def test_named_settings_replace_the_scripts(monkeypatch):
    settings = '{"keep_batchnorm_fp32": false, "master_weights": false, "loss_scale": 8.0}'
    monkeypatch.setenv("AMPATCH_SETTINGS", settings)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    assert model[1].weight.dtype is torch.float16 and ampatch.loss_scale() == 8.0


def test_the_class_of_the_model_may_stand_in_front_as_debug_prints_it():
    for key in ("0", "Sequential.0", "Sequential#2.0", "Sequential.[0]"):
        assert precisions(overrides={key: "float"}) == MIXED
    with pytest.raises(ValueError, match="no submodule matches 'Linear.1'"):
        precisions(overrides={"Linear.1": "float"})


def test_an_override_from_outside_that_matches_nothing_ends_the_run(monkeypatch):
    """Another `initialize` may have the module: the first step decides, for its session alone."""

    def started(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ampatch.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
        return lambda: (model(torch.ones(1, 2)).sum().backward(), optimizer.step())

    monkeypatch.setenv("AMPATCH_OVERRIDES", '{"encoder.gate": "float"}')
    train = started(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="AMPATCH_OVERRIDES: 'encoder.gate' matches no submodule"):
        train()
    ampatch.deactivate()
    train = started(nn.Linear(2, 2))
    other = nn.Sequential()
    other.encoder = nn.Sequential()
    other.encoder.gate = nn.Linear(2, 2)
    started(other)()
    train()
    ampatch.deactivate()
    started(nn.Linear(2, 2))
    ampatch.deactivate()
    monkeypatch.delenv("AMPATCH_OVERRIDES")
    started(nn.Linear(2, 2))()


@pytest.mark.parametrize("name", ["AMPATCH_OPTLEVEL", "AMPATCH_LEVEL", "APMATCH_OPT_LEVEL"])
def test_a_variable_with_a_name_near_ours_is_named(name, monkeypatch):
    monkeypatch.setenv(name, "O2")
    monkeypatch.setenv("AMPATCH_TRIAL_DIR", "x")
    monkeypatch.setenv("ANOTHER", "x")
    [said] = environment.misspelt_messages()
    assert said == (
        f"The environment has {name}, which means nothing to ampatch. Did you mean "
        '"AMPATCH_OPT_LEVEL"?'
    )
