"""Starts an unedited script as Python would, in this process and in the ones it spawns."""
