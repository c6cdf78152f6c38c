"""What a script calls: the public functions, thin and without state.

Where to look first:

* `initialize`, `deactivate`, observers: `initialize`;
* `scale_loss`, `master_params`, state dicts, functions that read scale and skips: `training`;
* decorators, registrations, `disable_casts`, `precision`: `casting`;
* `init`, apex's oldest API: `legacy_init`;
* the checked settings of one `initialize`: `plan`; which models and optimizers are refused (DDP too
  early, sharded models): `argument_checks`.
"""
