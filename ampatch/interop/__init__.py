"""Patches of torch's tools that have to respect casts, half copies and skipped steps."""
