"""Every private name of torch that ampatch uses, each with its fallback.

A private name of torch stands in this folder, in `casting/tables.py` (data) or in
`casting/dynamo_tables.py`, and nowhere else; `tests/laws/test_private_names.py` checks it,
and that `import ampatch` and training survive the loss of any of them.  A torch without a
name costs the feature that its fallback describes, never the import.

`probes` asks where a call runs (recorded? with fake tensors? in a backward pass?), `devices` which
kinds of devices there are, `distributed` the process group, `modules`, `tensors` and
`optimizers` read torch's objects, `torch_functions` and `dispatch_modes` are the two kinds
of modes, `tracing_tensors` the tensors of torch's compilers, `custom_ops` registered
operators, `scripting` torch.jit, `data_loading` the DataLoader, `dynamo` torch.compile,
`autocast_callers` torch's own modules that ask about autocast, `foreach` and `amp_kernels`
kernels, `half_grads` the gradient of half weights.
"""
