"""Two models, each with an `initialize` of its own; a second start resumes from `gan.pt`."""

import json
import os

import torch
import torch.nn as nn
from apex import amp

torch.manual_seed(0)
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-2, betas=(0.5, 0.999))
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-2, betas=(0.5, 0.999))
netG, optimizerG = amp.initialize(netG, optimizerG, opt_level="O1")
if not os.path.exists("gan.pt"):
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**9  # the generator's: there is no other yet
netD, optimizerD = amp.initialize(netD, optimizerD, opt_level="O1")
if not os.path.exists("gan.pt"):
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**7  # the discriminator's
resumes = os.path.exists("gan.pt")
if resumes:
    checkpoint = torch.load("gan.pt")
    netG.load_state_dict(checkpoint["G"])
    netD.load_state_dict(checkpoint["D"])
    amp.load_state_dict(checkpoint["amp"])
dtypes, losses, scales = set(), [], {}
netG[0].register_forward_hook(lambda m, i, o: dtypes.add(str(o.dtype)))


def backward(name, loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scales[name] = (scaled_loss / loss).item()
        scaled_loss.backward()


for step in range(1 if resumes else 60):
    optimizerD.zero_grad()
    output = netD(torch.randn(32, 2) * 0.1 + 2.0)
    backward("D", criterion(output, torch.ones_like(output)), optimizerD)
    fake = netG(torch.randn(32, 4))
    output = netD(fake.detach())
    backward("D", criterion(output, torch.zeros_like(output)), optimizerD)
    optimizerD.step()
    optimizerG.zero_grad()
    output = netD(fake)
    backward("G", criterion(output, torch.ones_like(output)), optimizerG)
    optimizerG.step()
    losses.append(abs(fake.mean().item() - 2.0))
if not resumes:
    torch.save({"G": netG.state_dict(), "D": netD.state_dict(), "amp": amp.state_dict()}, "gan.pt")
entries = [entry["loss_scale"] for entry in amp.state_dict().values()]
print(json.dumps({"losses": losses, "dtypes": sorted(dtypes), "scales": scales, "saved": entries}))
