"""Checkpoints: versions of keys in a central store, where every site can read them after another site is lost."""
