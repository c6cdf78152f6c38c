"""The operator side: which dtype a patched torch function computes in.

Where to look first:

* which function follows which rule, and why: `tables`; what a rule chooses: `rules`;
* what a patched call does: `wrapper` (hot path), `arguments`; functions that need more than a cast:
  `special_ops`;
* the stack of calls of each thread, and the policy that is active there: `calls`; policies and the
  user's blocks: `policy`; recomputations, custom Functions' backward and replicas:
  `context_propagation`;
* half copies of weights, and gradients back to FP32: `weight_cache`, `half_copies`;
* what is patched, and how it is undone: `install`, `patches`, `places`; functions that modules
  hold: `held_functions`; the user's functions: `user_functions`;
* torch.compile: `dynamo_patches`;
* `__torch_function__` and TorchFunctionModes: `handlers`, `handler_containers`;
* torch.autocast beside ampatch: `autocast_interop`; operators with an autocast kernel:
  `autocast_kernels`; where casts begin under --auto: `outermost_forwards`;
* observers of casts: `cast_observers`; notes on errors about dtypes: `dtype_errors`.
"""
