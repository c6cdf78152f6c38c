"""What the user asked for: opt levels, overrides and environment variables, as frozen values."""
