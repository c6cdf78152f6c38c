"""A model under an opt level: its half weights, hooks and copies.

Where to look first:

* one model and its hooks: `managed_model`, `hooks`;
* half copies of FP32 weights during a forward (O2): `lent_weights`; where they stand:
  `lent_places`; how they are put there: `entries`; how they are made: `lent_casts`; several
  threads: `turns`; which parameters come later: `registrations`;
* weights to half and back (O3): `conversion`;
* how inputs are cast: `io_casting`; calls of parts of a model: `submodule_calls`; steps of a
  framework around it: `steps`; parts in another precision: `module_overrides`;
* `copy.deepcopy`, pickle, `torch.save(model)`: `copies`;
* what `fully_shard` has sharded: `sharded_weights`.
"""
