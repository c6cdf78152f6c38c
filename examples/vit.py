"""Train a small vision transformer on digits.

python examples/vit.py --opt-level O2 --dtype bfloat16
"""

import torch
import torch.nn.functional as F
from common import ADAM_EPS, accuracy, digits, options, settings
from torch import nn

import ampatch as amp


class ViT(nn.Module):
    """Patches of 2 x 2, a class token, layers of attention."""

    def __init__(self, width=64, heads=4, layers=2, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.1,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(x), -1, -1).to(x.dtype)
        x = torch.cat([token, x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def main():
    args = options("A vision transformer with mixed precision", epochs=8, lr=1e-3)
    loader, test_loader = digits(args)
    model = ViT().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, eps=ADAM_EPS)
    model, optimizer = amp.initialize(model, optimizer, **settings(args))
    for epoch in range(1, args.epochs + 1):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        test_accuracy = accuracy(model, test_loader)
        amp.log_metrics(test_accuracy=test_accuracy)
        print(f"epoch {epoch:2d}  loss {loss.item():.4f}  test accuracy {test_accuracy:.4f}")


if __name__ == "__main__":
    main()
