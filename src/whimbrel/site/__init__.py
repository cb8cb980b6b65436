"""A site: runs instances."""
