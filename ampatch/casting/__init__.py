"""The operator side: which dtype a patched torch function computes in.

Where to look first:

* which function follows which rule, and why: `tables`; what a rule chooses: `rules`;
* what a patched call does: `wrapper` (hot path); functions that need more: `special_ops`,
  `fused_attention`;
* what is in force, and for which thread: `policy`, `cast_state`, `contexts`; whether a forward
  still runs: `calling_frames`;
* half copies of weights, and gradients back to FP32: `weight_cache`, `batched_casts`,
  `kept_copies` (of several forwards), `backward_policy` (custom autograd Functions),
  `activation_checkpoints`;
* what is patched, and how it is undone: `install`, `replacements`, `patches`, `rebind`,
  `left_behind`, `places`;
* the user's functions: `user_functions`, `registered_functions`;
* torch.compile and torch.fx: `dynamo_tables`, `recording`;
* `__torch_function__` and modes: `handlers`, `handler_tables`;
* torch.autocast beside ampatch: `autocast_regions`, `autocast_switch`, `autocast_answers`,
  `torch_autocast`, `library_ops`;
* what is reported: `cast_observers`, `dtype_errors`.
"""
