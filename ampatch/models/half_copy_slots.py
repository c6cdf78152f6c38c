"""The slots of weights, and the half copies that are in them while a forward runs.

A slot is an entry of `module._parameters`.  The slots of all modules are compared and set together,
by one call of the native part.

Copies are made in buckets, each by one node of the graph (`casting/half_copies`).  A weight that
cannot share a node is cast by itself.  While Dynamo traces, and in replicas of DataParallel, all
weights are cast one by one.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import native
from ..casting.half_copies import Buckets, cast_weights
from ..casting.special_ops import EMBEDDINGS, LARGE_WEIGHT
from ..log import logger
from ..torch_private.devices import has_values, is_stream_capturing
from ..torch_private.dtensors import local_of
from ..torch_private.modules import flat_weights, rebuild_flat_weights, submodule_dict
from ..torch_private.probes import is_traced_or_transformed
from ..torch_private.tensors import hooks_of
from .embeddings import EmbeddingParameters

Fp32Predicate = Callable[[nn.Module], bool]
"""Whether a module computes with FP32 weights in a half model."""

_version_of = operator.attrgetter("_version")


class Slot(NamedTuple):
    """An entry of a module's `_parameters`, and the parameter that it holds outside of forwards."""

    container: dict[str, Any]  # the module's `_parameters`
    name: str
    parameter: Tensor


def parameter_dicts(root: nn.Module, stays_fp32: Fp32Predicate) -> list[dict[str, Any]]:
    """`_parameters` of `root` and of its submodules, except submodules that stay FP32.

    TorchScript modules are left out: half copies cannot be put into them.
    """
    return [
        module._parameters
        for module in root.modules()
        if not (isinstance(module, torch.jit.ScriptModule) or stays_fp32(module))
    ]


def slots_of(dicts: list[dict[str, Any]]) -> list[Slot]:
    """A slot for each entry that these `_parameters` have now."""
    return [Slot(container, *entry) for container in dicts for entry in container.items()]


def fp32_slots(slots: list[Slot], excluded: Collection[int]) -> list[Slot]:
    """The slots of FP32 weights, without the weights in `excluded` (ids)."""
    return [
        slot
        for slot in slots
        if slot.parameter is not None
        and slot.parameter.dtype is torch.float32
        and not (excluded and id(slot.parameter) in excluded)
    ]


def split_embeddings(
    modules: list[nn.Module], slots: list[Slot]
) -> tuple[list[EmbeddingParameters], list[Slot]]:
    """Split `slots`: embeddings that look up rows of their FP32 weight; slots of all other weights.

    Such an embedding has one parameter, which is in no other slot, and which is large or gets
    sparse gradients.  A node that casts a single weight accepts no sparse gradients.
    """
    embedding_of = {id(m._parameters): m for m in modules if isinstance(m, EMBEDDINGS)}
    slots_in = Counter(id(slot.container) for slot in slots)
    slots_with = Counter(id(slot.parameter) for slot in slots)
    embeddings, others = [], []
    for slot in slots:
        module = embedding_of.get(id(slot.container))
        is_single = slots_in[id(slot.container)] == slots_with[id(slot.parameter)] == 1
        if (
            module is not None
            and is_single
            and (slot.parameter.numel() >= LARGE_WEIGHT or module.sparse)
        ):
            embeddings.append(EmbeddingParameters(module, slot.name))
        else:
            others.append(slot)
    return embeddings, others


class WeightSlots:
    """The slots of `root` and its submodules that get half copies, and buckets of their parameters.

    `model` is the managed model: `root`, or a module that contains it.  Parameters in `excluded`
    (ids) are left out.
    """

    def __init__(
        self,
        root: nn.Module,
        model: nn.Module,
        stays_fp32: Fp32Predicate,
        excluded: Collection[int],
    ) -> None:
        modules = list(root.modules())
        self.module_ids = set(map(id, modules))
        dicts = parameter_dicts(root, stays_fp32)
        # For `is_valid`: all parameters and submodules, and their number in each dict.
        self._all_dicts = [*dicts, *filter(None, map(submodule_dict, modules))]
        self._sizes = list(map(len, self._all_dicts))
        entries = [(items, *entry) for items in self._all_dicts for entry in items.items()]
        self._all_entries = _columns(entries)
        self.embeddings, slots = split_embeddings(modules, fp32_slots(slots_of(dicts), excluded))
        self._dicts, self._names, weights = _columns(slots)
        by_id = {id(weight): weight for weight in weights}
        self.weight_ids = set(by_id).union(id(params.parameter) for params in self.embeddings)
        self._rnns = [m for m in modules if isinstance(m, nn.RNNBase) and not stays_fp32(m)]
        self.rnn_weights = self._take_rnn_weights(by_id)
        self.buckets = Buckets(by_id.values(), root, model)
        self.parameters = [weight for weights in self.rnn_weights for weight in weights]
        self.parameters += [weight for bucket in self.buckets.lists for weight in bucket]
        order = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        # For each slot the index of its parameter in `parameters`.
        self._parameter_indices = [order[id(weight)] for weight in weights]
        self.attributes: list[dict] = list(map(vars, self.parameters))

    def _take_rnn_weights(self, by_id: dict[int, Tensor]) -> list[list[Tensor]]:
        """Take the weights of each RNN whose weights share one storage out of `by_id`.

        Their copies share a storage, too.  Otherwise cuDNN copies them at every forward, and warns.
        """
        lists: list[list[Tensor]] = []
        for rnn in self._rnns:
            weights = flat_weights(rnn)
            if weights and all(id(weight) in by_id for weight in weights):
                lists.append([by_id.pop(id(weight)) for weight in weights])
        return lists

    def is_valid(self) -> bool:
        """Whether the modules have the parameters and submodules that they had at first."""
        dicts, names, values = self._all_entries
        return list(map(len, self._all_dicts)) == self._sizes and all(
            map(operator.is_, map(dict.get, dicts, names), values)
        )

    def put(self, tensors: list[Tensor], instead_of: list[Tensor] | None = None) -> None:
        """Put `tensors`, one for each of `parameters`, in the slots.

        `instead_of` also has a tensor for each of `parameters`: only slots that still hold this
        tensor are set.  A tensor that the user's code has put in a slot stays.
        """
        columns = self._dicts, self._names, self._parameter_indices
        if not set_entries(*columns, tensors, instead_of):
            assert instead_of is not None
            present = zip(self.present_tensors(), self._parameter_indices, strict=True)
            self.put_by_slot([tensors[i] if now is instead_of[i] else now for now, i in present])
        elif self._rnns:
            self._rebuild_flat_weights()

    def _rebuild_flat_weights(self) -> None:
        for rnn in self._rnns:
            rebuild_flat_weights(rnn)

    def put_by_slot(self, tensors: list[Any]) -> None:
        """Put tensors, one for each slot, in all slots that still exist."""
        for container, name, tensor in zip(self._dicts, self._names, tensors, strict=True):
            if name in container:
                container[name] = tensor
        self._rebuild_flat_weights()

    def present_tensors(self) -> list[Any]:
        """The tensors that are in the slots now; None for a slot that no longer exists."""
        return list(map(dict.get, self._dicts, self._names))


def _columns(entries: Sequence[tuple[dict, str, Any]]) -> tuple[list[dict], list[str], list[Any]]:
    """The dicts, the names and the values of entries, such as `Slot`s."""
    return tuple(map(list, zip(*entries, strict=True))) or ([], [], [])  # type: ignore[return-value]


def set_entries(
    dicts: list[dict],
    names: list[str],
    indices: list[int],
    values: list[Any],
    expected: list[Any] | None,
) -> bool:
    """Set each entry `dicts[i][names[i]]` to `values[indices[i]]`.

    With `expected`, nothing is set unless every entry is `expected[indices[i]]`.  Returns whether
    the entries were set.

    In C++: `set_entries` of `weights.h`.
    """
    if expected is not None:
        present = map(dict.get, dicts, names)
        if not all(map(operator.is_, present, map(expected.__getitem__, indices))):
            return False
    deque(map(dict.__setitem__, dicts, names, map(values.__getitem__, indices)), maxlen=0)
    return True


def share_attributes(tensors: list[Tensor], attributes: list[dict[str, Any]]) -> None:
    """Let copies share the `__dict__` of their parameters, except subclasses of Tensor.

    Attributes that the user sets on a parameter (`p.lr_mult`) are then on its copy too.
    """
    for tensor, shared in zip(tensors, attributes, strict=True):
        if type(tensor) is Tensor:
            tensor.__dict__ = shared


if native.part is not None:
    set_entries = native.part.set_entries


def make_half_copies(
    weight_slots: WeightSlots, dtype: torch.dtype, own_nodes: bool
) -> list[Tensor]:
    """Half copies of `weight_slots.parameters`, in their order; see `cast_weights`."""
    if torch.is_inference_mode_enabled():  # inference tensors have no versions
        with torch.inference_mode(False), torch.no_grad():
            return make_half_copies(weight_slots, dtype, own_nodes)
    if is_traced_or_transformed():
        return [parameter.to(dtype) for parameter in weight_slots.parameters]
    copies: list[Tensor] = []
    for weights in weight_slots.rnn_weights:
        copies += cast_weights(weights, dtype, in_one_storage=True)
    bucketed = weight_slots.buckets.lists_to_cast()
    for weights in bucketed:
        copies += cast_weights(weights, dtype, own_nodes=own_nodes)
    if len(copies) == len(weight_slots.parameters) and len(bucketed) == len(
        weight_slots.buckets.lists
    ):
        return copies
    cast_so_far = [w for weights in (*weight_slots.rnn_weights, *bucketed) for w in weights]
    copy_of = dict(zip(map(id, cast_so_far), copies, strict=True))
    for weight in weight_slots.parameters:
        if id(weight) not in copy_of:
            [copy_of[id(weight)]] = cast_weights([weight], dtype, own_nodes=True)
    return [copy_of[id(weight)] for weight in weight_slots.parameters]


class SlotCopies:
    """Half copies of `weight_slots.parameters`, with their initial versions.

    If code reads `copy.data`, the copy's values are recorded too, because a write through `.data`
    does not bump the version.
    """

    def __init__(self, weight_slots: WeightSlots, dtype: torch.dtype, own_nodes: bool) -> None:
        self.weight_slots = weight_slots
        self.parameters: list[Tensor] = []  # a parameter for each of `copies`
        self.copies: list[Tensor] = []
        self._versions: list[int] = []
        self._recorded_values: dict[int, Tensor] = {}  # values of copies, by the index in `copies`
        self._indices: dict[int, int] | None = None  # the index in `copies`, by the id of the copy
        if weight_slots.parameters:
            self.copies = make_half_copies(weight_slots, dtype, own_nodes)
            self.parameters = list(weight_slots.parameters)
            share_attributes(self.copies, weight_slots.attributes)
            self._versions = list(map(_version_of, self.copies))

    def _index_of(self, copy: Tensor) -> int | None:
        if self._indices is None or len(self._indices) != len(self.copies):
            self._indices = {id(copy): index for index, copy in enumerate(self.copies)}
        return self._indices.get(id(copy))

    def parameter_of(self, copy: Tensor) -> Tensor | None:
        """The parameter that was cast to `copy`, or None if `copy` is another tensor."""
        index = self._index_of(copy)
        return None if index is None else self.parameters[index]

    def add(self, parameter: Tensor, copy: Tensor) -> None:
        """Add a copy that is made while the forward runs."""
        share_attributes([copy], [vars(parameter)])
        # KeyboardInterrupt may have left the other lists longer than `copies`.
        count = len(self.copies)
        self.parameters[count:] = [parameter]
        self._versions[count:] = [copy._version]
        self.copies.append(copy)

    def fp32_weight_of(self, copy: Tensor) -> Tensor | None:
        """The FP32 weight of `copy`, or None if the forward may have written into `copy`."""
        index = self._index_of(copy)
        if (
            index is None
            or copy._version != self._versions[index]
            or index in self._recorded_values
            or any(hooks_of(copy))
        ):
            return None
        return self.parameters[index]

    def record_values(self, copy: Tensor) -> None:
        """Record the present values of `copy`, for `write_changes_back` to compare."""
        index = self._index_of(copy)
        if index is None or index in self._recorded_values:
            return
        if has_values(copy.device) and not is_stream_capturing(copy):
            self._recorded_values[index] = local_of(copy).detach().clone()

    def write_changes_back(self, write_back: CopyWriteBack) -> None:
        """Write changes of the copies into their parameters."""
        now = list(map(_version_of, self.copies))
        if self._recorded_values or now != self._versions:
            values, self._recorded_values = self._recorded_values, {}
            versions, self._versions = self._versions, now
            write_back.copy_changes(self.parameters, self.copies, versions, values)


class CopyWriteBack:
    """Copies changes of one model's half copies to the parameters, and warns about the first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_warned = False

    def copy_changes(
        self,
        parameters: list[Tensor],
        copies: list[Tensor],
        versions: list[int],
        values: dict[int, Tensor],
    ) -> None:
        """Write changed copies into their parameters.

        `versions`: the recorded version of each copy.  `values`: by index, the recorded values of
        copies whose `.data` was read.
        """
        for parameter, copy, version in zip(parameters, copies, versions, strict=True):
            if copy._version != version:
                self._copy_changes_to_parameter(copy, parameter)
        for index in _changed_indices(copies, values) if values else ():
            self._copy_changes_to_parameter(copies[index], parameters[index])

    def _copy_changes_to_parameter(self, copy: Tensor, parameter: Tensor) -> None:
        """Write a changed copy into its parameter; unchanged elements keep their FP32 values."""
        with torch.no_grad():
            same = parameter.to(copy.dtype) == copy
            parameter.copy_(torch.where(same, parameter, copy.to(parameter.dtype)))
        if not self._has_warned:
            self._has_warned = True
            names = [name for name, param in self._model.named_parameters() if param is parameter]
            logger.warning(
                "%s writes to its weights in its own forward (%s). At O2 the forward writes to "
                "half copies: values are rounded to %s, and small updates (a moving average) are "
                "lost. Write outside of the forward, or keep that module in FP32: "
                'overrides={"name.*": "float"}.',
                type(self._model).__name__,
                names[0] if names else "a weight",
                copy.dtype,
            )


def _changed_indices(copies: list[Tensor], values: dict[int, Tensor]) -> list[int]:
    """The indices of copies that differ from these values.  Synchronizes with the device once."""
    device = next(iter(values.values())).device
    flags = [
        _differs_elementwise(before, local_of(copies[index]).detach()).any().to(device)
        for index, before in values.items()
    ]
    return [index for index, flag in zip(values, torch.stack(flags).tolist()) if flag]


def _differs_elementwise(before: Tensor, now: Tensor) -> Tensor:
    """Whether elements differ, elementwise; a NaN equals any NaN."""
    return (before != now) & ~(before.isnan() & now.isnan())


def put_while_traced(slots: list[Slot], dtype: torch.dtype) -> None:
    """Put half copies in slots while Dynamo traces, so that the casts are part of its graph."""
    copies: dict[int, Tensor] = {}
    for container, name, weight in slots:
        if id(weight) not in copies:
            copies[id(weight)] = weight.to(dtype)
        container[name] = copies[id(weight)]


def cast_replica(
    model: nn.Module, replica: nn.Module, dtype: torch.dtype, stays_fp32: Fp32Predicate
) -> None:
    """Cast the weights of a replica of `nn.DataParallel`, which are plain attributes there."""
    for module, replicated in zip(model.modules(), replica.modules(), strict=True):
        if stays_fp32(module):
            continue
        for name, weight in list(vars(replicated).items()):
            if name in module._parameters and getattr(weight, "dtype", None) is torch.float32:
                vars(replicated)[name] = weight.to(dtype)
        if isinstance(replicated, nn.RNNBase):
            rebuild_flat_weights(replicated)
