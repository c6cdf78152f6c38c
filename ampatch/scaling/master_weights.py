"""FP32 master copies of half weights: gradients down to them, weights up from them.

The model keeps the half parameter, the optimizer gets the master.  The master is the truth, the
half weight is derived from it; what anybody writes into either is taken over.  Optimizers
without half parameters have an empty mapping here; there is no second code
path for "no master weights".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from ..log import logger
from ..torch_private import foreach
from ..torch_private.devices import is_read_by_host
from ..torch_private.half_grads import Keeper, dress, is_dressed, set_raw_grad, undress
from ..torch_private.probes import computes_with_fakes, set_grad_enabled
from .masters.comparison import (
    Agreement,
    Pair,
    agrees,
    plain_data,
    set_plain_data,
    take_over,
)
from .masters.handed_out import Shown
from .masters.pairs import Pairs
from .masters.writes import Writes
from .process_group import world_size


class MasterWeights(Pairs):
    """The pairs of one optimizer, and what is in both tensors of each.

    `keeper` answers for `.grad` of the half weights; `name_of` names them in messages.
    """

    def __init__(
        self, keeper: Keeper, name_of: Callable[[Tensor], str] = lambda half: "a weight"
    ) -> None:
        super().__init__()
        self._dtypes: dict[int, torch.dtype] = {}
        self.is_shared = False  # another optimizer has some of the masters
        self._keeper = keeper
        self._name_of = name_of
        self._halves_seen = Writes()
        self._masters_seen = Writes()
        self._shown = Shown()
        self._agreement: Agreement | None = None
        self._agreed: set[int] = set()  # ids of half weights whose masters all ranks share
        self._settled = True

    def add(
        self, half: Tensor, original: Tensor | None, master: Parameter | None = None
    ) -> Parameter:
        """Make the master of `half`, unless there is one already, and return it.

        It holds `original`, the FP32 values `half` was rounded from, where they
        are known, so that converting a model loses nothing.
        """
        if master is None:
            values = half.detach().float() if original is None else original
            master = Parameter(values, requires_grad=half.requires_grad)
        grad = half.grad
        pair = Pair(half, master)
        self.by_half[id(half)] = self.by_master[id(master)] = pair
        self._dtypes[id(half)] = half.dtype
        self._forget_lists()
        self._halves_seen.note([half])
        self._masters_seen.note([master])
        self._settled = False
        set_raw_grad(half, None)
        if grad is not None and master.grad is None:
            master.grad = grad.float()
        dress(half, self._keeper)
        return master

    def remove(self, half: Tensor) -> None:
        """Forget a pair; the half weight has its gradient itself again, if it is nobody else's."""
        pair = self.by_half.pop(id(half))
        del self.by_master[id(pair.master)], self._dtypes[id(half)]
        self._shown.forget(half)
        self._forget_lists()
        for seen, tensor in ((self._halves_seen, half), (self._masters_seen, pair.master)):
            seen.forget(tensor)
        grad = pair.master.grad
        if undress(half, self._keeper) and grad is not None:
            set_raw_grad(half, grad.to(half.dtype))
            pair.master.grad = None

    def _forget_lists(self) -> None:
        super()._forget_lists()
        self._agreement = None

    # Values

    @contextlib.contextmanager
    def undressed(self, halves: set[int]) -> Iterator[None]:
        """Half weights (ids) are plain parameters meanwhile, for who exchanges what is inside them.

        Their masters' gradients stay where they are.
        """
        concerned = [pair.half for pair in self if id(pair.half) in halves]
        for half in concerned:
            undress(half, self._keeper)
        try:
            yield
        finally:
            for half in concerned:
                dress(half, self._keeper)

    def current(self, half: Tensor) -> Parameter | None:
        """The master of a half parameter, what was written into the half taken over; or None."""
        pair = self.by_half.get(id(half))
        if pair is None:
            return None
        if not computes_with_fakes():
            self._bring_together(pair)
        return pair.master

    def show(self, half: Tensor, keep_vars: bool) -> Tensor | None:
        """As `current`, for who hands out memory of the master, to be written into perhaps.

        Returns an alias of the master, with `keep_vars` the master itself.
        """
        master = self.current(half)
        if master is None:
            return None
        alias = None if keep_vars else master.detach()
        if not computes_with_fakes():
            self._shown.add(half, alias)
        return master if alias is None else alias

    def load(self, half: Tensor, values: Tensor) -> None:
        """Take a master's values from a checkpoint, which is about to be copied into `half` too."""
        master = self.by_half[id(half)].master
        with torch.no_grad():
            master.copy_(values)
        self._masters_seen.note([master])
        self._shown.expect(half, master.detach().to(half.dtype))
        self._agreed.add(id(half))

    def agree(self, half: Tensor, send: Callable[[Tensor], None]) -> None:
        """Ranks have made `half` equal; `send` makes its master equal too, one rank's for all."""
        pair = self.by_half[id(half)]
        take_over(pair)
        send(pair.master.detach())
        self._note(pair)
        self._agreed.add(id(half))

    def touched(self, tensor: Tensor, data: Tensor | None) -> None:
        """Somebody has read `.data` of a half weight or a master, or (None) given it other data."""
        if id(tensor) in self.by_half:
            self._halves_seen.touched(tensor, data)
            if data is None and tensor.dtype is not self._dtypes[id(tensor)] and is_dressed(tensor):
                self._take_wide(self.by_half[id(tensor)])
        elif id(tensor) in self.by_master:
            self._masters_seen.touched(tensor, data)
            if data is None:
                self._agreement = None

    def _take_wide(self, pair: Pair) -> None:
        """The half weight was given data of another type: the master has it, the half rounds it."""
        values = plain_data(pair.half)
        if values.shape == pair.master.shape:
            with torch.no_grad():
                pair.master.copy_(values)
            set_plain_data(pair.half, values.to(self._dtypes[id(pair.half)]))
            self._note(pair)

    def settle(self) -> None:
        """Bring half weights and masters together, whatever was written into either.

        All values are compared; elements of a half weight that still equal their master's
        rounding keep the master's precision.  On an accelerator nothing waits, unless a master
        is known to have been written into.  With several ranks the first settling takes
        all values from the half weights, which somebody may have made equal, except those
        that `agree` made equal and those whose masters were written into, or handed out for it.
        """
        if not self.by_half:
            return
        halves, masters = self._lists()
        if not self._settled and world_size() > 1:
            self._take_first()
        self._settled = True
        self._agreed.clear()
        on_host = is_read_by_host(halves[0])
        if self._shown or self._masters_seen.is_touched or not on_host:
            self._follow_masters(masters)
        if self._agreement is None or not self._agreement.is_current():
            with torch.inference_mode(False):  # it is used outside as well
                self._agreement = Agreement(list(self.by_half.values()))
        for pair in list(self._agreement.differing()):
            self._bring_together(pair)

    def before_forward(self) -> None:
        """Have masters that were written into since the last step reach the half weights."""
        if self.by_half and not computes_with_fakes():
            self._follow_masters(self._lists()[1])

    def _follow_masters(self, masters: list[Tensor]) -> None:
        """Bring those pairs together whose masters were written into.

        Half weights alone written into can wait: an average swapped in may be swapped out again.
        """
        if self._shown or self._masters_seen.is_touched or self._masters_seen.moved(masters):
            for pair in self:
                asked = pair.half in self._shown or self._masters_seen.may_be_new(pair.master)
                if asked and self._who_wrote(pair)[1]:
                    self._bring_together(pair)

    def _take_first(self) -> None:
        changed = [
            pair
            for pair in self
            if id(pair.half) not in self._agreed and not self._masters_seen.is_new(pair.master)
        ]
        if changed:
            masters = [pair.master.detach() for pair in changed]
            foreach.copy_(masters, [pair.half.detach() for pair in changed])
        for pair in changed:
            self._note(pair)

    def _bring_together(self, pair: Pair) -> None:
        """Give one of the two what was written into the other.  Of both the master wins."""
        if pair.half.is_meta:
            return
        by_half, by_master = self._who_wrote(pair)
        if by_master and not self._halves_seen.may_be_new(pair.half):
            self._agreed.add(id(pair.half))
        if not by_master and not is_read_by_host(pair.half):
            take_over(pair)
        elif not agrees(pair):
            if by_master:
                if by_half:
                    self._tell_of_both(pair)
                with torch.no_grad():
                    pair.half.copy_(pair.master)
            else:
                take_over(pair)
        self._note(pair)

    def _who_wrote(self, pair: Pair) -> tuple[bool, bool]:
        """Whether the half weight was written into, and whether the master, as far as is known."""
        half, master = pair
        by_half, by_master = self._halves_seen.is_new(half), self._masters_seen.is_new(master)
        if half in self._shown:
            by_half = not self._shown.is_unchanged(half)
            return by_half, by_master or not by_half
        if not by_half and not self._halves_seen.may_be_new(half):
            by_master = self._masters_seen.may_be_new(master)
        return by_half, by_master

    def _tell_of_both(self, pair: Pair) -> None:
        logger.warning(
            "%s: both the half weight and its FP32 master were written into since the last "
            "step, with different values. The master's are kept. Write into one of them only; "
            "the masters are in ampatch.master_params(optimizer) and model.state_dict().",
            self._name_of(pair.half),
        )

    def _note(self, pair: Pair) -> None:
        self._halves_seen.note([pair.half])
        self._masters_seen.note([pair.master])
        if self._shown:
            self._shown.renew(pair.half)

    def note_shared(self, others: MasterWeights) -> None:
        """Another optimizer has stepped: pairs that are its too agree as they are."""
        for key in self.by_half.keys() & others.by_half.keys():
            self._note(self.by_half[key])

    def push(self) -> None:
        """Round the masters into the half weights."""
        if not self.by_half:
            return
        halves, masters = self._lists()
        found = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            foreach.copy_(halves, masters)
        finally:
            set_grad_enabled(found)
        self._halves_seen.note_all(halves)
        self._masters_seen.note_all(masters)
        if self._shown:
            self._shown.renew_all(halves)
