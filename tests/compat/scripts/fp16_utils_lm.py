"""Before amp: network_to_half, FP16_Optimizer, masters by hand; star import."""

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

hand = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).half()
model_params, master_params = prep_param_lists(hand)
sgd = torch.optim.SGD(master_params, lr=0.05, momentum=0.9)
scaler = LossScaler(scale=128.0)
second = []
for step in range(60):
    hand.zero_grad()
    loss = (hand(x.half()).float() - y).pow(2).mean()
    scaler.backward(loss)
    model_grads_to_master_grads(model_params, master_params)
    for param in master_params:
        param.grad.data.mul_(1.0 / scaler.loss_scale)
    clip_grad_norm(master_params, 5.0)
    sgd.step()
    master_params_to_model_params(model_params, master_params)
    second.append(loss.item())
print(json.dumps({"losses": losses, "second": second, "dtypes": sorted(dtypes)}))
