"""A script whose models are collected when the interpreter ends."""

import gc

import torch

import ampatch

gc.disable()
for level in ("O1", "O2"):
    model = torch.nn.Linear(2, 2)
    model.itself = [model]
    ampatch.initialize(model, opt_level=level, dtype=torch.bfloat16, verbosity=0)
