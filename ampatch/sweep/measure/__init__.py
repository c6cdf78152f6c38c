"""What is measured in a trial, and its record."""
