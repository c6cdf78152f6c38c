"""torch's own tools that must know of casts, lent weights and skipped steps: a file for each."""
