"""One `initialize`; the only room that knows the operator and the optimizer side."""
