"""The optimizer side: loss scale, master weights, step.  Knows nothing of patching and casts."""
