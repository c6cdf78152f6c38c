"""FP32 parameters that replace, in pickles, half parameters without a master.

Pickle knows objects by identity.  So that a model and its optimizer, pickled
together in any order, come back with the same parameters, both ask here, and get
one object for as long as the pickle holds it.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn


class PlainParameters:
    """Widened parameters by the half ones that they stand for, held weakly."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref, weakref.ref]] = {}

    def of(self, half: Tensor) -> nn.Parameter:
        """The parameter that stands for `half`, with its values of now."""
        known, plain = (ref() for ref in self._of.get(id(half), (_nothing, _nothing)))
        if known is half and plain is not None:
            with torch.no_grad():
                plain.copy_(half)
            return plain
        plain = nn.Parameter(half.detach().float(), requires_grad=half.requires_grad)
        self._of = {key: refs for key, refs in self._of.items() if refs[1]() is not None}
        self._of[id(half)] = weakref.ref(half), weakref.ref(plain)
        return plain


def _nothing() -> None:
    return None
