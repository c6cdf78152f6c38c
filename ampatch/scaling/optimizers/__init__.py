"""The peculiarities of optimizers, a file for each; `scaling/optimizer.py` calls them.

Where to look first:

* kinds of optimizers: `fused` (their kernels skip a step), `sam` (two half steps), `closures`
  (LBFGS), `parameter_lists` (parameters outside `param_groups`, optimizers inside optimizers),
  `zero` (ZeroRedundancyOptimizer);
* the places of parameters and their state: `param_groups`, `state`, `snapshots`;
* replaced methods: `wrappers`, `bare_calls`;
* checkpoints of apex: `apex_checkpoints`;
* mistakes of a script: `idle_steps` (a step without effect), `unmanaged` (an optimizer that
  `initialize` was not given).

`ampatch/compat/apex/optimizers/` has apex's own classes, such as `FusedAdam`.
"""
