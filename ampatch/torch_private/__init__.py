"""Every private name of torch that ampatch uses, each with its fallback."""
