"""What was asked for: opt levels, overrides and variables, as frozen values."""
