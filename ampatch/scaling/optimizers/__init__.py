"""The peculiarities of optimizers, a file for each; `scaling/optimizer.py` calls them.

Where to look first:

* kinds of optimizers: `fused` (their kernels skip a step), `sam` (two half steps), `closures`
  (LBFGS), `zero` (ZeroRedundancyOptimizer);
* an optimizer's state in a dtype: `state`; what a step may have to take back: `snapshots`;
* replaced methods: `wrappers`, `bare_calls`;
* a hook on all optimizers, also those that `initialize` was not given: `all_steps`;
* checkpoints of apex: `apex_checkpoints`.

`ampatch/compat/apex/optimizers/` has apex's own classes, such as `FusedAdam`.
"""
