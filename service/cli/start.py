"""Entry point of `logitd`. Even during the first imports, an interrupt ends it without a
traceback."""

import importlib

from logitd.service.cli.interrupts import quits_when_interrupted


def main() -> None:
    """Import the command line and run it."""
    with quits_when_interrupted():
        cli = importlib.import_module("logitd.service.cli.main")
    cli.main()
