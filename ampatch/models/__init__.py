"""A model under an opt level: its half weights, and the work around its calls.

Where to look first (one forward step by step: "The walk of an O2 forward" in docs/design.md):

* one model: `managed_model`; the `forward` that ampatch sets in its modules, and copies, pickles
  and replicas of them: `own_frame`;
* half copies of FP32 weights during a forward (O2): when they are swapped in and out,
  `half_copy_swaps`; how they are made, their slots, and writes of a forward into them,
  `half_copy_slots`; half copies of embeddings, made when they are read, `embeddings`;
* weights to half and back (O3): `conversion`;
* casts of inputs and outputs: `values`, `io_casting`; calls of submodules from outside, and in a
  framework's steps: `submodule_calls`; submodules in another precision: `module_overrides`;
* batch norms after a step that was skipped: `running_statistics`;
* weights that `fully_shard` has sharded: `sharded_weights`.
"""
