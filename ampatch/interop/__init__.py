"""torch's own tools that have to know of casts, half copies and skipped steps: a file for each."""
