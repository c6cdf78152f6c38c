"""Engines (`--engine`) start the trials of a sweep, on this machine or on a Ray cluster."""

from __future__ import annotations

import os

from ampatch.sweep.execution.engines.local import LocalEngine
from ampatch.sweep.execution.engines.protocol import Engine
from ampatch.sweep.execution.placement import THREADS, Placement, device_groups
from ampatch.sweep.execution.warm_starts import WarmStarts
from ampatch.sweep.options import SweepOptions


def make(options: SweepOptions) -> Engine:
    """The engine that the options name.

    Raises `EngineError` if a cluster cannot be reached or lacks what a trial needs.
    """
    if options.engine == "ray":
        from ampatch.sweep.execution.engines.ray import RayEngine

        return RayEngine(options)
    if options.devices:
        groups = device_groups(options.devices, options.nproc_per_node or 1)
        placements = [Placement(alone=len(groups) == 1, devices=group) for group in groups]
        return LocalEngine(placements, timed=Placement(devices=groups[0]))
    jobs = options.jobs or 1
    warm = None if options.cold or options.side_by_side or options.nproc_per_node else WarmStarts()
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    variables = ((THREADS, threads),) if jobs > 1 and THREADS not in os.environ else ()
    placements = [Placement(alone=jobs == 1, variables=variables)] * jobs
    return LocalEngine(placements, timed=Placement(), warm=warm)
