"""A site: a place that runs instances."""
