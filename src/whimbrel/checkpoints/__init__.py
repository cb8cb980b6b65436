"""Checkpoints: versions of keys in a central store, where every site finds them when another is no more."""
