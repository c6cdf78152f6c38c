"""What single kinds of optimizers need."""
