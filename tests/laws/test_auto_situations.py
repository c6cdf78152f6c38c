"""The situations of O1, and random programs, under `ampatch run --auto`: scripts that have
`backward()` and `step()`.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import drivers
import programs
import pytest
import test_situations
import torch
from drivers import INIT_SCALE, SGD, Ampatch
from situations_graphs import TURNS
from test_situations import ROWS, check
from torch import Tensor

from ampatch import auto
from ampatch.session.facade import Session

REFUSED = "refused: tests/auto/ has the message"
UNSCALED = "hooks get unscaled gradients, or are refused"
IN_BFLOAT16 = {
    *("accumulator_hooks", "multi_grad_hook_between_forward_and_backward"),
    *("full_backward_hooks_see_gradients", "a_layer_wise_step_in_module_hooks"),
    "full_backward_hooks_read_their_weights_gradients",
}
"""Where the situation looks at scaled gradients: without a scale it sees the same here."""
NOT_HERE = {
    "a_function_with_custom_fwd_and_bwd": REFUSED,
    "an_autocast_region_in_another_half_dtype": REFUSED,
    "a_whole_loop_inside_autocast": REFUSED,
    "two_sessions_in_two_half_dtypes": REFUSED,
    **{f"sessions_that_take_turns_{plan}": "--auto has one session" for plan in TURNS},
    "two_threads_that_meet_in_backward": "passes take turns: tests/auto/test_auto_control.py",
    "schedules_and_param_groups_with_their_own_rates": "its optimizer is there before the start",
}


class Auto(Ampatch):
    session: Session | None = None

    def start(self, net: Any, make: Any = SGD, **settings: Any) -> tuple[Any, Any]:
        if self.session is None:
            default = "dynamic" if self.half is torch.float16 else 1.0
            scale = settings.get("loss_scale", default)
            self.session = auto.start({"dtype": self.half, "loss_scale": scale})
            if scale == "dynamic":
                self.session.scalers[0].set(settings.get("init_scale", INIT_SCALE))
        nets, optimizers = drivers._made(net, make, self.device)
        return self._started(net, nets, optimizers)

    def scaled(self, loss: Tensor, optimizers: Any, **block: Any) -> AbstractContextManager[Tensor]:
        return contextlib.nullcontext(loss)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "row, half",
    [
        pytest.param(row, half, id=row.name)
        for row, level, half in (param.values for param in ROWS)
        if level == "O1" and row.name not in NOT_HERE
        if half == ("bf16" if row.name in IN_BFLOAT16 else row.halves.split()[0])
    ],
)
def test_situation(row, half, caplog, monkeypatch):
    monkeypatch.setattr(test_situations, "Ampatch", Auto)
    check(row, "O1", half, caplog)


NOT_PLAYED = {
    "hook a module's backward": UNSCALED,
    "hook_an_accumulator": UNSCALED,
    "block_fails": "there are no blocks",
    "overflow": "there is one loss scale: tests/auto/test_auto_control.py",
}


@pytest.mark.parametrize("seed", range(20))
def test_program(seed, monkeypatch):
    monkeypatch.setattr(programs, "Ampatch", Auto)
    monkeypatch.setattr(programs, "SCALING", {})
    actions = programs.program(seed)
    programs.replay("O1", "fp16", [(name, n) for name, n in actions if name not in NOT_PLAYED])


def test_what_is_left_out_exists():
    assert NOT_HERE.keys() | IN_BFLOAT16 <= {param.values[0].name for param in ROWS}
    assert NOT_PLAYED.keys() <= programs.ACTIONS.keys()
