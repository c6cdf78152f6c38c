"""The operator side: which dtype a patched torch function computes in."""
