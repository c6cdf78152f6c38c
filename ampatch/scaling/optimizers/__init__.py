"""Special cases of optimizers, a file for each; `scaling/optimizer.py` calls them.

Where to look first:

* kinds of optimizers: `fused` (their kernels skip a step), `sam` (a step is two calls),
  `zero_redundancy`; who calls a closure: `closures`;
* the state of parameters, cast to another dtype: `state`; replaced methods: `wrappers`.

`ampatch/compat/apex/optimizers/` has apex's own classes, such as `FusedAdam`.
"""
