"""Figures, verdicts and pages, made of the records of a sweep's trials."""
