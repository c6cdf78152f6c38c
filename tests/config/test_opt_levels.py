"""What an opt level and the arguments of `initialize` say stands in one place each."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import ampatch
from ampatch.config.opt_levels import ARGUMENTS, LEVELS, Properties, level, properties_for
from ampatch.config.scale_settings import ScaleSettings

FIELDS = {field.name: field.default for field in dataclasses.fields(Properties)}
SIGNATURE = inspect.signature(ampatch.initialize).parameters


def test_every_property_is_an_argument_of_initialize():
    assert FIELDS.keys() <= SIGNATURE.keys()
    assert set(ARGUMENTS) == FIELDS.keys() - {"opt_level", "dtype"}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_the_defaults_of_the_properties(name):
    """None means: as the opt level says."""
    default = SIGNATURE[name].default
    assert default is None or default == FIELDS[name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LEVELS)
def test_defaults_are_the_levels(name, dtype):
    defaults = {name: SIGNATURE[name].default for name in ARGUMENTS}
    assert properties_for(name, dtype, **defaults) == level(name, dtype)
    assert level(name, dtype).scale_settings == ScaleSettings()
