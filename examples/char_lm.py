"""Train a small character-level transformer on sources of the standard library.

    python examples/char_lm.py --opt-level O2 --dtype bfloat16

The text is that of the Python which runs the script, so nothing is downloaded,
and figures from two Python versions are not comparable.  The last tenth is held
out; its mean loss, in nats per character, is the metric.

It seeds nothing unless `--seed` is given, so that `ampatch sweep --seeds 3`
can give each run its own seed.
"""

import argparse
import email.message
import inspect
import json.decoder
import statistics
import time
import typing

import torch
import torch.nn as nn
import torch.nn.functional as F

import ampatch as amp

SOURCES = (argparse, inspect, email.message, json.decoder, statistics, typing)
VOCABULARY = 128  # ASCII; anything else is read as "?"


class Block(nn.Module):
    """One layer: causal self-attention, then a two-layer perceptron."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def attend(self, x):
        batch, length, dim = x.shape
        shape = (batch, length, 3, self.heads, dim // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(batch, length, dim))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharLM(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, length, dim=64, heads=2, layers=2):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))


def load_text(device):
    """The training and the held-out characters, as numbers."""
    text = "".join(inspect.getsource(module) for module in SOURCES)
    codes = bytearray(text.encode("ascii", errors="replace"))
    data = torch.frombuffer(codes, dtype=torch.uint8).long().to(device)
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def batch_at(data, starts, length):
    """Inputs and the characters that follow them, one row per start."""
    rows = data[starts[:, None] + torch.arange(length + 1, device=data.device)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(model, data, optimizer, steps, args):
    """Take `steps` steps on random windows; returns their mean loss."""
    model.train()
    total = 0.0
    for _ in range(steps):
        starts = torch.randint(len(data) - args.length, (args.batch_size,)).to(data.device)
        loss = loss_of(model, *batch_at(data, starts, args.length))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


@torch.no_grad()
def test(model, data, args, batches=16):
    """Mean loss over windows spread evenly through the held-out text."""
    model.eval()
    count = args.batch_size * batches
    starts = torch.linspace(0, len(data) - args.length - 1, count, device=data.device).long()
    losses = [
        loss_of(model, *batch_at(data, part, args.length)).item() for part in starts.chunk(batches)
    ]
    return sum(losses) / len(losses)


def parse_args():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Character language model, mixed precision")
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument(
        "--dtype", default="float16" if cuda else "bfloat16", choices=["float16", "bfloat16"]
    )
    parser.add_argument("--loss-scale", default=None, help='"dynamic" or a number')
    parser.add_argument("--epochs", type=int, default=4, help="held-out tests, evenly spaced")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="characters per window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=None, help="for a run that can be repeated")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    train_data, test_data = load_text(args.device)

    model = CharLM(args.length).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        loss_scale=args.loss_scale,
        dtype=getattr(torch, args.dtype),
    )

    steps = max(1, args.steps // args.epochs)
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        loss = train(model, train_data, optimizer, steps, args)
        heldout = test(model, test_data, args)
        amp.log_metrics(heldout_loss=heldout)
        print(
            f"epoch {epoch}  loss {loss:.4f}  held-out loss {heldout:.4f}  "
            f"{time.perf_counter() - start:.1f} s"
        )


if __name__ == "__main__":
    main()
