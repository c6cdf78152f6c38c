"""Every module of torch's own module database, forward and backward under O1.

The dtypes are those of autocast for CUDA, the values those of plain FP32.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from autocast_oracle import dtypes, module_dtypes, outcome
from matrix_kernels import FUSED, Kernels
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.utils._pytree import tree_leaves, tree_map_only

import ampatch

CAP = 2
"""Samples of each module in the default run; all of them under the `slow` marker."""

NO_ORACLE = {  # not to be had without CUDA; then all outputs have the dtype of the last listed call
    "nn.BCELoss": "float32",
    "nn.CTCLoss": "float32",
    "nn.GaussianNLLLoss": "float32",
    "nn.MultiMarginLoss": "float32",
    "nn.GRU": "half",
    "nn.GRUCell": "half",
    "nn.LSTM": "half",
    "nn.Transformer": "float32",
    "nn.TransformerEncoder": "float32",
    "nn.TransformerEncoderLayer": "float32",
    "nn.TransformerDecoderLayer": "float32",
}


def samples(info: Any, training: bool, cap: int | None) -> list:
    """Evenly chosen samples of torch's for one module, float32."""
    torch.manual_seed(0)
    infos = list(
        info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
        )
    )
    return infos if cap is None else infos[:: max(1, -(-len(infos) // cap))]


def build(info: Any, sample: Any, training: bool) -> nn.Module:
    """The sample's module, without randomness in its forward."""
    torch.manual_seed(0)
    arguments = sample.constructor_input
    module = info.module_cls(*arguments.args, **arguments.kwargs).train(training)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, (nn.MultiheadAttention, nn.RNNBase)):
            part.dropout = 0.0
    return module


def run(module: nn.Module, inputs: Any, training: bool) -> tuple[Any, dict[str, Tensor]]:
    """Outputs, and the gradients of parameters and float inputs by name."""
    torch.manual_seed(1)

    def fresh(leaf: Tensor) -> Tensor:
        return leaf.detach().clone().requires_grad_(training) if leaf.is_floating_point() else leaf

    args, kwargs = tree_map_only(Tensor, fresh, inputs)
    with torch.set_grad_enabled(training):
        output = module(*args, **kwargs)
    outs = [out for out in tree_leaves(output) if isinstance(out, Tensor) and out.requires_grad]
    if outs:
        sum(out.float().square().sum() for out in outs).backward()
    named = [*module.named_parameters(), *enumerate(tree_leaves((args, kwargs)))]
    return output, {
        str(name): leaf.grad
        for name, leaf in named
        if isinstance(leaf, Tensor) and leaf.grad is not None
    }


def error(result: Tensor, reference: Tensor, scale: float = 0.0) -> float:
    """Relative error of a whole tensor, against at least a hundredth of `scale`."""
    result, reference = result.detach(), reference.detach()
    assert result.shape == reference.shape
    if torch.equal(result, reference.to(result.dtype)):
        return 0.0
    good = reference.isfinite()
    assert torch.equal(good, result.isfinite())
    difference = (result.float() - reference.float())[good].norm()
    return float(difference / (reference.float()[good].norm() + scale / 100 + 1e-3))


class Trial(NamedTuple):
    """One sample: what plain FP32 and autocast make of it, and the model to try."""

    info: Any
    inputs: tuple
    expected: Any
    autocasts: Any
    model: nn.Module


def trial(info: Any, sample: Any, training: bool, half: torch.dtype) -> Trial:
    inputs = (sample.forward_input.args, sample.forward_input.kwargs)
    plain = build(info, sample, training)
    model = copy.deepcopy(plain)
    # As under autocast: fused kernels of nn.Transformer zero what is padded in the memory.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = outcome(run, plain, inputs, training)
        autocasts = outcome(module_dtypes, half, plain, *inputs[0], **inputs[1])
    finally:  # a module that autocast cannot run here skips the test
        torch.backends.mha.set_fastpath_enabled(True)
    return Trial(info, inputs, expected, autocasts, model)


def check(trial: Trial, training: bool, half: torch.dtype) -> None:
    """Refused as in FP32, or the dtypes of autocast and values near FP32's.

    Every kernel that multiplies matrices gets half ones, and none is fused, as under autocast.
    `LinearCrossEntropyLoss` in chunks is one operator of torch's, which autocast leaves in FP32.
    """
    with Kernels() as kernels:
        result = outcome(run, trial.model, trial.inputs, training)
    if isinstance(trial.expected, Exception):
        assert type(result) is type(trial.expected), (result, trial.expected)
        return
    if isinstance(result, Exception):
        raise result
    (outputs, grads), (plain_outputs, plain_grads) = result, trial.expected
    says = trial.autocasts
    if isinstance(says, Exception):
        dtype = {"float32": torch.float32, "half": half}[NO_ORACLE[trial.info.name]]
        says = [dtype] * len(dtypes(outputs))
    assert dtypes(outputs) == says
    in_chunks = getattr(trial.model, "options", None) is not None
    allowed = [{half}, {torch.float32}] if in_chunks else [{half}]
    assert not kernels.seen or kernels.dtypes() in allowed, kernels.seen
    assert not kernels.seen.keys() & FUSED
    tolerance = 0.02 if half is torch.float16 else 0.15
    for new, old in zip(tree_leaves(outputs), tree_leaves(plain_outputs), strict=True):
        assert error(new, old) < tolerance if isinstance(old, Tensor) else new == old
    assert grads.keys() == plain_grads.keys()
    norms = [float(grad[grad.isfinite()].norm()) for grad in plain_grads.values()]
    for name, grad in grads.items():
        assert grad.dtype is plain_grads[name].dtype
        assert error(grad, plain_grads[name], max(norms)) < 2 * tolerance, f"gradient of {name}"


SIZE = 30
MODULES = pytest.mark.parametrize(
    "infos",
    [
        pytest.param(module_db[start : start + SIZE], id=f"{module_db[start].name}..")
        for start in range(0, len(module_db), SIZE)
    ],
)
QUIET = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:LSTM with projections", "ignore:.*API of nested tensors"
)


@QUIET
@MODULES
@pytest.mark.parametrize(
    "training, half, cap",
    [
        pytest.param(True, torch.float16, CAP, id="train"),
        pytest.param(False, torch.bfloat16, CAP, id="eval"),
        *(
            pytest.param(training, half, None, marks=pytest.mark.slow)
            for training in (True, False)
            for half in (torch.float16, torch.bfloat16)
        ),
    ],
)
def test_modules(infos, training, half, cap):
    """All in one session."""
    trials = [
        trial(info, sample, training, half)
        for info in infos
        for sample in samples(info, training, cap)
    ]
    models = [trial.model for trial in trials]
    ampatch.initialize(models, opt_level="O1", dtype=half, verbosity=0)
    wrong = {}
    for number, case in enumerate(trials):
        failure = outcome(check, case, training, half)
        if failure is not None:
            wrong[f"{case.info.name}, {number}"] = repr(failure)
    assert wrong == {}


def refusals() -> list[tuple]:
    """(module's info, error sample) for everything torch's database says is refused."""
    torch.manual_seed(0)
    return [
        (info, refusal)
        for info in module_db
        if info.module_error_inputs_func is not None
        for training in (True, False)
        for refusal in info.module_error_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
        )
    ]


@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_what_torch_refuses_is_refused_in_the_same_words(half):
    cases = refusals()
    assert len(cases) > 60  # 66 on torch 2.10
    ampatch.initialize([], opt_level="O1", dtype=half, patch_scope="process", verbosity=0)
    for info, refusal in cases:
        built = refusal.module_error_input.constructor_input
        called = refusal.module_error_input.forward_input
        words = pytest.raises(refusal.error_type, match=refusal.error_regex)
        if refusal.error_on is ModuleErrorEnum.CONSTRUCTION_ERROR:
            with words:
                info.module_cls(*built.args, **built.kwargs)
            continue
        module = info.module_cls(*built.args, **built.kwargs)
        if info.name == "nn.NLLLoss":  # refused for being half and FP32, which O1 brings together
            assert module(*called.args, **called.kwargs).dtype is torch.float32
            continue
        with words:
            module(*called.args, **called.kwargs)
