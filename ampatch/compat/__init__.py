"""Other packages' names for what ampatch does: `ampatch.compat.apex`."""
