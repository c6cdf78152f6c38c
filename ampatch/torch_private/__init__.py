"""Every private name of torch that ampatch uses, each with its fallback.

A private name of torch stands in this folder, in `casting/tables.py` (data) or in
`casting/dynamo_patches.py`, and nowhere else; `tests/laws/test_private_names.py` checks it,
and that `import ampatch` and training survive the loss of any of them.  A torch without a
name costs the feature that its fallback describes, never the import.

Where to look first:

* where a call runs (traced? in a backward pass? on one of several ranks?), and the order of
  autograd's nodes: `probes`; which device types there are: `devices`;
* torch's objects: `modules`, `tensors`, `optimizers`;
* each rank's shard of a DTensor: `dtensors`;
* TorchFunctionModes: `torch_functions`; TorchDispatchModes: `dispatch_modes`;
* a private name with its fallback: `torch_attributes`;
* compilers: `dynamo` (torch.compile), `tracing_tensors`;
* kernels and operators: `foreach`, `amp_kernels`, `custom_ops`;
* FSDP2's policies and groups of parameters: `sharding`;
* activation checkpoints: `checkpoints`; threads that drop objects late: `late_threads`;
* the DataLoader: `data_loading`; torch's own autocast: `autocast`.
"""
