"""Command-line options of both comparisons (`benchmarks.peers` and `benchmarks.peers.serving`)."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from benchmarks.arguments import new_parser
from benchmarks.shapes import BATCHES, SHAPES


@dataclass(frozen=True, slots=True)
class Interpreters:
    """Interpreters of the peers: a default, and others for named peers."""

    usual: str
    named: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_options(cls, given: Sequence[str] | None) -> Self:
        """Parse `PYTHON` and `NAME=PYTHON`; without a `PYTHON`, use this interpreter."""
        usual, named = sys.executable, {}
        for option in given or ():
            name, equals, python = option.partition("=")
            if equals:
                named[name] = python
            else:
                usual = option
        return cls(usual, named)

    def of(self, peer: str) -> str:
        return self.named.get(peer, self.usual)


def comparison_parser(
    description: str | None, command: str, *, shape: str
) -> argparse.ArgumentParser:
    """A parser of all options except the peers, the dtypes and the duration."""
    parser = new_parser(description, command)
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--peer-python", action="append", metavar="[NAME=]PYTHON")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--prompt", type=int, default=256, help="ids per prompt")
    parser.add_argument(
        "--rounds", type=int, default=3, help="minimum number of rounds of each batch"
    )
    return parser
