"""Hosts: what runs an instance."""
