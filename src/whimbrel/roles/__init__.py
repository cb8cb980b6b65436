"""The roles that `wb.run` and the processes are composed of, besides the orchestrator (orchestrator/control.py)."""
