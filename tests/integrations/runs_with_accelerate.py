"""Runs with accelerate's `Accelerator`, for the law of frameworks."""

import os

import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from framework_runs import BATCH, Plan, Run, dataset, network, optimizer_of
from torch.utils.data import DataLoader

from ampatch.integrations.accelerate import AmpatchAccelerator


def run(plan: Plan) -> Run:
    forget_states()
    if dist.is_initialized():
        name_rank()
    accelerator = _accelerator(plan)
    model = network()
    loader = DataLoader(dataset(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    if plan.resume:
        accelerator.load_state(str(plan.folder))
        done = int((plan.folder / "batches").read_text())
        loader = accelerator.skip_first_batches(loader, done)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            accelerator.backward(loss)
            if plan.clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), plan.clip)
            optimizer.step()
            optimizer.zero_grad()
        if len(losses) == plan.stop_after:
            accelerator.save_state(str(plan.folder))
            if accelerator.is_main_process:
                (plan.folder / "batches").write_text(str(len(losses)))
            accelerator.wait_for_everyone()
            break
    weights = accelerator.get_state_dict(model)
    forget_states()
    return plan.end(losses, weights)


def _accelerator(plan: Plan) -> Accelerator:
    arguments = {"cpu": True, "gradient_accumulation_steps": plan.accumulate}
    if plan.precision == "ampatch":
        return AmpatchAccelerator(**plan.settings, **arguments)
    if plan.precision == "float32":
        return Accelerator(**arguments)
    if plan.dtype == "float16":
        raise NotImplementedError("accelerate trains in FP32 where float16 is asked for on a CPU")
    return Accelerator(mixed_precision="bf16", **arguments)


def forget_states() -> None:
    """An `Accelerator` keeps its settings for the process; the next run has others."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def name_rank() -> None:
    """accelerate looks for several processes in the environment, as a launcher leaves it."""
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"LOCAL_WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"OMP_NUM_THREADS": "1"}
