"""`AMPATCH_SETTINGS`: what it names replaces what the script gives to `initialize`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampatch


def test_named_settings_replace_the_scripts(monkeypatch):
    settings = '{"keep_batchnorm_fp32": false, "master_weights": false, "loss_scale": 8.0}'
    monkeypatch.setenv("AMPATCH_SETTINGS", settings)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampatch.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    assert model[1].weight.dtype is torch.float16 and ampatch.loss_scale() == 8.0


@pytest.mark.parametrize(
    "text, said", [("{", "JSON object"), ("[1]", "JSON object"), ('{"batchnorm": 1}', "batchnorm")]
)
def test_a_wrong_one_is_named_and_changes_nothing(monkeypatch, text, said):
    monkeypatch.setenv("AMPATCH_SETTINGS", text)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"AMPATCH_SETTINGS.*{said}"):
        ampatch.initialize(model, opt_level="O2", verbosity=0)
    assert model.weight.dtype is torch.float32
