"""One trial of a sweep, in a separate process.

    python -m ampatch.sweep.execution.child REQUEST

Runs the script under a recorder and writes what was measured to a file, also when the script
crashes, calls `sys.exit` or receives SIGTERM.  While it runs, another file has the number of steps
and the loss.  The exit code is the script's.  REQUEST is JSON from `Runner`: the runner, the trial,
the descriptor of a pipe that closes when the sweep ends, and whether to write a list of imports.
Under torchrun only rank 0 records.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ampatch
from ampatch import device_figures
from ampatch.config import environment
from ampatch.integrations import framework_patches
from ampatch.launch import children
from ampatch.launch.program import Program
from ampatch.launch.script import Ending, describe, make_ending
from ampatch.session.facade import OutermostForwards, open_sessions
from ampatch.sweep.cases_and_trials import AUTOCAST, counts_its_steps
from ampatch.sweep.execution import ranks
from ampatch.sweep.execution.autocast_baseline import AutocastBaseline
from ampatch.sweep.execution.autocast_off import AutocastOff
from ampatch.sweep.execution.directory import RunFiles
from ampatch.sweep.execution.plain_training import (
    PlainTraining,
    record_auto_script,
    record_losses_before_scale_loss,
)
from ampatch.sweep.execution.recognition import Recognition
from ampatch.sweep.execution.runner import Runner, TrialProgress
from ampatch.sweep.execution.seeding import ScriptSeeds, seed_everything, skip_random_draws
from ampatch.sweep.json_files import from_json, write_json
from ampatch.sweep.kinds import FRAMEWORK, UNKNOWN_KIND, Kind
from ampatch.sweep.measure.recorder import Recorder
from ampatch.sweep.measure.run_record import Measured
from ampatch.sweep.trial import AS_IT_IS, BASE, Case, Trial
from ampatch.torch_private import late_threads

_SITE_PACKAGES = tuple(
    os.path.join(path, "")
    for path in (*map(sysconfig.get_path, ("purelib", "platlib")), Path(torch.__file__).parents[1])
)
_GUARD = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the sweep, or this process, sends SIGKILL next
if os.fork():
    os._exit(0)  # so the guard is not a child of the script, which may wait for all its children
os.read(0, 1)
os.killpg(os.getpgrp(), signal.SIGKILL)
"""


def run(request: dict[str, Any]) -> int:
    """Run the trial of this request; returns the exit code."""
    runner, trial = from_json(Runner, request["runner"]), from_json(Trial, request["trial"])
    files = RunFiles.of(runner.directory.resolve(), trial)  # the script may change the directory
    under_torchrun = runner.processes is not None
    rank = int(os.environ["RANK"]) if under_torchrun else 0
    _end_with_parent(request["guard"], under_torchrun)
    signal.signal(signal.SIGTERM, _exit_by_signal)
    setup = _TrainingSetup(runner, trial.case, None if rank else files.progress)
    setup.start()
    if trial.case.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    seed_everything(trial.seed)
    skip_random_draws(request.get("drawn", 0))  # as many as the fork server's imports drew
    script_seeds = ScriptSeeds(trial.seed, runner.override_seeds)
    script_seeds.watch()
    writer = None if rank else _MeasuredWriter(files.measured, setup, script_seeds)
    environment_before = dict(os.environ)
    ending = _run_to_its_end(runner.program, runner.script_arguments(trial))
    if request["list_imports"] and not ending.exit_code:
        variables = changed_variables(environment_before)
        write_json(files.imports, {"modules": _site_package_modules(), "variables": variables})
    if under_torchrun:
        ranks.write_ending(ending.error)
    if writer is not None:
        writer.write(ending.error)
    signal.signal(signal.SIGTERM, _exit_by_signal)
    if under_torchrun:
        late_threads.let_gloo_finish()
    # Without this wait, C++ threads that still run may abort the process at exit.
    late_threads.wait_until_idle(device_figures.used_accelerators())
    return ending.exit_code


def _exit_by_signal(number: int, _: Any) -> None:
    sys.exit(128 + number)


def _run_to_its_end(program: Program, arguments: Sequence[str]) -> Ending:
    """Run the script, and ignore SIGTERM from its end until the measurements are written.

    torchrun sends SIGTERM when another rank fails; rank 0 may then be writing its measurements.
    """
    try:
        ending = program.run(arguments)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit as exit_request:  # SIGTERM after the script's end, or an excepthook exits
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return make_ending(exit_request)
    return ending


class _MeasuredWriter:
    """Writes what was measured to a file when the script has ended.

    Threads and exit handlers of the script may train or log after that.  The exit handler of this
    class was registered first, so it runs last and adds what they did.
    """

    def __init__(self, path: Path, setup: _TrainingSetup, script_seeds: ScriptSeeds) -> None:
        self._path, self._setup, self._script_seeds = path, setup, script_seeds
        self._error = ""
        self._written_count: int | None = None  # the recorder's `num_notices` at the last write
        self._process = os.getpid()
        atexit.register(self._complete)

    def write(self, error: str) -> None:
        """Write the file; `error` is the exception that ended the script.

        A forked copy of the process writes nothing, because it has recorded only some steps.
        """
        if os.getpid() != self._process:
            return
        recorder = self._setup.recorder
        self._error, self._written_count = error, recorder.num_notices
        try:
            measured = recorder.measured()
        except RuntimeError as device_error:  # a device that has failed returns no more values
            measured = Measured(error=describe(device_error))
        measured.error = error or measured.error
        measured.own_seed = self._script_seeds.first_call
        measured.autocast_off = self._setup.autocast_off.lines
        measured.kind = self._setup.kind()
        measured.casts_nothing = self._setup.casts_nothing()
        write_json(self._path, measured)

    def _complete(self) -> None:
        if self._written_count not in (None, self._setup.recorder.num_notices):
            self.write(self._error)
            late_threads.wait_until_idle(device_figures.used_accelerators())


class _TrainingSetup:
    """Prepares the process for the case, and connects the recorder.

    `progress` is the file for the trial's progress; None in ranks other than the first.
    """

    def __init__(self, runner: Runner, case: Case, progress: Path | None) -> None:
        self._case, self._expected_kind, self._probe = case, runner.kind, runner.probe
        self._progress = progress
        self.autocast_off = AutocastOff()
        steps = None if counts_its_steps(runner.arguments) else runner.steps
        self.recorder = Recorder(self._report, steps)
        self._recognition: Recognition | None = None
        self._forwards: OutermostForwards | None = None

    def kind(self) -> Kind:
        """The kind of the script, if this run recognizes it."""
        return UNKNOWN_KIND if self._recognition is None else self._recognition.kind

    def casts_nothing(self) -> bool:
        """Whether the script ran as under `run --auto`, and nothing was cast."""
        return self._forwards is not None and not self._forwards.has_cast

    def start(self) -> None:
        """Install what the case needs, and connect the recorder."""
        case, kind = self._case, self._expected_kind
        if case.engine == AUTOCAST:  # before an apex package copies the public functions
            AutocastBaseline(getattr(torch, case.dtype), self.recorder).install()
        if case.engine == AS_IT_IS:
            children.start(is_auto=False)
            plain_training = PlainTraining(self.recorder, AUTOCAST)
            plain_training.start()
            framework_patches.wrap_backward(plain_training.framework_backward)
            return
        is_base = case.opt_level == BASE.opt_level
        is_automatic = kind.is_plain and not is_base
        if is_base or kind.lacks_initialize:
            self.autocast_off.install()
        children.start(is_automatic)
        if self._probe is not None:
            name, text = self._probe
            importlib.import_module(name).start(text, self.autocast_off, self._progress is not None)
        if is_base and not (self._probe and kind):
            self._recognition = Recognition(self.recorder, self.autocast_off)
            self._recognition.start()
        elif is_automatic:
            record_auto_script(self.recorder, environment.read())
            self._forwards = open_sessions()[-1].outermost_forwards
        else:
            ampatch.observe(self.recorder)
            if case.engine != AUTOCAST:  # `AutocastBaseline` reports unscaled losses itself
                record_losses_before_scale_loss(self.recorder)
            if "eps" in dict(case.settings):
                ampatch.observe(_EpsFloor(dict(case.settings)["eps"]))
            if kind.name == FRAMEWORK:
                framework_patches.install_integration(kind.framework)
            _end_without_initialize()

    def _report(self, steps: int, loss: float | None) -> None:
        if self._progress is not None:
            write_json(self._progress, TrialProgress(steps, loss, self.kind()))


class _EpsFloor:
    """An observer that raises every eps to at least `smallest` before each optimizer step."""

    def __init__(self, smallest: float) -> None:
        self._smallest = smallest

    def on_step_begin(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            if "eps" in group:
                group["eps"] = max(group["eps"], self._smallest)


def _end_without_initialize() -> None:
    """End the script if it steps an optimizer before it calls `initialize`."""

    def end(*_: Any) -> None:
        raise SystemExit(0)

    hook = register_optimizer_step_pre_hook(end)
    ampatch.observe(SimpleNamespace(on_initialize=lambda properties: hook.remove()))


def changed_variables(before: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that are new, or have another value than `before`."""
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _site_package_modules() -> list[str]:
    """The modules that are imported from site-packages, in the order of their imports."""
    modules = [(name, getattr(module, "__spec__", None)) for name, module in sys.modules.items()]
    return [
        name
        for name, spec in modules
        if spec and spec.name == name and (spec.origin or "").startswith(_SITE_PACKAGES)
    ]


def _end_with_parent(pipe: int | None, under_torchrun: bool) -> None:
    """Have this process and its children killed when the sweep's process has ended.

    A guard process of the same group waits for the pipe to close.  A thread cannot do that, because
    C code may hold the GIL indefinitely.
    """
    if pipe is None:
        return
    if under_torchrun:  # torchrun's workers inherit no descriptors: open the parent's pipe
        pipe = os.open(f"/proc/{os.getppid()}/fd/{pipe}", os.O_RDONLY)
    subprocess.run([sys.executable, "-I", "-S", "-c", _GUARD], stdin=pipe, check=True)
    os.close(pipe)


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1])))
