"""The three roles as separate processes, and the process that starts and supervises them all."""
