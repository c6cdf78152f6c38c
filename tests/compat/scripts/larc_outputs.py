"""O2 with LARC, string arguments, cast_model_outputs, an inf written into .grad, enabled=False."""

import json
import sys

import torch
import torch.nn as nn
from apex import amp
from apex.multi_tensor_apply import multi_tensor_applier
from apex.parallel.LARC import LARC

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
optimizer = LARC(optimizer, trust_coefficient=0.1, clip=True)
model, optimizer = amp.initialize(
    model,
    optimizer,
    opt_level="O2",
    keep_batchnorm_fp32="True",
    loss_scale="dynamic",
    cast_model_outputs=torch.float16,
    verbosity=0,
    enabled="--no-amp" not in sys.argv,
)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True).tanh()
dtypes, losses, outputs, moved = set(), [], set(), []
model[0].register_forward_hook(lambda m, i, o: dtypes.add(str(o.dtype)))
for step in range(60):
    optimizer.zero_grad()
    output = model(x)
    outputs.add(str(output.dtype))
    loss = (output.float() - y).pow(2).mean()
    before = model[0].weight.detach().clone()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        if step == 10 and hasattr(optimizer, "_amp_stash"):
            model[0].weight.grad[0, 0] = float("inf")
    optimizer.step()
    moved.append(not torch.equal(before, model[0].weight))
    losses.append(loss.item())
print(
    json.dumps(
        {
            "losses": losses,
            "dtypes": sorted(dtypes),
            "outputs": sorted(outputs),
            "moved": moved,
            "fused": multi_tensor_applier.available,
        }
    )
)
