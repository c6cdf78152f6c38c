"""The kinds of training scripts: which mixed precision a script has before the sweep.

The first run at O0 shows the kind (`execution/recognition.py`); the possible rows depend on it.

* `AMPATCH`: the script, or an integration of ampatch in it, calls `initialize` of ampatch or apex.
  The sweep sets the level of this call.
* `TORCH_AMP`: the script enters torch.autocast.  The row `autocast` runs it unchanged; in the other
  rows its regions and its GradScaler are off, and the levels are applied as for `NO_AMP`.
* `NO_AMP`: levels are applied as by `ampatch run --auto`, which has only O0 and O1.
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

    `lines` turn ampatch on in a script, with the settings in place of `{}`.  Then the module
    `integration` calls `initialize`.  Both are "" if the script has to call it.
    """

    modules: tuple[str, ...]  # modules of its training loops
    title: str
    integration: str = ""
    lines: str = ""

    def setup_lines(self, settings: Sequence[str]) -> str:
        """The lines that turn ampatch on, with settings such as `opt_level="O2"`."""
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
"""In the order in which they are looked for; a framework that calls another one comes first."""


@dataclass(frozen=True)
class Kind:
    """The kind of a script: `name` is one of the constants above, or "" while it is unknown."""

    name: str = ""
    framework: str = ""  # runs the training loop, or its integration calls `initialize`
    places: tuple[str, ...] = ()  # the lines that entered torch.autocast
    dtypes: tuple[str, ...] = ()  # the half dtypes of the autocast regions
    half_weights: tuple[str, ...] = ()  # half dtypes of weights at O0, which is then not FP32

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def is_plain(self) -> bool:
        """Whether it is plain PyTorch: no line names the model, so levels are set from outside."""
        return self.name in (TORCH_AMP, NO_AMP)

    @property
    def lacks_initialize(self) -> bool:
        """Whether the script calls no `initialize` itself; False if not known yet."""
        return self.name not in ("", AMPATCH)

    def setup_lines(self, settings: Sequence[str]) -> str:
        """The lines that turn ampatch on in such a script, with `settings` of `initialize`."""
        if self.name in (AMPATCH, FRAMEWORK) and self.framework:
            return FRAMEWORKS[self.framework].setup_lines(settings)
        arguments = ", ".join(["model", "optimizer", *settings])
        return f"model, optimizer = ampatch.initialize({arguments})"

    @property
    def needs(self) -> str:
        """Why such a script has no O2 and O3, and which lines it needs for them."""
        missing = "O2 and O3" if self.places else "O2, O3 or the row autocast"
        text = (
            "Without a call of initialize ampatch does not know which module is the model: it can "
            f"run O0 and O1, but not {missing}. To have them, import ampatch, and write after the "
            "model and the optimizer: model, optimizer = ampatch.initialize(model, optimizer); and "
            "instead of loss.backward(): with ampatch.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()"
        )
        if self.framework == "ignite":
            text += (
                ", and instead of create_supervised_trainer: "
                "trainer = Engine(ampatch.integrations.ignite.supervised_training_step("
                "model, optimizer, loss_fn))"
            )
        return text

    def description(self) -> str:
        """The mixed precision of the script and its effect on the rows, to follow the subject."""
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


UNKNOWN_KIND = Kind()
