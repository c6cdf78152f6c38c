"""Lightning's Trainer and Fabric, of `lightning` and of `pytorch_lightning`, from version 2.2 on.

    from ampatch.integrations.lightning import AmpatchPrecision

    trainer = Trainer(max_epochs=2, plugins=[AmpatchPrecision(opt_level="O2", dtype="bfloat16")])

    from ampatch.integrations.lightning import AmpatchFabricPrecision

    fabric = Fabric(plugins=[AmpatchFabricPrecision(opt_level="O2", dtype="bfloat16")])

Arguments are those of `ampatch.initialize`.  Nothing else changes in a script; it has no
`precision=`.
"""

from .fabric import AmpatchFabricPrecision
from .trainer import AmpatchPrecision

__all__ = ["AmpatchFabricPrecision", "AmpatchPrecision"]
