"""Faults under load: a fault plan as data, an engine that executes it on real processes, a verdict."""
