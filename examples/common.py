"""What the short examples share: their options, and images of digits."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

CUDA = torch.cuda.is_available()


# At every level alike, so that levels can be compared.  In FP32 weights the default of 1e-8 is as
# well; in half ones 1e-3 is better (docs/accuracy.md).
ADAM_EPS = 1e-4


def options(description, **defaults):
    """The options of every example; `defaults` are those of one, such as `epochs=4`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument(
        "--dtype", default="float16" if CUDA else "bfloat16", choices=["float16", "bfloat16"]
    )
    parser.add_argument("--loss-scale", default=None, help='"dynamic" or a number')
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=None, help="for a run that can be repeated")
    parser.add_argument("--device", default="cuda" if CUDA else "cpu")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    return args


def settings(args):
    """The arguments of `initialize` that the options give."""
    return {"opt_level": args.opt_level, "dtype": args.dtype, "loss_scale": args.loss_scale}


def digits(args, **loader_options):
    """Training and test batches of scikit-learn's digits, 1 x 8 x 8."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=args.device).unsqueeze(1) / 16
    labels = torch.tensor(data.target, device=args.device)
    cut = len(labels) * 4 // 5
    train = TensorDataset(images[:cut], labels[:cut])
    test = TensorDataset(images[cut:], labels[cut:])
    loader = {"shuffle": True, "drop_last": True, **loader_options}
    return DataLoader(train, args.batch_size, **loader), DataLoader(test, args.batch_size)


@torch.no_grad()
def accuracy(model, loader):
    """The share of right answers."""
    model.eval()
    right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    model.train()
    return right / len(loader.dataset)
