"""A model under an opt level: its hooks, and the weights that its forwards compute with.

Where to look first:

* one model and its hooks: `managed_model`, `hooks`;
* O2, half copies of FP32 weights while a forward runs: `lent_weights`, `registrations`;
* O3, weights to half and back: `conversion`;
* how inputs are cast: `io_casting`; calls of parts of a model: `submodule_calls`; steps of a
  framework around it: `steps`; parts in another precision: `module_overrides`;
* `copy.deepcopy`, pickle, `torch.save(model)`: `copies`;
* what `fully_shard` has sharded: `sharded_weights`.
"""

from typing import Any

from ..moved import moved_name


def __getattr__(name: str) -> Any:
    return moved_name(__name__, name)
