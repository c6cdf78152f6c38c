"""The kinds of training scripts: which mixed precision a script has by itself.

The first run at O0 shows the kind (`execution/recognition.py`), and the rows follow from it.

* `AMPATCH`: the script calls `initialize` of ampatch or apex, or an integration of ampatch that it
  uses does.  The sweep sets the level of this call.
* `TORCH_AMP`: it enters torch.autocast.  The row `autocast` runs the script unchanged; in the other
  rows its regions and its GradScaler are off, and the levels are applied as for `NO_AMP`.
* `NO_AMP`: levels are applied as by `ampatch run --auto`, which has O0 and O1 alone.
* `FRAMEWORK`: a framework runs the training loop; O1 to O3 come through `ampatch.integrations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

AMPATCH = "ampatch"
TORCH_AMP = "torch.amp"
NO_AMP = "none"
FRAMEWORK = "framework"
LATE = "ampatch.initialize was called after an optimizer step"


class Framework(NamedTuple):
    """A framework that runs training loops, and how a script uses ampatch with it.

    `lines` turn ampatch on in a script; the settings stand at `{}`.  Then the module `integration`
    calls `initialize`.  Both are "" where the script calls it.
    """

    modules: tuple[str, ...]  # that have its training loops
    title: str
    integration: str = ""
    lines: str = ""

    def line(self, settings: Sequence[str]) -> str:
        """The lines, with settings such as `opt_level="O2"`."""
        return self.lines.format(", ".join(settings)).replace(", )", ")")


FRAMEWORKS = {
    "lightning": Framework(
        ("lightning.pytorch", "pytorch_lightning"),
        "Lightning",
        "ampatch.integrations.lightning.trainer",
        "from ampatch.integrations.lightning import AmpatchPrecision\n"
        "trainer = Trainer(..., plugins=[AmpatchPrecision({})])",
    ),
    "transformers": Framework(
        ("transformers.trainer",),
        "transformers",
        "ampatch.integrations.transformers",
        "from ampatch.integrations.transformers import AmpatchTrainerMixin\n"
        "class MyTrainer(AmpatchTrainerMixin, Trainer): pass\n"
        "trainer = MyTrainer(..., {})",
    ),
    "accelerate": Framework(
        ("accelerate",),
        "accelerate",
        "ampatch.integrations.accelerate",
        "from ampatch.integrations.accelerate import AmpatchAccelerator\n"
        "accelerator = AmpatchAccelerator(..., {})",
    ),
    "fabric": Framework(
        ("lightning.fabric", "lightning_fabric"),
        "Lightning Fabric",
        "ampatch.integrations.lightning.fabric",
        "from ampatch.integrations.lightning import AmpatchFabricPrecision\n"
        "fabric = Fabric(..., plugins=[AmpatchFabricPrecision({})])",
    ),
    "ignite": Framework(("ignite.engine",), "ignite"),
    "timm": Framework(("timm",), "timm"),
}
"""In the order in which they are looked for: a framework that calls another comes first."""


@dataclass(frozen=True)
class Kind:
    """The kind of a script: `name` is one of the constants above, or "" while it is unknown."""

    name: str = ""
    framework: str = ""  # that runs the loop, or whose integration calls `initialize`
    places: tuple[str, ...] = ()  # the lines that entered torch.autocast
    dtypes: tuple[str, ...] = ()  # the half dtypes of these regions
    half_weights: tuple[str, ...] = ()  # half dtypes of weights at O0, then no FP32 baseline

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def is_plain(self) -> bool:
        """Whether it is plain PyTorch: no line names the model, so levels are set from outside."""
        return self.name in (TORCH_AMP, NO_AMP)

    @property
    def lacks_initialize(self) -> bool:
        """Whether the script calls no `initialize` itself; False while that is not known."""
        return self.name not in ("", AMPATCH)

    def line(self, settings: Sequence[str]) -> str:
        """The lines that turn ampatch on in such a script, with `settings` of `initialize`."""
        if self.name in (AMPATCH, FRAMEWORK) and self.framework:
            return FRAMEWORKS[self.framework].line(settings)
        arguments = ", ".join(["model", "optimizer", *settings])
        return f"model, optimizer = ampatch.initialize({arguments})"

    @property
    def needs(self) -> str:
        """Why such a script has no O2 and O3, and which lines it needs for them."""
        missing = "O2 and O3" if self.places else "O2, O3 or the row autocast"
        ignite_lines = (
            ", and instead of create_supervised_trainer: "
            "trainer = Engine(ampatch.integrations.ignite.supervised_training_step("
            "model, optimizer, loss_fn))"
        )
        return (
            "Without a call of initialize ampatch does not know which module is the model: it can "
            f"run O0 and O1, but not {missing}. To have them, import ampatch, and write after the "
            "model and the optimizer: model, optimizer = ampatch.initialize(model, optimizer); and "
            "instead of loss.backward(): with ampatch.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()" + ignite_lines * (self.framework == "ignite")
        )

    def description(self) -> str:
        """What the script has, and what that means for the rows; a sentence without a subject."""
        title = self.framework and FRAMEWORKS[self.framework].title
        loop = f", in a training loop of {title}" if title else ""
        if self.name == AMPATCH:
            return f"calls initialize of ampatch or apex{loop}"
        if not self.places:
            return f"has no mixed precision of its own{loop}"
        return (
            f"uses torch.amp ({', '.join(self.places)}){loop}: the row autocast runs it unchanged; "
            "in all other rows its autocast regions and its GradScaler are off"
        )


UNKNOWN = Kind()
