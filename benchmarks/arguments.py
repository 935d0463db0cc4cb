"""Command-line arguments that all measurements share."""

import argparse

from logitd.model.device import available_processors


def new_parser(description: str | None, command: str | None = None) -> argparse.ArgumentParser:
    """A parser with the option --threads. Its --help shows `description` unchanged."""
    parser = argparse.ArgumentParser(
        prog=None if command is None else f"python -m {command}",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=available_processors())
    return parser
