"""Calls between the processes of a deployment: methods of an object over HTTP, credentials, TLS."""
