"""Faults under load: a plan of them as data, an engine that carries it out on real processes, a verdict."""
