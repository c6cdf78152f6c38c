"""The user's settings as frozen values: opt levels, overrides, environment variables."""
