"""Special cases of optimizers, each in its own file; `scaling/optimizer.py` calls them.

Where to look first:

* kinds of optimizers: `fused` (the kernel skips a step), `sam` (a step consists of two calls),
  `zero_redundancy`;
* `step(closure)`: `closures`; casts of the state of parameters: `state`; replaced methods of an
  optimizer: `wrappers`.

`ampatch/compat/apex/optimizers/` has apex's own classes, such as `FusedAdam`.
"""
