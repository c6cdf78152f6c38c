"""What a forward writes into lent copies of a model's weights goes to the weights.

In-place writes raise a copy's version.  Writes through `.data` raise none, and are found by
comparing values: those of all copies in forwards 1, 10, 100, ... with a graph and likewise without
one (some writes begin after a warm-up), and of the weights that were written to so from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..log import logger
from ..torch_private.devices import has_values, is_captured
from ..torch_private.dtensors import local_of
from ..torch_private.probes import computes_with_fakes, is_recording
from .lent_places import Tree


class LentWrites:
    """Finds what a forward has written into the copies, and writes it into the weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.compared: set[int] = set()  # ids of weights that are written to through `.data`
        self._has_warned = False

    def look(self, tree: Tree, copies: list[Tensor]) -> dict[int, Tensor]:
        """The values of the copies that `carry` is to compare, by their index.

        To be called in each forward of `tree.root`.
        """
        in_graph = torch.is_grad_enabled()
        tree.forwards[in_graph] += 1
        is_due = tree.forwards[in_graph] >= tree.next_look[in_graph]
        values: dict[int, Tensor] = {}
        if (is_due or self.compared) and not (is_recording() or computes_with_fakes()):
            tree.next_look[in_graph] *= 10 if is_due else 1
            for index, (parameter, copy) in enumerate(zip(tree.parameters, copies, strict=True)):
                is_wanted = is_due or id(parameter) in self.compared
                if is_wanted and has_values(copy.device) and not is_captured(copy):
                    values[index] = local_of(copy).detach().clone()
        return values

    def carry(
        self,
        parameters: list[Tensor],
        copies: list[Tensor],
        versions: list[int],
        values: dict[int, Tensor],
    ) -> None:
        """Write into parameters what was written into copies that had these versions and values."""
        for parameter, copy, version in zip(parameters, copies, versions, strict=True):
            if copy._version != version:
                self._carry(copy, parameter)
        for index in _written_unseen(copies, values) if values else ():
            self._carry(copies[index], parameters[index])
            self.compared.add(id(parameters[index]))

    def _carry(self, copy: Tensor, parameter: Tensor) -> None:
        """Elements that were not written keep their FP32 values."""
        with torch.no_grad():
            same = parameter.to(copy.dtype) == copy
            parameter.copy_(torch.where(same, parameter, copy.to(parameter.dtype)))
        if not self._has_warned:
            self._has_warned = True
            names = [name for name, one in self._model.named_parameters() if one is parameter]
            logger.warning(
                "%s writes into its weights in its own forward (%s). At O2 it has half copies "
                "there: what is written is rounded to %s, and small changes, as of an average, are "
                "lost. Write outside of the forward, or keep that part in FP32: "
                'overrides={"name.*": "float"}.',
                type(self._model).__name__,
                names[0] if names else "a weight",
                copy.dtype,
            )


def _written_unseen(copies: list[Tensor], values: dict[int, Tensor]) -> list[int]:
    """Where copies differ from these values.  Waits once for the device."""
    home = next(iter(values.values())).device
    flags = [
        _differ(before, local_of(copies[index]).detach()).any().to(home)
        for index, before in values.items()
    ]
    return [index for index, flag in zip(values, torch.stack(flags).tolist()) if flag]


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise; a NaN equals any NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())
