"""What `wb.run` and the processes are put together of, beside the orchestrator (orchestrator/control.py)."""
