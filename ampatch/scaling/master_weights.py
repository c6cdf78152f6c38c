"""FP32 master copies of half weights.

The model keeps the half parameter, the optimizer gets the master.  The master is the truth, the
half weight is derived from it; what is written into either from outside is found by comparing
values, and the other follows.  Optimizers without half parameters have an empty mapping here;
there is no second code path for "no master weights".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..log import logger
from ..torch_private import foreach
from ..torch_private.devices import is_read_by_host
from ..torch_private.dtensors import is_dtensor
from ..torch_private.half_grads import (
    Keeper,
    is_redirected,
    redirect_grad,
    restore_grad,
    set_raw_grad,
)
from ..torch_private.probes import computes_with_fakes
from .masters.comparison import (
    Comparison,
    Pair,
    agrees,
    plain_data,
    set_plain_data,
    sync_master_from_half,
)
from .masters.writers import Writers
from .process_group import world_size
from .tensor_lists import round_down


class MasterWeights:
    """The pairs of one optimizer, and what is in both tensors of each.

    `by_half` and `by_master` have the pairs by an id, for reading.  `keeper` answers for `.grad`
    of the half weights and is set before the first `add`; `name_of` names weights in messages.
    `held_copy` gives up an FP32 copy of a half weight that the user's code holds, or None.
    """

    keeper: Keeper

    def __init__(
        self,
        name_of: Callable[[Tensor], str] = lambda half: "a weight",
        held_copy: Callable[[Tensor], Tensor | None] = lambda half: None,
    ) -> None:
        self.by_half: dict[int, Pair] = {}
        self.by_master: dict[int, Pair] = {}
        self.is_shared = False  # another optimizer has some of the masters
        self.listed: tuple[list[Tensor], list[Tensor]] | None = None  # `lists`, while they hold
        self._name_of = name_of
        self._held_copy = held_copy
        self._dtypes: dict[int, torch.dtype] = {}
        self._writers = Writers()
        self._comparison: Comparison | None = None
        self.of_one_rank: set[int] = set()  # ids of half weights whose masters ranks may not share

    def __len__(self) -> int:
        return len(self.by_half)

    def __iter__(self) -> Iterator[Pair]:
        return iter(list(self.by_half.values()))

    def of(self, half: Tensor) -> Parameter | None:
        """The master of a half parameter, or None."""
        pair = self.by_half.get(id(half))
        return None if pair is None else pair.master

    def half_of(self, master: Tensor) -> Tensor | None:
        """The half parameter of a master, or None."""
        pair = self.by_master.get(id(master))
        return None if pair is None else pair.half

    def lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """Halves and masters, in the order of `by_half`; other lists once a pair comes or goes."""
        if self.listed is None:
            pairs = self.by_half.values()
            self.listed = [pair.half for pair in pairs], [pair.master for pair in pairs]
        return self.listed

    # Pairs that come and go

    def add(
        self, half: Tensor, original: Tensor | None, master: Parameter | None = None
    ) -> Parameter:
        """Make the master of `half`, unless there is one already, and return it.

        It holds `original`, the FP32 values `half` was rounded from, where they
        are known, so that converting a model loses nothing.  Where a `state_dict()` from before is
        held, its values become the master's memory, as they would be an alias in FP32.
        """
        held = None
        if master is None:
            self.of_one_rank.add(id(half))
            values = held = self._held_copy(half)
            if values is None:
                values = half.detach().float() if original is None else original
            master = Parameter(values)
        grad = half.grad
        pair = Pair(half, master)
        self.by_half[id(half)] = self.by_master[id(master)] = pair
        self._dtypes[id(half)] = half.dtype
        self.listed = self._comparison = None
        self._writers.halves.note([half])
        self._writers.masters.note([master])
        set_raw_grad(half, None)
        if grad is not None and master.grad is None:
            master.grad = grad.float()
        redirect_grad(half, self.keeper)
        if held is not None:
            self._writers.handed_out.add(half, held)
        return master

    def remove(self, half: Tensor) -> None:
        """Forget a pair; the half weight has its gradient itself again, if no other keeps it."""
        pair = self.by_half.pop(id(half))
        self.of_one_rank.discard(id(half))
        del self.by_master[id(pair.master)], self._dtypes[id(half)]
        self.listed = self._comparison = None
        self._writers.forget(pair)
        grad = pair.master.grad
        if restore_grad(half, self.keeper) and grad is not None:
            set_raw_grad(half, grad.to(half.dtype))
            pair.master.grad = None

    @contextlib.contextmanager
    def as_plain(self, halves: set[int]) -> Iterator[None]:
        """Half weights (ids) are plain parameters meanwhile, so that their data can be exchanged.

        Their masters' gradients stay where they are.
        """
        concerned = [pair.half for pair in self if id(pair.half) in halves]
        for half in concerned:
            restore_grad(half, self.keeper)
        try:
            yield
        finally:
            for half in concerned:
                redirect_grad(half, self.keeper)

    # Values of single pairs

    def current(self, half: Tensor) -> Parameter | None:
        """The master of a half parameter, in step with what was written into the half; or None."""
        pair = self.by_half.get(id(half))
        if pair is None:
            return None
        if not computes_with_fakes():
            self._sync(pair)
        return pair.master

    def hand_out(self, half: Tensor, keep_vars: bool) -> Tensor | None:
        """As `current`, for a caller that hands out memory of the master, perhaps to be written.

        Returns an alias of the master, with `keep_vars` the master itself.
        """
        master = self.current(half)
        if master is None:
            return None
        alias = None if keep_vars else master.detach()
        if not computes_with_fakes():
            self._writers.handed_out.add(half, alias)
        return master if alias is None else alias

    def load(self, half: Tensor, values: Tensor) -> None:
        """Take a master's values from a checkpoint, which is about to be copied into `half` too."""
        master = self.by_half[id(half)].master
        with torch.no_grad():
            master.copy_(values)
        self._writers.masters.note([master])
        self._writers.handed_out.expect(half, master.detach().to(half.dtype))
        self.of_one_rank.discard(id(half))

    def broadcast(self, half: Tensor, send: Callable[[Tensor], None]) -> None:
        """Ranks have made `half` equal; `send` makes its master equal too, one rank's for all."""
        pair = self.by_half[id(half)]
        sync_master_from_half(pair)
        send(pair.master.detach())
        self._writers.note(pair)
        self.of_one_rank.discard(id(half))

    def are_equal_on_ranks(self, halves: set[int]) -> None:
        """The values that masters of these half weights (ids) were made of are on all ranks."""
        self.of_one_rank -= halves

    def touched(self, tensor: Tensor, data: Tensor | None) -> None:
        """`.data` of a half weight or a master was read, or (None) replaced."""
        if id(tensor) in self.by_half:
            self._writers.halves.touched(tensor, data)
            if (
                data is None
                and tensor.dtype is not self._dtypes[id(tensor)]
                and is_redirected(tensor)
            ):
                self._take_wide(self.by_half[id(tensor)])
        elif id(tensor) in self.by_master:
            self._writers.masters.touched(tensor, data)
            if data is None:
                self._comparison = None

    def _take_wide(self, pair: Pair) -> None:
        """The half weight was given data of another type: the master has it, the half rounds it."""
        values = plain_data(pair.half)
        if values.shape == pair.master.shape:
            with torch.no_grad():
                pair.master.copy_(values)
            set_plain_data(pair.half, values.to(self._dtypes[id(pair.half)]))
            self._writers.note(pair)

    # Values of all pairs

    def sync_from_half(self) -> None:
        """Bring half weights and masters together, whatever was written into either.

        All values are compared; elements of a half weight that still equal their master's
        rounding keep the master's precision.  On an accelerator nothing waits, unless a master
        is known to have been written into.
        """
        if not self.by_half:
            return
        halves, masters = self.lists()
        writers = self._writers
        if (
            writers.handed_out.copies
            or writers.masters.is_touched
            or not is_read_by_host(halves[0])
        ):
            self._follow_masters(masters)
        if self._comparison is None or not self._comparison.is_current():
            with torch.inference_mode(False):  # it is used outside as well
                self._comparison = Comparison(list(self.by_half.values()))
        for pair in list(self._comparison.differing()):
            self._sync(pair)

    def agree_on_ranks(self) -> None:
        """The first step of new masters begins: with several ranks all must have the same values.

        They take them from the half weights, which a library may have made equal, except those
        that `broadcast` made equal and those whose masters were written into, or handed out for
        it.
        """
        new, self.of_one_rank = self.of_one_rank, set()
        if world_size() <= 1:
            return
        changed = [
            pair
            for pair in self
            if id(pair.half) in new
            and not is_dtensor(pair.half)  # each rank has a part of its own
            and not self._writers.masters.is_new(pair.master)
        ]
        if changed:
            masters = [pair.master.detach() for pair in changed]
            foreach.copy_(masters, [pair.half.detach() for pair in changed])
        for pair in changed:
            self._writers.note(pair)

    def follow_halves(self) -> None:
        """Have masters take what was written into half weights, as far as versions tell."""
        if not self.by_half or computes_with_fakes():
            return
        writes = self._writers.halves
        if writes.is_touched or writes.moved(self.lists()[0]):
            for pair in self:
                if writes.may_be_new(pair.half):
                    self._sync(pair)

    def before_forward(self) -> None:
        """Have masters that were written into since the last step reach the half weights."""
        if self.by_half and not computes_with_fakes():
            self._follow_masters(self.lists()[1])

    def _follow_masters(self, masters: list[Tensor]) -> None:
        """Bring those pairs together whose masters were written into.

        Half weights alone written into can wait: an average swapped in may be swapped out again.
        """
        writers = self._writers
        if (
            writers.handed_out.copies
            or writers.masters.is_touched
            or writers.masters.moved(masters)
        ):
            for pair in self:
                if writers.is_suspect(pair) and writers.of(pair)[1]:
                    self._sync(pair)

    def _sync(self, pair: Pair) -> None:
        """Give one of the two what was written into the other.  Of both the master wins."""
        if pair.half.is_meta:
            return
        by_half, by_master = self._writers.of(pair)
        if by_master and not self._writers.halves.may_be_new(pair.half):
            self.of_one_rank.discard(id(pair.half))
        if not by_master and not is_read_by_host(pair.half):
            sync_master_from_half(pair)
        elif not agrees(pair):
            if by_master:
                if by_half:
                    self._warn_of_both(pair)
                with torch.no_grad():
                    pair.half.copy_(pair.master)
            else:
                sync_master_from_half(pair)
        self._writers.note(pair)

    def _warn_of_both(self, pair: Pair) -> None:
        logger.warning(
            "%s: both the half weight and its FP32 master were written into since the last "
            "step, with different values. The master's are kept. Write into one of them only; "
            "the masters are in ampatch.master_params(optimizer) and model.state_dict().",
            self._name_of(pair.half),
        )

    def note_shared(self, others: MasterWeights) -> None:
        """Another optimizer has stepped: pairs that are its too agree as they are."""
        for key in self.by_half.keys() & others.by_half.keys():
            self._writers.note(self.by_half[key])

    def push(self) -> None:
        """Round the masters into the half weights."""
        if not self.by_half:
            return
        halves, masters = self.lists()
        round_down(halves, masters)
        writers = self._writers
        writers.halves.note_all(halves)
        writers.masters.note_all(masters)
        if writers.handed_out.copies:
            for half in halves:
                writers.handed_out.renew(half)


def have_any_of(masters: MasterWeights, model: nn.Module) -> bool:
    """Whether some of them are masters of a model's parameters."""
    return any(id(parameter) in masters.by_half for parameter in model.parameters())
