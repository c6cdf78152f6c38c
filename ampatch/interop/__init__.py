"""torch's own tools that must know of casts, half copies and skipped steps: a file for each."""
