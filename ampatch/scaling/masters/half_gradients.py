"""Gradients that autograd leaves in half weights, and their way to the masters.

Masters have them in FP32.  In a `scale_loss` block they are moved when the block ends, all in
batches.  What a plain `loss.backward()` leaves counts as unscaled: hooks move it at once, so that
`param_groups` show it, unless the script writes blocks; then it is moved before it is needed.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from ...torch_private.half_grads import is_in_backward, raw_grad, set_raw_grad
from ..gradient_state import GradientState
from ..master_weights import MasterWeights
from ..other_blocks import OtherBlocks
from ..tensor_lists import add_to, any_raw_grad, drop_raw_grads, take_up
from .arrivals import Arrivals
from .averages import Averages


class Script(Enum):
    """How the script runs its backward passes."""

    UNKNOWN = "neither a plain pass nor a block has come yet"
    WRITES_BLOCKS = "in `scale_loss` blocks only"
    HAS_PLAIN_PASSES = "outside blocks, perhaps in blocks too"


class HalfGradients:
    """The gradients of one optimizer's half weights.  It answers for their `.grad` (a `Keeper`).

    `others` knows of blocks for other optimizers.  `reduces` says whether DDP averages the pass
    of the last forward (None: there is no DDP), `is_unreduced` whether masters have gradients
    that DDP has not averaged yet: the one fact that waits for ranks.  Where DDP averages in FP32
    (`in_float`) it takes these from here, and leaves its averages here.
    """

    def __init__(self, masters: MasterWeights, state: GradientState, others: OtherBlocks) -> None:
        self.state = state
        self._masters = masters
        masters.keeper = self
        self._others = others
        self._arrivals = Arrivals(self._arrived)
        self.script = Script.UNKNOWN
        self.reduces: bool | None = None
        self.in_float = False
        self.is_unreduced = False
        self.averages = Averages()
        self._put: list[tuple[Tensor, Tensor, int]] = []  # by `put_back`, with versions

    # Moves

    def has_any(self) -> bool:
        """Whether a backward pass has left gradients in half weights, or some wait for ranks."""
        return bool(self.averages.waiting) or any_raw_grad(self._masters.lists()[0])

    def take(self, *, ends_block: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Move the gradients out of the half weights: masters, and their FP32 gradients."""
        if ends_block and self.reduces is not None:
            self.is_unreduced = not self.reduces
        self._put = []
        self.averages.settle()
        masters, grads = take_up(*self._masters.lists())
        if self.averages.are_there():
            halves = [self._masters.by_master[id(master)].half for master in masters]
            grads = [
                self.averages.widen(half, grad) for half, grad in zip(halves, grads, strict=True)
            ]
            left = [pair for pair in self._masters if id(pair.half) in self.averages.waiting]
            masters = [*masters, *(pair.master for pair in left)]
            grads = [*grads, *(self.averages.waiting[id(pair.half)] for pair in left)]
            self.averages.forget()
        return masters, grads

    def put_back(self, masters: set[int] | None = None) -> None:
        """Move gradients of (these) masters, by their ids, to where DDP averages them."""
        for half, master in self._masters:
            if master.grad is not None and (masters is None or id(master) in masters):
                if self.in_float:
                    self.averages.wait(half, master.grad)
                else:
                    grad = master.grad.to(half.dtype)
                    set_raw_grad(half, grad)
                    self._put.append((half, grad, grad._version))
                master.grad = None

    def _no_pass_came(self) -> bool:
        """Whether nobody has taken what `put_back` gave: another forward has come, say."""
        if self.averages.waiting:
            return True
        return bool(self._put) and all(
            raw_grad(half) is grad and grad._version == version for half, grad, version in self._put
        )

    def drop(self) -> None:
        """Forget the gradients in the half weights."""
        self._put = []
        drop_raw_grads(self._masters.lists()[0])
        self.averages.forget()

    def take_unreduced(self, half: Tensor) -> Tensor | None:
        """The FP32 gradient that waits for ranks, for the last time; or None."""
        return self.averages.waiting.pop(id(half), None)

    def note_average(self, half: Tensor, average: Tensor) -> None:
        """The average of the pass that is running, which will be in this tensor."""
        self.averages.made[id(half)] = average

    # Passes outside blocks

    def watch(self) -> None:
        """Move gradients as they come, unless the script writes `scale_loss` blocks."""
        if self.script is not Script.WRITES_BLOCKS:
            self._arrivals.watch(pair.half for pair in self._masters)

    def watch_anew(self) -> None:
        """As `watch`, after some half weights have left."""
        is_watching = bool(self._arrivals)
        self._arrivals.forget()
        if is_watching:
            self.watch()

    def note_block(self) -> None:
        """A block begins, and `script` is unknown yet: blocks move gradients in batches."""
        self.script = Script.WRITES_BLOCKS
        self._arrivals.forget()

    def _arrived(self, half: Tensor) -> None:
        """A pass outside blocks has left a gradient; what DDP is going to average stays there."""
        is_plain = not (self.state.in_block or self._others.open_blocks) and self.reduces is None
        if is_plain and id(half) in self._masters.by_half:
            self.script = Script.HAS_PLAIN_PASSES
            self.grad_of_half(half)

    def add_to_masters(self) -> None:
        """Add what plain passes have left, unscaled, to the masters' gradients."""
        if self.state.in_block or not self.has_any():
            return
        self.state.finish_pending()
        still_waits = self.is_unreduced and self._no_pass_came()
        add_to(*self.take())
        self.is_unreduced = still_waits or self.reduces is False
        if self.script is Script.WRITES_BLOCKS and self.reduces is None:  # there are both
            self.script = Script.HAS_PLAIN_PASSES
            self.watch()

    def before_forward(self, reduces: bool | None, in_float: bool, unscaled: bool) -> None:
        """An outermost forward of a model begins: what was written into masters reaches it.

        Gradients that earlier passes without `scale_loss` left are added up in FP32 before the
        next ones come.  `reduces` says whether DDP will average those over the ranks; then it gets
        what it has not averaged yet where it looks for it: in the half weights, or (`in_float`)
        in `averages`.  With
        a loss scale (not `unscaled`) it is for the block to do that.  Gradients that another
        block left scaled stay where they are.
        """
        self.in_float = in_float
        if not (self.state.in_block or is_in_backward()):
            self._masters.before_forward()
            here = not (self._others.left_scaled or torch.is_inference_mode_enabled())
            if here and (unscaled or reduces is None):
                self.add_to_masters()
                if reduces and self.is_unreduced:
                    self.put_back()
        self.reduces = reduces

    # `.grad` of half weights

    def grad_of_half(self, half: Tensor) -> Tensor | None:
        """The master's gradient, what a plain backward pass has left added."""
        master = self._masters.by_half[id(half)].master
        self.averages.settle()
        grad = raw_grad(half)
        if grad is not None:
            with torch.inference_mode(False):
                self.state.finish_pending()
                set_raw_grad(half, None)
                add_to([master], [self.averages.widen(half, grad.float())])
            if self.reduces is not None:
                self.is_unreduced = not self.reduces
        earlier = self.take_unreduced(half)
        if earlier is not None:
            add_to([master], [earlier])
        return master.grad

    def set_grad_of_half(self, half: Tensor, grad: Tensor | None) -> None:
        """Take a gradient, FP32 or half, in the place of the master's."""
        set_raw_grad(half, None)
        self.averages.forget_of(half)
        master = self._masters.by_half[id(half)].master
        master.grad = None if grad is None else grad.float()
        state = self.state
        if state.aside:  # inside a block
            state.aside = [(param, held) for param, held in state.aside if param is not master]
