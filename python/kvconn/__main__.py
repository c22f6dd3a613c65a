"""The ``kvconn`` command: the library's own, run in this process."""

from __future__ import annotations

import ctypes as c
import os
import signal
import sys


def main() -> None:
    """Runs the command line and exits with its status."""
    from . import _lib

    lib = _lib.load()
    args = ["kvconn", *sys.argv[1:]]
    argv = (c.c_char_p * len(args))(*[os.fsencode(a) for a in args])
    sys.stdout.flush()
    # The command handles the first Ctrl-C, and then restores this handler for the second.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = lib.main(len(args), argv)  # type: ignore[operator]
    # Not sys.exit: the command has ended in order, and a signal that it handled must not raise KeyboardInterrupt now.
    os._exit(code)


if __name__ == "__main__":
    main()
