"""Fine-tune a frozen network with low-rank adapters.

    python examples/finetune.py --opt-level O2 --dtype bfloat16

The network has learnt the digits 0 to 4, in FP32. Its weights are frozen, and adapters learn all
ten digits in mixed precision. At O2 both are FP32 outside of forwards; a frozen network that is
given in half stays half.
"""

import warnings

import torch
import torch.nn.functional as F
from common import ADAM_EPS, accuracy, digits, options, settings
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from torch import nn

import ampatch as amp


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank correction, which is zero at first."""

    def __init__(self, linear, rank):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


def pretrained(device):
    """A network that scikit-learn has trained on the digits 0 to 4, with ten outputs."""
    data = load_digits(n_class=5)
    learnt = MLPClassifier((256, 256), max_iter=10, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # ten epochs will do
        learnt.fit(data.data / 16, data.target)
    features = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    )
    for index, layer in enumerate((1, 3)):
        linear = features[layer]
        linear.weight.data = torch.tensor(learnt.coefs_[index].T, dtype=torch.float32)
        linear.bias.data = torch.tensor(learnt.intercepts_[index], dtype=torch.float32)
    return nn.Sequential(features, nn.Linear(256, 10)).to(device)


def main():
    args = options("Low-rank adapters with mixed precision", epochs=10, lr=5e-3)
    model = pretrained(args.device)
    loader, test_loader = digits(args)
    features, head = model
    for index in (1, 3):
        features[index] = Adapted(features[index], rank=8)
    model = nn.Sequential(features, head).to(args.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.lr, eps=ADAM_EPS)
    model, optimizer = amp.initialize(model, optimizer, **settings(args))
    for epoch in range(1, args.epochs + 1):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        test_accuracy = accuracy(model, test_loader)
        amp.log_metrics(test_accuracy=test_accuracy)
        print(f"epoch {epoch:2d}  loss {loss.item():.4f}  test accuracy {test_accuracy:.4f}")
    kept = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    print(f"frozen weights: {kept / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
