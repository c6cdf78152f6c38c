"""`ampatch tables`: what is patched, where, by which rule, and why.

`content` collects it, `formats` writes it, `bound` looks through a user's
module for functions that were bound before the patches.
"""
