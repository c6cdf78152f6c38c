"""Where autocast for CUDA differs from us, `ampatch tables` says so: asked of the dispatcher."""

from collections.abc import Iterator

import torch
from op_calls import CALLS, OPS, Call, Sample, on_fake_cuda, same, samples, under_autocast

import ampatch
from ampatch.casting.tables import BANNED, BLACKLIST, PROMOTE, WHITELIST
from ampatch.diagnose.tables import differences

HALF, OTHER_HALF = torch.float16, torch.bfloat16
SAID = {
    f"{row.where}.{name}": differences.from_autocast(row, False)
    for row in (*WHITELIST, *BLACKLIST, *PROMOTE, *BANNED)
    for name in row.names
    if not row.done_by_torch
}
UNSEEN = {f"{where}.{name}" for where in ("torch", "torch.Tensor") for name in ("cov", "corrcoef")}
"""The product inside is half: no dtype that comes out shows it."""
MATRIX_NORM = "torch.linalg.matrix_norm"
"""Autocast refuses half inputs that we take: test_op_db_listed.py."""


def tried() -> Iterator[tuple[str, Call, Sample]]:
    """Calls that meet one row, in FP32 and half in turns, in the other half, and in both."""
    for name, calls in CALLS.items():
        limit = 12 if name == "sum_to_size" else 4  # a late sample of it has its own size
        for call in (call for call in calls if len(call.rows) == 1 and not call.in_place):
            for sample in samples(OPS[name], torch.float32, limit) if call.rows[0] in SAID else ():
                for mixture in (
                    sample.in_dtype(OTHER_HALF),
                    *sample.mixed(HALF),
                    *sample.mixed(HALF, OTHER_HALF),
                ):
                    yield call.rows[0], call, mixture


def test_autocast_differs_where_we_say_so_and_nowhere_else():
    calls = list(tried())
    theirs = [under_autocast(call, sample, HALF) for _, call, sample in calls]
    ampatch.initialize([], opt_level="O1", dtype=HALF, patch_scope="process", verbosity=0)
    met, differing = {row for row, *_ in calls}, set()
    for (row, call, sample), expected in zip(calls, theirs, strict=True):
        if not same(on_fake_cuda(call, sample), expected, values=False):
            differing.add(row)
    assert differing - {MATRIX_NORM} == {row for row in met if SAID[row]} - UNSEEN
    assert len(met) > 150
