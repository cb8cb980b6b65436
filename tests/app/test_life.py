"""The life of a process: it ends when a signal arrives, whichever of its threads the kernel hands the signal to; and
when it is broken, whatever its threads wait for."""

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


BROKEN = """
import threading
from whimbrel.deploy import life

class Process:
    error = None

    def __init__(self):
        self.heart = life.Heart(self.beat)

    def start(self):
        self.heart.start()

    def beat(self):
        self.error = RuntimeError("the JVM does not answer")
        raise self.error

    def stop(self):
        threading.Event().wait()

life.BROKEN = 0.5
life.live(Process)
"""


def test_a_process_that_is_broken_ends_even_if_it_cannot_be_stopped() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1, done.stderr
