"""One-line breaks of the source: does a test notice each of them?

    python benchmarks/breaks.py [--only TEXT] [--out FILE.md]

Each break is made by itself in a copy of the checkout, and the tests named beside it run there in
Python, without the native part.  A break that no test notices is a claim that no test guards.  A
break whose line the source no longer has is an error: give it the line that does the same now.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Break(NamedTuple):
    """The first `old` in `file` becomes `new`; `tests` are to notice."""

    file: str
    old: str
    new: str
    tests: str


def _breaks() -> list[Break]:
    rows = (row.split("\n|") for row in TABLE.strip().split("\n\n"))
    return [Break(file, old[1:], new[1:], tests.strip()) for file, old, new, tests in rows]


TABLE = r"""
casting/rules.py
| return dtypes.pop() if len(dtypes) == 1 else torch.float32 if dtypes else None
| return dtypes.pop() if dtypes else None
| casting/test_mixed_dtypes.py casting/test_calls.py laws/test_situations.py

casting/rules.py
| if dtype is to or dtype not in CASTABLE:
| if dtype is to:
| casting/test_casting.py casting/test_mixed_dtypes.py

casting/rules.py
|         if policy.devices is not None and value.device.type not in policy.devices:
|         if False:
| casting/test_devices.py

casting/rules.py
| policy.half_to if n > 1 else torch.float32
| policy.half_to
| casting/test_calls.py casting/test_composites.py

casting/rules.py
|     if kwargs.get("dtype") is not None or any(type(arg) is torch.dtype for arg in args):
|     if False:
| casting/test_calls.py casting/test_autocast_lists.py

casting/rules.py
| return choose_float if any(labels - kept for labels in operands) else widest
| return widest
| casting/test_composites.py casting/test_autocast_lists.py casting/test_casting.py

casting/rules.py
|         if not policy.allow_banned:
|         if policy.allow_banned:
| casting/test_calls.py casting/test_scopes.py

casting/rules.py
|             changed = changed or new is not item
|             changed = False
| casting/test_casting.py casting/test_calls.py

casting/wrapper.py
| ("out" in kwargs and kwargs["out"] is not None)
| False
| casting/test_casting.py casting/test_calls.py

casting/policy.py
| return dataclasses.replace(self, gate=_outside_passes(self.gate), in_forwards=self)
| return self
| casting/test_scopes.py casting/test_o1_hooks.py casting/test_blocks.py

casting/policy.py
|             float_to=dtype,
|             float_to=self.float_to,
| casting/test_blocks.py

casting/weight_cache.py
|                 version == weight._version
|                 True
| casting/test_weight_changes.py casting/test_weight_cache.py

casting/weight_cache.py
|             forward.touched.add(id(weight))
|             pass
| casting/test_weight_changes.py casting/test_weight_cache.py

casting/weight_cache.py
|             forward.graphed, forward.plain = {}, {}
|             pass
| casting/test_weight_changes.py

casting/kept_copies.py
|         return self._stores[torch.is_inference_mode_enabled()]
|         return self._stores[False]
| models/test_cached_weights.py

casting/batched_casts.py
|         if bucket is None or not _has_room(bucket, weight):
|         if bucket is None:
| casting/test_batched_casts.py models/test_lent_weights.py laws/test_memory.py

casting/tables.py
| Row("torch", ("log_softmax", "softmax"), Rule.FLOAT_UNLESS_DTYPE, _SOFTMAX),
| Row("torch", ("log_softmax", "softmax"), Rule.PROMOTE, _SOFTMAX),
| casting/test_tables.py casting/test_autocast_lists.py casting/test_casting.py

casting/special_ops.py
|         return cast(call(*cast_args, **cast_kwargs), wide, _EVERYWHERE)
|         return call(*cast_args, **cast_kwargs)
| casting/test_every_level.py

casting/rebind.py
|             patches.rebind(namespace, name, value)
|             pass
| casting/test_early_names.py

models/io_casting.py
|             if cast is None and self._stays_float(tensor, place):
|             if False:
| models/test_model_inputs.py

models/io_casting.py
|         clamped = torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest))
|         clamped = tensor
| models/test_model_inputs.py

models/values.py
|     return bool(rounded.isinf().any()) or (whole and bool((rounded != large).any()))
|     return bool(rounded.isinf().any())
| models/test_model_inputs.py

models/values.py
|         return value.to(dtype) if found is not dtype and found in CASTABLE else value
|         return value.to(dtype)
| laws/test_situations.py models/test_odd_models.py

models/lent_places.py
|         if not (isinstance(module, torch.jit.ScriptModule) or stays_float(module))
|         if not isinstance(module, torch.jit.ScriptModule)
| models/test_models.py models/test_overrides.py

models/lent_places.py
|         and place.parameter.dtype is torch.float32
|         and True
| laws/test_situations.py session/test_sharing.py session/test_pairs.py

models/lent_places.py
|         return list(map(len, self._all_tables)) == self._sizes and entries_are(*self._seen)
|         return True
| models/test_odd_calls.py

models/lent_writes.py
|             if copy._version != version:
|             if False:
| models/test_lent_weights.py

models/lent_writes.py
|         is_due = tree.forwards[in_graph] >= tree.next_look[in_graph]
|         is_due = False
| models/test_lent_weights.py models/test_odd_models.py laws/test_float_weights.py

models/conversion.py
|             target = torch.float32 if stays_float(module) else dtype
|             target = dtype
| models/test_models.py models/test_overrides.py

models/conversion.py
|         tensor.grad = grad.to(data.dtype)
|         pass
| session/test_again.py session/test_pairs.py models/test_models.py

models/copies.py
|             drop_plain_hooks(module)
|             pass
| models/test_model_copies.py

models/submodule_calls.py
|         result = around or (torch.float32 if self._lends else self._here.result)
|         result = None
| laws/test_situations.py models/test_framework_steps.py laws/test_ways_of_running.py

models/module_overrides.py
|         return None if to is None else cast_tensors(output, to)
|         return None
| models/test_overrides.py

models/managed_model.py
|         return None if to is None else cast_tensors(output, to)
|         return None
| laws/test_situations.py

scaling/scale_value.py
|     grows = taken * (clean == rule.growth_interval) * can_grow
|     grows = taken * (clean == rule.growth_interval)
| scaling/test_loss_scaler.py

scaling/scale_value.py
|     scale = scale * rule.backoff_factor**overflowed * rule.growth_factor**grows
|     scale = scale * rule.growth_factor**grows
| scaling/test_loss_scaler.py

scaling/scale_value.py
|     return first or second
|     return first
| scaling/test_loss_scaler.py scaling/test_scale_loss.py scaling/test_gradients.py

scaling/scale_value.py
|     return torch.view_as_real(grad.conj() if grad.is_conj() else grad)
|     return grad
| scaling/test_complex_gradients.py

scaling/loss_scaler.py
|             foreach.mul_(group, torch.tensor(scale, dtype=torch.float64, device=device))
|             foreach.mul_(group, scale)
| scaling/test_loss_scaler.py scaling/test_gradients.py scaling/test_scale_loss.py

scaling/loss_scaler.py
|         self.scale_grads_(grads, 1.0 / scale)
|         self.scale_grads_(grads, scale)
| scaling/test_loss_scaler.py scaling/test_scale_loss.py

scaling/gradients.py
|         if aside:
            put_back(aside)
|         if False:
            put_back(aside)
| scaling/test_gradients.py scaling/test_scale_loss.py

scaling/gradients.py
|             found = either(before.found_inf, found)
|             pass
| scaling/test_gradients.py scaling/test_scale_loss.py scaling/test_skips.py

scaling/gradients.py
|         self.check = self.scaled = None
        self.left_scaled = False
|         self.left_scaled = False
| scaling/test_gradients.py scaling/test_scale_loss.py scaling/test_skips.py

scaling/gradients.py
|         if self.left_scaled and self.has_gradients():
|         if False:
| scaling/test_forgotten_optimizer.py

scaling/gradients.py
|         changed = versions != before[2] or not all(map(operator.is_, before[1], grads))
|         changed = False
| scaling/test_forgotten_optimizer.py

scaling/optimizer.py
|             skipped = found if in_kernel or isinstance(found, bool) else is_set(found)
|             skipped = False
| scaling/test_skips.py scaling/test_steps.py

scaling/optimizer.py
|         if gradients.aside is not None:
|         if False:
| scaling/test_steps.py scaling/test_scale_loss.py

scaling/optimizer.py
|             note_skipped_step(self.optimizer)
|             pass
| scaling/test_skips.py scaling/test_steps.py interop/test_schedulers.py

scaling/scaled_backward.py
|         self._owners = owners_among(self._several)
|         self._owners = {}
| scaling/test_gradients.py scaling/test_two_step.py laws/test_situations.py

config/opt_levels.py
|     scale: str | float = "dynamic" if dtype is torch.float16 else 1.0
|     scale: str | float = "dynamic"
| scaling/test_loss_scaler.py scaling/test_host_syncs.py laws/test_situations.py api/test_control.py

config/opt_levels.py
|         return half and (self.lends_weights or bool(self.keep_batchnorm_fp32))
|         return False
| config/test_opt_levels.py models/test_models.py

config/environment.py
|     return {**script, **tied, **replacing}
|     return {**script, **replacing}
| session/test_sessions.py launch/test_run.py config/test_settings_variable.py

session/policies.py
|                     if dtype_of(tensor) in HALF_TYPES or is_parameter(tensor):
|                     if dtype_of(tensor) in HALF_TYPES:
| casting/test_scopes.py casting/test_calls_with_weights.py

session/policies.py
|     return half and single
|     return half or single
| models/test_models.py

session/session.py
|             changed |= managed.converted()
|             pass
| session/test_deactivate.py session/test_again.py

session/table.py
|         if row is not None and row[0] is session:
|         if row is not None:
| session/test_table.py session/test_pairs.py

api/argument_checks.py
|         if owned and params and owned.isdisjoint(map(id, params)):
|         if False:
| api/test_messages.py session/test_late_members.py

interop/clip_grad.py
|             ready(parameters)
|             pass
| scaling/test_scale_loss.py scaling/test_gradients.py

interop/tensor_methods.py
|             found = original.__get__(parameter)
            listener(parameter)
|             found = original.__get__(parameter)
| casting/test_weight_changes.py

interop/data_loading.py
|         with state.casts_off:
            return original(*args, **kwargs)
|         return original(*args, **kwargs)
| casting/test_scopes.py

scaling/process_group.py
|         torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group)
|         pass
| scaling/test_distributed.py scaling/test_sharded.py scaling/test_tensor_parallel.py

scaling/process_group.py
|         return torch.distributed.get_world_size() > 1
|         return False
| scaling/test_distributed.py

scaling/gradients.py
|         return self._scaler is scaler and self._generation == scaler.generation
|         return self._scaler is scaler
| scaling/test_scale_loss.py

scaling/gradients.py
|             self._unscale(scaler, grads_of(shared), scale / scale)
|             pass
| scaling/test_gradients.py

scaling/gradients.py
|         found = self.look_again()  # clipping may hide what another rank's inf has left
|         found = None
| scaling/test_distributed.py

scaling/gradients.py
|                 deferred.add([found])
|                 pass
| scaling/test_distributed.py

scaling/gradients.py
|             stays = self.scaled is not None or world_size() > 1
|             stays = self.scaled is not None
| scaling/test_distributed.py

scaling/scaled_backward.py
|             if one.blocks != number:
|             if False:
| scaling/test_scale_loss.py

scaling/tensor_lists.py
|     return are_laid_out_alike(grad, more) and not grad.is_conj()
|     return are_laid_out_alike(grad, more)
| scaling/test_complex_gradients.py

scaling/step_counts.py
|         torch.addcmul(found, row, found, out=row)  # one more than before, or 0
|         row.add_(found)
| scaling/test_skips.py scaling/test_skip_rate.py

scaling/skip_report.py
|         is_bad = news.skipped >= _SEVERAL and 20 * news.skipped > news.steps
|         is_bad = news.skipped >= _SEVERAL
| scaling/test_skip_rate.py

scaling/loss_scaler.py
|             clean = min(clean, self.settings.growth_interval - 1, 2**31 - 1)
|             clean = min(clean, 2**31 - 1)
| scaling/test_loss_scale_settings.py scaling/test_loss_scaler.py

scaling/loss_scaler.py
|         self._fill(value, None)
|         self._numbers.fill(value, None)
| scaling/test_loss_scale_settings.py scaling/test_loss_scaler.py

scaling/optimizers/fused.py
|         and all(group.get("fused", True) for group in optimizer.param_groups)
|         and True
| scaling/test_host_syncs.py

scaling/optimizers/fused.py
|             if group["dampening"]:
|             if False:
| scaling/test_host_syncs.py

scaling/optimizers/sam.py
|         self._overflowed |= self._managed.gradients.take_overflow()
|         self._overflowed = self._managed.gradients.take_overflow()
| scaling/test_two_step.py

scaling/optimizers/closures.py
|     return module.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
|     return module.startswith("torch.optim.")
| scaling/test_closures.py

scaling/optimizers/state.py
|             if name != "step":
|             if True:
| scaling/test_optimizer_state.py

scaling/optimizers/zero.py
|     if zero_redundancy.is_in_join(optimizer):
|     if False:
| scaling/test_zero.py

scaling/optimizers/zero.py
|     zero_redundancy.build_buckets(optimizer)
|     pass
| scaling/test_zero.py

scaling/optimizers/bare_calls.py
|         if type(hook) is not NotifyOfSteps:
|         if False:
| scaling/test_steps.py

scaling/optimizers/wrappers.py
|             if present is not of_class:
|             if False:
| scaling/test_closures.py scaling/test_steps.py laws/test_situations.py

scaling/optimizer.py
|             self.gradients.finish()
            return loss
|             return loss
| scaling/test_closures.py

scaling/optimizer.py
|         if all(group.get("lr") == 0 for group in self.optimizer.param_groups):
|         if False:
| scaling/test_forgotten_optimizer.py
"""


def noticed(broken: Break) -> tuple[str, float]:
    """Which test noticed, "nothing" where none did; and the seconds that it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        ignored = shutil.ignore_patterns(".git", "results", "images", "__pycache__", "*.so")
        shutil.copytree(ROOT, copy, ignore=ignored)
        path = copy / "ampatch" / broken.file
        text = path.read_text()
        if broken.old not in text:
            return "NO SUCH LINE", 0.0
        path.write_text(text.replace(broken.old, broken.new, 1))
        tests = [
            f"tests/{name}" for name in broken.tests.split() if (copy / "tests" / name).exists()
        ]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        variables = {**os.environ, "PYTHONPATH": str(copy), "AMPATCH_NATIVE": "0"}
        done = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    name = lines[0].split(" - ")[0].partition(" ")[2] if lines else "at its import"
    return (name if done.returncode else "nothing"), time.monotonic() - start


def main() -> int:
    """Prints a row for each break; 1 if one was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="breaks of files with TEXT")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    rows, missed = ["| file | line | noticed by |", "|---|---|---|"], 0
    for broken in _breaks():
        if options.only not in broken.file:
            continue
        by, seconds = noticed(broken)
        missed += by in ("nothing", "NO SUCH LINE")
        line = broken.old.strip().splitlines()[0].replace("|", "\\|")
        rows.append(f"| {broken.file} | `{line}` | {by} |")
        print(f"{rows[-1]} {seconds:.0f} s", flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(rows) + "\n")
    print(f"{len(rows) - 2} breaks, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
