"""torch's own tools that must know of casts, master weights and skipped steps: a file for each."""
