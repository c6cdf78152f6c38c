"""Lists of models and optimizers with num_losses, as apex's DCGAN example."""

import json

import torch
import torch.nn as nn
from apex import amp

torch.manual_seed(0)
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-2, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-2, betas=(0.5, 0.999))
[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level="O1", num_losses=3, loss_scale="dynamic"
)
dtypes, losses = set(), []
netG[0].register_forward_hook(lambda m, i, o: dtypes.add(str(o.dtype)))
netD[0].register_forward_hook(lambda m, i, o: dtypes.add(str(o.dtype)))
for step in range(60):
    netD.zero_grad()
    real = torch.randn(32, 2) * 0.1 + 2.0
    output = netD(real)
    errD_real = criterion(output, torch.ones_like(output))
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()
    noise = torch.randn(32, 4)
    fake = netG(noise)
    output = netD(fake.detach())
    errD_fake = criterion(output, torch.zeros_like(output))
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    optimizerD.step()
    netG.zero_grad()
    output = netD(fake)
    errG = criterion(output, torch.ones_like(output))
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    losses.append(abs(fake.mean().item() - 2.0))  # how far off the generator is
print(json.dumps({"losses": losses, "dtypes": sorted(dtypes), "scalers": sorted(amp.state_dict())}))
