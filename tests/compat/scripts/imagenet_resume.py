"""O2 in the manner of apex's imagenet example, with Megatron's way to resume."""

import argparse
import json

import torch
import torch.nn as nn
from apex import amp
from apex.optimizers import FusedSGD
from apex.parallel import convert_syncbn_model

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str, default="O2")
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--sync_bn", action="store_true")
args = parser.parse_args()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )
    if args.sync_bn:
        model = convert_syncbn_model(model)
    optimizer = FusedSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
        verbosity=0,
    )
    return model, optimizer


def batches(first, last):
    for step in range(first, last):
        data = torch.Generator().manual_seed(step % 3)
        x = torch.randn(16, 3, 6, 6, generator=data)
        yield x, (x.mean((1, 2, 3)) * 10).long().clamp(0, 3)


criterion = nn.CrossEntropyLoss()
dtypes, losses = set(), []


def train(model, optimizer, first, last):
    hook = model[0].register_forward_hook(lambda m, i, o: dtypes.add(str(o.dtype)))
    for input, target in batches(first, last):
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    hook.remove()
    return [param.detach().clone() for param in amp.master_params(optimizer)]


model, optimizer = build()
train(model, optimizer, 0, 15)
torch.save(
    {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "amp": amp.state_dict(),
        "master params": list(amp.master_params(optimizer)),
    },
    "checkpoint.pt",
)
straight = train(model, optimizer, 15, 30)

model, optimizer = build()
checkpoint = torch.load("checkpoint.pt")
model.load_state_dict(checkpoint["state_dict"])
optimizer._lazy_init_maybe_master_weights()
optimizer._amp_stash.lazy_init_called = True
optimizer.load_state_dict(checkpoint["optimizer"])
for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"]):
    param.data.copy_(saved_param.data)
amp.load_state_dict(checkpoint["amp"])
again = train(model, optimizer, 15, 30)

found = {
    "losses": losses[:30],
    "dtypes": sorted(dtypes),
    "exact": all(map(torch.equal, straight, again)),
    "weights": sorted({str(param.dtype) for param in model.parameters()}),
    "halves": len(optimizer._amp_stash.all_fp16_params),
    "scale": amp._amp_state.loss_scalers[0].loss_scale(),
}
print(json.dumps(found))
