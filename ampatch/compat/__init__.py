"""Other packages' names for what ampatch does: `ampatch.compat.apex`.

`apex_checkpoints` reads apex's optimizer checkpoints, with and without these names.
"""
