"""The folder that `ampatch apex-path` prints, for PYTHONPATH: it has the package `apex` alone."""
