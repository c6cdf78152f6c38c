"""`ampatch tables`: what is patched, where, by which rule, and why.

`content` collects the rows, `formats` writes them, `bound` searches a user's module for
functions that were bound before the patches.
"""
