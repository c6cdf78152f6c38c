"""What an opt level and the arguments of `initialize` say stands in one place each."""

import dataclasses
import inspect

import pytest
import torch

import ampatch
from ampatch.config.opt_levels import (
    LEVELS,
    SETTING_ARGUMENTS,
    Properties,
    level_defaults,
    properties_for,
)
from ampatch.config.scale_settings import ScaleSettings

FIELDS = {field.name for field in dataclasses.fields(Properties)}
SIGNATURE = inspect.signature(ampatch.initialize).parameters


def test_every_property_is_an_argument_of_initialize():
    assert FIELDS <= SIGNATURE.keys()
    assert set(SETTING_ARGUMENTS) == FIELDS - {"opt_level", "dtype"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LEVELS)
def test_defaults_of_arguments_are_the_levels(name, dtype):
    defaults = {name: SIGNATURE[name].default for name in SETTING_ARGUMENTS}
    assert properties_for(name, dtype, **defaults) == level_defaults(name, dtype)
    assert level_defaults(name, dtype).scale_settings == ScaleSettings()
