"""Entry point of `logitd`. Even during the first imports, an interrupt ends it without a
traceback."""

import importlib
import sys

from logitd.service.cli.interrupts import postpone_hangups, quits_when_interrupted


def main() -> None:
    """Import the command line and run it."""
    if sys.argv[1:2] == ["serve"]:
        postpone_hangups()
    with quits_when_interrupted():
        cli = importlib.import_module("logitd.service.cli.main")
    cli.main()
