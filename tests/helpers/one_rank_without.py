"""Two ranks, the second without ampatch: python one_rank_without.py disabled|never STORE RANK"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ampatch

case, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if rank == 0 or case == "disabled":
    ampatch.initialize(model, optimizer, opt_level="O2", enabled=rank == 0, verbosity=0)
DistributedDataParallel(model)
