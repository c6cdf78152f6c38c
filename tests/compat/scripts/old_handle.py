"""The oldest API: amp.init, wrap_optimizer, two losses to an optimizer, an RNN."""

import json

import torch
import torch.nn as nn
from apex import amp

amp_handle = amp.init(enabled=True, enable_caching=True, verbose=False)
torch.manual_seed(0)
rnn = nn.LSTM(3, 8, batch_first=True)
head = nn.Linear(8, 1)
params = list(rnn.parameters()) + list(head.parameters())
optimizer = amp_handle.wrap_optimizer(torch.optim.Adam(params, lr=0.02), num_loss=2)
x = torch.randn(16, 5, 3)
y = x.sum((1, 2), keepdim=False).tanh().unsqueeze(1)
dtypes, losses = set(), []
for step in range(60):
    optimizer.zero_grad()
    hidden, _ = rnn(x)
    dtypes.add(str(hidden.dtype))
    loss1 = (head(hidden[:, -1]).float() - y).pow(2).mean()
    with optimizer.scale_loss(loss1) as scaled_loss:
        scaled_loss.backward()
    loss2 = 0.01 * head(rnn(x)[0][:, 0]).float().pow(2).mean()
    with optimizer.scale_loss(loss2) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses.append(loss1.item())
print(json.dumps({"losses": losses, "dtypes": sorted(dtypes)}))
