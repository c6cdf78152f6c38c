"""The optimizer side: loss scale, gradients, step.  It does not depend on patches and casts.

Where to look first:

* the loss scale, static or dynamic: `loss_scaler`; how it grows and backs off: `scale_value`; its
  entry in a state dict: `scaler_entries`;
* the body of `scale_loss`: `scale_loss_block`; the gradients of one optimizer from the block to the
  step: `gradients`; work that `delay_unscale` and `delay_overflow_check` put off: `delayed`;
* lists of gradients, unscaled and multiplied: `unscaling`;
* the step itself: `optimizer`; special cases of classes of optimizers: the folder `optimizers`;
* several ranks: `process_group`;
* the counts of steps, and messages about them: `steps`.
"""
