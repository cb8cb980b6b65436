"""For all tests: Ctrl-C means what it means at a terminal."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
