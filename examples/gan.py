"""Train a GAN on digits: two models, two optimizers, three losses with a loss scale each.

python examples/gan.py --opt-level O1 --dtype bfloat16
"""

import itertools

import torch
import torch.nn.functional as F
from common import ADAM_EPS, digits, options, settings
from torch import nn

import ampatch as amp

NOISE = 16


def network(*widths):
    """Linear layers with leaky ReLUs between them."""
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def backward(loss, optimizer, loss_id):
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()
    return loss.item()


def main():
    args = options("A GAN with mixed precision", epochs=20, lr=2e-3)
    loader, _ = digits(args)
    generator = network(NOISE, 128, 256, 64).to(args.device)
    discriminator = network(64, 256, 128, 1).to(args.device)
    for_g = torch.optim.Adam(generator.parameters(), args.lr, betas=(0.5, 0.99), eps=ADAM_EPS)
    for_d = torch.optim.Adam(discriminator.parameters(), args.lr, betas=(0.5, 0.99), eps=ADAM_EPS)
    [generator, discriminator], [for_g, for_d] = amp.initialize(
        [generator, discriminator], [for_g, for_d], num_losses=3, **settings(args)
    )
    is_real = torch.ones(args.batch_size, 1, device=args.device)
    for epoch in range(1, args.epochs + 1):
        for images, _ in loader:
            real = images.flatten(1) * 2 - 1
            fake = generator(torch.randn(len(real), NOISE, device=args.device)).tanh()

            for_d.zero_grad()
            judge = F.binary_cross_entropy_with_logits
            loss_d = backward(judge(discriminator(real), is_real), for_d, loss_id=0)
            loss_d += backward(judge(discriminator(fake.detach()), 1 - is_real), for_d, loss_id=1)
            for_d.step()

            for_g.zero_grad()
            loss_g = backward(judge(discriminator(fake), is_real), for_g, loss_id=2)
            for_g.step()
        brightness = (fake.float().mean() - real.mean()).abs().item()
        amp.log_metrics(brightness_error=brightness)
        print(
            f"epoch {epoch:2d}  discriminator {loss_d:.3f}  generator {loss_g:.3f}  "
            f"error of the mean brightness {brightness:.3f}"
        )


if __name__ == "__main__":
    main()
