"""Figures, verdicts and pages, made from the runs of a sweep."""
