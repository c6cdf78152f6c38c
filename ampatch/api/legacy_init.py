"""apex's oldest API: `init` patches torch and returns a handle that scales losses.

    handle = ampatch.init()
    optimizer = handle.wrap_optimizer(optimizer)
    ...
    with optimizer.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

New code should call `ampatch.initialize`: it knows the models, so it can cache half copies of
weights during a forward, and name parameters in messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..config import environment
from ..config.opt_levels import properties_for
from ..config.validation import whole_number
from ..errors import AmpatchError
from ..log import logger, set_verbosity
from ..scaling.scale_loss_block import PlainBlock
from ..session.session import Session, registry
from ..types import Optimizer


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> Handle:
    """Cast the arguments of torch's functions as O1 does, in the whole process.

    Returns a `Handle`.  Calls in DataLoaders and in hooks of backward passes are not cast.  In
    models at O2 and O3, only registered functions of the user, and calls that mix FP32 and half,
    are cast.

    Args:
        enabled: False returns a handle that does nothing.
        loss_scale: `"dynamic"` or a positive number.
        enable_caching: stored as `has_cache` and otherwise ignored.  `init` knows no models, so
            weights are cast at each use.
        verbose: log more than warnings.
        allow_banned: whether `binary_cross_entropy` on half tensors runs in FP32 with a
            warning (True) or raises `NotImplementedError`.

    In-place functions such as `Tensor.exp_` raise `NotImplementedError` on half tensors.

    While a handle is active, a second `init` returns the same handle, and warns if its arguments
    differ.  After `handle._deactivate()` it returns a new one.

    The environment variables `AMPATCH_OPT_LEVEL` (`O0` or `O1`), `AMPATCH_DTYPE`,
    `AMPATCH_LOSS_SCALE` and `AMPATCH_ENABLED` (`0`) apply here too.

    Raises:
        TypeError, ValueError: an argument or a variable is wrong.
        AmpatchError: `AMPATCH_OPT_LEVEL` is O2 or O3, which need the models.
    """
    replaced = environment.read()
    dtype, level = replaced.get("dtype", "float16"), replaced.get("opt_level", "O1")
    loss_scale = replaced.get("loss_scale", loss_scale)
    if level not in ("O0", "O1", "O4"):
        raise AmpatchError(
            f"ampatch.init(): AMPATCH_OPT_LEVEL={level} needs a converted model, and init "
            "knows no models. Expected O0 or O1; call ampatch.initialize(model, optimizer) "
            f"in the script for {level}."
        )
    if level == "O0" or not replaced.get("enabled", True):
        enabled = False
    arguments = {"enabled": enabled, "loss_scale": loss_scale, "allow_banned": allow_banned}
    for session in registry.sessions:
        if session.init_handle is not None:
            return _existing_handle(session, arguments)
    set_verbosity(1)
    level = level.replace("O0", "O1")
    properties = properties_for(level, dtype, verbosity=1, patch_scope="process", **arguments)
    session = Session(properties, has_apex_tables=True)
    session.init_handle = Handle(session, has_cache=bool(enable_caching))
    session.open([], [])
    (logger.info if verbose else logger.debug)("ampatch.init: %s", properties)
    return session.init_handle


def _existing_handle(session: Session, arguments: dict[str, Any]) -> Handle:
    differing = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if getattr(session.properties, name) != value
    ]
    if differing:
        logger.warning(
            "ampatch.init(%s): a handle is already active and is returned unchanged. For other "
            "settings call handle._deactivate() first.",
            ", ".join(differing),
        )
    return session.init_handle


class Handle:
    """What `init` returns: calls are cast until `_deactivate()` or `ampatch.deactivate()`.

    A handle that is not active, or was made with `enabled=False`, passes losses
    through unscaled.
    """

    def __init__(self, session: Session, has_cache: bool = True) -> None:
        self._session = session
        self.has_cache = has_cache  # the argument `enable_caching` of `init`

    def is_active(self) -> bool:
        """Whether functions are cast and losses scaled."""
        return self._session.is_open and self._session.properties.enabled

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    def remove_cache(self, param: Tensor) -> None:
        """Drop half copies of a weight, after a write to it that ampatch cannot see."""
        self._clear_cache()

    def scale_loss(
        self, loss: Tensor, optimizer: Optimizer | WrappedOptimizer
    ) -> AbstractContextManager[Tensor]:
        """Context manager: yields the scaled loss; after it gradients are unscaled.

        An optimizer that is not managed yet is managed from now on: its `step()` does
        nothing after an overflow.

        Raises `AmpatchError` for an optimizer that `ampatch.initialize` manages.
        """
        if isinstance(optimizer, WrappedOptimizer):
            return optimizer.scale_loss(loss)
        if not self.is_active():
            return PlainBlock(loss)
        return self._scale_loss_block(loss, optimizer, loss_id=0)

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> WrappedOptimizer:
        """Wrap an optimizer: it gets `scale_loss`, and a loss scale for each of `num_loss` losses.

        Raises `TypeError` or `ValueError` for a wrong `num_loss`.
        """
        whole_number(f"wrap_optimizer(num_loss={num_loss!r})", num_loss, least=1)
        if not self.is_active():
            return WrappedOptimizer(optimizer, self, range(1))
        self._managed_optimizer(optimizer)
        return WrappedOptimizer(optimizer, self, self._session.add_scalers(num_loss))

    def _scale_loss_block(
        self, loss: Tensor, optimizer: Any, loss_id: int
    ) -> AbstractContextManager[Tensor]:
        return self._session.scale_loss_block(loss, [self._managed_optimizer(optimizer)], loss_id)

    def _managed_optimizer(self, optimizer: Any) -> Any:
        session, managed = registry.objects.find(optimizer) or (self._session, None)
        if session is not self._session:
            raise AmpatchError(
                f"<{type(optimizer).__name__}> was given to ampatch.initialize; use "
                "ampatch.scale_loss for it, or leave it to the handle alone."
            )
        return managed or session.manage_optimizer(optimizer)

    def _clear_cache(self) -> None:
        self._session.drop_copies()

    def _deactivate(self) -> None:
        """Remove the patches and restore the optimizers' own methods."""
        self._session.close()


class WrappedOptimizer:
    """An optimizer and its losses: what `Handle.wrap_optimizer` returns.

    `scale_loss(loss)` uses the loss scales in turn, and starts again after `step`.
    Every other attribute is the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, handle: Handle, loss_ids: range) -> None:
        self._optimizer = optimizer
        self._handle = handle
        self._loss_ids = loss_ids
        self._num_losses_scaled = 0

    def scale_loss(self, loss: Tensor) -> AbstractContextManager[Tensor]:
        """Context manager: yields the scaled loss; after it gradients are unscaled."""
        if not self._handle.is_active():
            return PlainBlock(loss)
        loss_id = self._loss_ids[self._num_losses_scaled % len(self._loss_ids)]
        self._num_losses_scaled += 1
        return self._handle._scale_loss_block(loss, self._optimizer, loss_id)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step; it does nothing after an overflow in one of the losses."""
        self._num_losses_scaled = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle read attributes before `_optimizer` is set
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"WrappedOptimizer({self._optimizer!r})"
