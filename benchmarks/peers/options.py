"""What the command lines of both comparisons share."""

import argparse
import sys

from benchmarks.arguments import new_parser
from benchmarks.shapes import BATCHES, SHAPES


def comparison_parser(
    description: str | None, command: str, *, shape: str
) -> argparse.ArgumentParser:
    """A parser of everything but who is compared, in which dtypes and for how long."""
    parser = new_parser(description, command)
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--prompt", type=int, default=256, help="ids of each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="of each batch, at least")
    return parser
