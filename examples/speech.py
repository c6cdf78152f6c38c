"""Recognise spoken-like signals: convolutions, then an LSTM over packed sequences.

    python examples/speech.py --opt-level O1 --dtype bfloat16

A signal is a row of two to five tones of different lengths; the task is the number of high ones.
The signals are made here.
"""

import math

import torch
import torch.nn.functional as F
from common import ADAM_EPS, options, settings
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import ampatch as amp

PITCHES = (0.05, 0.2)  # cycles in a sample
MOST_TONES = 5


def signal(generator):
    """Samples, and how many of the tones are high."""
    count = int(torch.randint(2, MOST_TONES + 1, (), generator=generator))
    high = torch.randint(0, 2, (count,), generator=generator)
    lengths = torch.randint(48, 96, (count,), generator=generator)
    tones = [
        torch.sin(2 * math.pi * PITCHES[pitch] * torch.arange(int(length)))
        for pitch, length in zip(high, lengths, strict=True)
    ]
    samples = torch.cat(tones)
    return samples + 0.1 * torch.randn(len(samples), generator=generator), int(high.sum())


def batches(count, args, seed):
    """Padded signals, their lengths and their labels."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        signals, labels = zip(*(signal(generator) for _ in range(args.batch_size)), strict=True)
        lengths = torch.tensor([len(samples) for samples in signals])
        padded = pad_sequence(list(signals), batch_first=True)
        yield padded.to(args.device), lengths, torch.tensor(labels).to(args.device)


class Recogniser(nn.Module):
    """Two strided convolutions make frames; an LSTM reads as many as there are."""

    STRIDE = 8

    def __init__(self, width=32):
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv1d(1, width, 9, stride=4, padding=4),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, MOST_TONES + 1)

    def forward(self, samples, lengths):
        frames = self.frames(samples.unsqueeze(1)).transpose(1, 2)
        packed = pack_padded_sequence(
            frames, lengths // self.STRIDE, batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.lstm(packed)
        return self.out(last[0])


@torch.no_grad()
def accuracy(model, held_out):
    model.eval()
    right = [(model(x, lengths).argmax(1) == y).float().mean().item() for x, lengths, y in held_out]
    model.train()
    return sum(right) / len(right)


def main():
    args = options("Convolutions and an LSTM with mixed precision", epochs=8, lr=5e-3)
    model = Recogniser().to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, eps=ADAM_EPS)
    model, optimizer = amp.initialize(model, optimizer, **settings(args))
    for epoch in range(1, args.epochs + 1):
        for samples, lengths, labels in batches(16, args, seed=epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(samples, lengths), labels)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        test_accuracy = accuracy(model, batches(4, args, seed=0))
        amp.log_metrics(test_accuracy=test_accuracy)
        print(f"epoch {epoch:2d}  loss {loss.item():.4f}  test accuracy {test_accuracy:.4f}")


if __name__ == "__main__":
    main()
