"""The REST API of an orchestrator, and its client."""
