"""The optimizer side: loss scale, gradients, step.  Knows nothing of patching and casts.

Where to look first:

* the loss scale and its kinds: `loss_scaler`; how it grows and backs off: `scale_value`; its entry
  in a state dict: `scaler_entries`;
* the body of `scale_loss`: `scaled_backward`; the gradients of one optimizer or of several from
  there to the step: `gradients`;
* the step itself: `optimizer`; what is peculiar to a class of optimizers: the folder `optimizers`;
* gradients of a list of parameters: `tensor_lists`;
* several ranks: `process_group`;
* skipped steps: counted in `step_counts`, said in `skip_report`.
"""
