"""One step of a framework (Lightning), which calls the model or parts of it."""

from __future__ import annotations


class Step:
    """`training_step` is a method of the model and computes the loss too.

    Under DistributedDataParallel the framework sends it through the model's own `__call__`
    (`is_sent_through_call`): the first call is then not the model's forward, and nothing is to be
    cast around it.
    """

    def __init__(self, is_sent_through_call: bool) -> None:
        self._is_sent = is_sent_through_call
        self._calls: list[bool] = []  # whether each running one is the step

    def enters(self) -> bool:
        """The model is called; whether that is the step."""
        self._calls.append(self._is_sent)
        self._is_sent = False
        return self._calls[-1]

    def leaves(self) -> bool:
        """A call of the model ends; whether that was the step."""
        return bool(self._calls) and self._calls.pop()
