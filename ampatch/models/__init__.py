"""A model under an opt level: its conversion, hooks, copies and state dicts.

Where to look first:

* one model and its hooks: `managed_model`, `hooks`; weights to half and back: `conversion`;
* half copies during a forward, behind a switch: `lent_weights`, `registrations`;
* how inputs are cast: `io_casting`; calls of parts of a model: `submodule_calls`; steps of a
  framework around it: `steps`; parts in another precision: `module_overrides`;
* `copy.deepcopy`, pickle, `torch.save(model)`: `copies`, `plain_parameters`;
* `state_dict()`: `state_dicts`; the FP32 values that checkpoints and copies get: `float_values`,
  `float_copies`;
* what `fully_shard` has sharded: `sharded_weights`.
"""

from typing import Any

from ..moved import moved_name


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
