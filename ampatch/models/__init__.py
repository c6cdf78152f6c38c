"""A model under an opt level: its half weights, hooks and copies.

Where to look first:

* one model and its hooks: `managed_model`, `hooks`;
* half copies of FP32 weights during a forward (O2): when they are lent, `lent_weights`; how they
  are made, `lent_copies`; where they are put, `lent_places`; what a forward writes into them,
  `lent_writes`; those of embeddings, made when they are read, `lookups`;
* weights to half and back (O3): `conversion`;
* casts of inputs and outputs: `values`, `io_casting`; calls of `model.forward` and of parts,
  and a framework's steps: `submodule_calls`; parts in another precision: `module_overrides`;
* batch norms after a step that was skipped: `running_statistics`;
* `copy.deepcopy`, pickle, `torch.save(model)`: `copies`;
* what `fully_shard` has sharded: `sharded_weights`.
"""
