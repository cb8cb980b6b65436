"""The life of a process: it ends when a signal arrives, whichever of its threads the kernel hands the signal to."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import signal, threading
from whimbrel.deploy.life import live

class Process:
    error = None

    def start(self):
        threading.Thread(target=self.end, daemon=True).start()

    def end(self):
        for _ in range(20):  # the main thread waits by now
            threading.Event().wait(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        threading.Event().wait()

    def stop(self):
        print("stopped")

live(Process)
"""


def test_a_process_ends_when_a_thread_other_than_the_main_one_gets_the_signal() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
