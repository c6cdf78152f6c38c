"""amp.lists edited before initialize, decorators, disable_casts, and the patches taken out."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
amp.lists.torch_overrides.FP32_FUNCS.append("sigmoid")
amp.register_float_function(torch, "tanh")


@amp.float_function
def loss_fn(prediction, target):
    seen["float_function"] = str(prediction.dtype)
    return (prediction - target).pow(2).mean()


@amp.half_function
def project(x, weight):
    seen["half_function"] = str(x.dtype)
    return x @ weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.weight = nn.Parameter(torch.randn(16, 8) / 4)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        dtypes.add(str(x.dtype))
        gate = torch.sigmoid(x)
        seen["sigmoid"] = str(gate.dtype)
        x = F.softmax(x, dim=-1) * 4
        seen["softmax"] = str(x.dtype)
        x = torch.tanh(project(x, self.weight))
        seen["tanh"] = str(x.dtype)
        with amp.disable_casts():
            seen["disabled"] = str((x.float() @ torch.ones(8, 1)).dtype)
        return self.last(x)


dtypes, seen, losses = set(), {}, []
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
model, optimizer = amp.initialize(
    model, optimizer, opt_level="O1", verbosity=0, min_loss_scale=128.0, max_loss_scale=2.0**14
)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True).tanh()
for step in range(60):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses.append(loss.item())

during, dtypes = (dict(seen), sorted(dtypes)), set()
amp._amp_state.handle._deactivate()
model(x)
print(
    json.dumps(
        {"losses": losses, "dtypes": during[1], "seen": during[0], "after": seen["softmax"],
         "scale": amp.state_dict()["loss_scaler0"]["loss_scale"]}
    )
)  # fmt: skip
