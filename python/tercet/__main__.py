"""The command `tercet`: `tercet --help` tells what it does."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command on sys.argv and returns its exit code: 0, 1 (a check failed) or 2 (bad use)."""
    # Python's handlers only run between Python's own instructions, and here are none.
    for number in (signal.SIGINT, getattr(signal, "SIGPIPE", None)):
        if number is not None:
            signal.signal(number, signal.SIG_DFL)
    from tercet import _core

    sys.stdout.flush()
    return _core.command(["tercet", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
