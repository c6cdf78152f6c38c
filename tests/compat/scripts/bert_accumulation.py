"""O1 as in BERT pretraining: accumulation, a loss scale written by hand, clipping of masters."""

import json

import torch
import torch.nn as nn
from apex import amp
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam
from torch.optim.lr_scheduler import LambdaLR

amp.register_half_function(torch, "einsum")


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.norm = FusedLayerNorm(width, eps=1e-12)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        scores = torch.einsum("bqd,bkd->bqk", self.query(x), self.key(x))
        dtypes.add(str(scores.dtype))
        mixed = torch.einsum("bqk,bkd->bqd", torch.softmax(scores, -1), x)
        return self.out(self.norm(mixed + x)).squeeze(-1)


dtypes, losses, scales = set(), [], []
torch.manual_seed(0)
model = Attention(8)
decayed = [p for n, p in model.named_parameters() if "bias" not in n and "norm" not in n]
others = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
groups = [
    {"params": decayed, "weight_decay": 0.01},
    {"params": others, "weight_decay": 0.0},
]
optimizer = FusedAdam(groups, lr=2e-2, bias_correction=False)
scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic")
amp._amp_state.loss_scalers[0]._loss_scale = 2**20
amp._amp_state.loss_scalers[0]._scale_seq_len = 10

accumulation = 3
data = torch.randn(12, 5, 8)
target = data.sum(-1).tanh()
for step in range(90):
    part = slice(4 * (step % accumulation), 4 * (step % accumulation) + 4)
    loss = (model(data[part]) - target[part]).float().pow(2).mean() / accumulation
    last = (step + 1) % accumulation == 0
    with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
        scaled_loss.backward()
    losses.append(accumulation * loss.item())
    if last:
        scales.append(amp._amp_state.loss_scalers[0].loss_scale())
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        scheduler.step()
        for param in model.parameters():
            param.grad = None

print(json.dumps({"losses": losses, "dtypes": sorted(dtypes), "scales": scales}))
