"""Runs with timm's scalers, checkpoints and clipping, for the law of frameworks."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from framework_runs import Plan, Run, batches, network, optimizer_of
from timm.models import model_parameters, resume_checkpoint
from timm.utils import CheckpointSaver, NativeScaler, dispatch_clip_grad
from torch.nn.parallel import DistributedDataParallel

import ampatch
from ampatch.integrations.timm import AmpatchScaler


def without_scaler(loss, optimizer, clip_grad, clip_mode, parameters, need_update) -> None:
    """train.py's own lines."""
    loss.backward()
    if need_update:
        if clip_grad is not None:
            dispatch_clip_grad(parameters, value=clip_grad, mode=clip_mode)
        optimizer.step()


def run(plan: Plan) -> Run:
    """As `framework_runs` says, in the order of timm's train.py."""
    model = network()
    optimizer = optimizer_of(model)
    scaler, region = None, contextlib.nullcontext()
    if plan.precision == "ampatch":
        ampatch.initialize(model, optimizer, **plan.settings)
        scaler = AmpatchScaler()
    elif plan.precision == "amp":
        region = torch.autocast("cpu", dtype=getattr(torch, plan.dtype))
        if plan.dtype == "float16":
            scaler = NativeScaler(device="cpu")
    backward, done = scaler or without_scaler, 0
    if plan.resume:
        [saved] = plan.folder.glob("recovery-0-*.pth.tar")
        resume_checkpoint(model, str(saved), optimizer, scaler, log_info=False)
        done = int(saved.name.split("-")[2].split(".")[0])
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    losses: list[float] = []
    for number, (inputs, targets) in enumerate(batches(done), done + 1):
        need_update = number % plan.accumulate == 0
        quiet = dist.is_initialized() and not need_update
        with wrapped.no_sync() if quiet else contextlib.nullcontext():
            with region:
                loss = F.cross_entropy(wrapped(inputs), targets)
            losses.append(loss.item())
            clip = {"clip_grad": plan.clip, "clip_mode": "norm"}
            parameters = model_parameters(wrapped)
            loss = loss / plan.accumulate
            backward(loss, optimizer, parameters=parameters, need_update=need_update, **clip)
        if need_update:
            optimizer.zero_grad()
        if number == plan.stop_after:
            folder = str(plan.folder)
            saver = CheckpointSaver(model, optimizer, amp_scaler=scaler, recovery_dir=folder)
            saver.save_recovery(0, number)
            break
    return plan.end(losses, model.state_dict())
