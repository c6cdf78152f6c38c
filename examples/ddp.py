"""Train on several processes with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/ddp.py --opt-level O2 --dtype bfloat16

`initialize` comes before the wrapper. Alone, without torchrun, it trains in one process.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import accuracy, digits, options, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import ampatch as amp


def main():
    args = options("DistributedDataParallel with mixed precision", epochs=6, lr=0.05)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    loader, test_loader = digits(args)
    sampler = DistributedSampler(loader.dataset)
    loader = DataLoader(loader.dataset, args.batch_size, sampler=sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10)
    ).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, **settings(args))
    parallel = DistributedDataParallel(model)

    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(images), labels)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        test_accuracy = accuracy(model, test_loader)
        if dist.get_rank() == 0:
            amp.log_metrics(test_accuracy=test_accuracy)
            print(f"epoch {epoch:2d}  loss {loss.item():.4f}  test accuracy {test_accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
