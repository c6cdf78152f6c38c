"""DataParallel: on the CPU it is its module; several devices.  Replicas: casting/test_threads."""

import torch
from ddp_training import backward, build, everything
from torch.nn.parallel import DataParallel

import ampatch as amp

BF16 = {"dtype": torch.bfloat16, "verbosity": 0}


def test_data_parallel_on_the_cpu_is_its_module(opt_level):
    """Wrapped before and after `initialize`: the same training, bit for bit."""
    results = []
    for order in ("none", "before", "after"):
        model, optimizer = build(seed=0)
        wrapped = DataParallel(model) if order == "before" else model
        amp.initialize(wrapped, optimizer, opt_level=opt_level, **BF16)
        wrapped = DataParallel(model) if order == "after" else wrapped
        for number in range(4):
            optimizer.zero_grad()
            backward(wrapped, optimizer, number)
            optimizer.step()
        results.append(everything(model, optimizer))
        kept = torch.bfloat16 if opt_level == "O3" else torch.float32
        assert {value.dtype for value in wrapped.state_dict().values()} == {kept}
        amp.deactivate()
    for actual in results[1:]:
        assert all(map(torch.equal, results[0], actual))
