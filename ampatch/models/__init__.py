"""A model under an opt level: its conversion, hooks, copies and state dicts."""
