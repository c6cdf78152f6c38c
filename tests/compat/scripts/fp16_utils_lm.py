"""Before amp: network_to_half, FP16_Optimizer; star import."""

import json

import torch
import torch.nn as nn
from apex.fp16_utils import *

torch.manual_seed(0)
dtypes, losses = set(), []
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
model = network_to_half(model)
model[1][0].register_forward_hook(lambda m, i, o: dtypes.add(str(o.dtype)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-4)
optimizer = FP16_Optimizer(
    optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2**20}, verbose=False
)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True).tanh()
for step in range(60):
    optimizer.zero_grad()
    loss = (model(x).float() - y).pow(2).mean()
    optimizer.backward(loss)
    optimizer.clip_master_grads(5.0)
    optimizer.step()
    losses.append(to_python_float(loss.data))
print(json.dumps({"losses": losses, "dtypes": sorted(dtypes)}))
