"""Properties are about values, not about time: a machine that is busy must not fail them."""

from hypothesis import settings

settings.register_profile("whimbrel", deadline=None)
settings.load_profile("whimbrel")
