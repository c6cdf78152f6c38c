"""What a script calls: the public functions, thin and without state."""
