"""Measurements in a trial, and their file."""
