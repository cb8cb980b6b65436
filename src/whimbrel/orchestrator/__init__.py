"""The orchestrator: decides what moves where, journals it, and lets it be carried out."""
