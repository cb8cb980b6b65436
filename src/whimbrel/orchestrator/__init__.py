"""The orchestrator: decides what moves where, journals the decision, then carries it out."""
