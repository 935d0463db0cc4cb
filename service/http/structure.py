"""How much structure a JSON text has, counted without parsing it.

A parser makes an object of each value, at 50 to 1,000 ns apiece, and holds Python's interpreter
while it does: a few MB of `[],[],[],` stop every stream of a server for seconds. Brackets, commas
and colons outside strings say beforehand how many objects it would make. Counting them takes a few
ns a byte and lets other threads run.

Does not check that the text is JSON. Where it is not, a parser gives up at the first wrong byte;
up to that byte the counts are exact, so they bound its work in any case.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUOTE, BACKSLASH, COMMA, COLON, OPENING_BRACKET, OPENING_BRACE = b'"\\,:[{'
BLOCK = 1 << 16
"""Bytes looked at together: they fit into a processor's cache."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Structure:
    """Commas, opening brackets and braces, and colons; those inside strings left out."""

    commas: int
    containers: int
    keys: int

    @property
    def values(self) -> int:
        """As many values as the text has at most, as if no list and no object were empty."""
        return self.commas + self.containers + 1


def count_structure(text: bytes) -> Structure:
    """The structure of a JSON text in UTF-8."""
    commas = containers = keys = 0
    in_string = escaping = False  # of the byte that comes next
    for start in range(0, len(text), BLOCK):
        block = np.frombuffer(text, np.uint8, min(BLOCK, len(text) - start), start)
        quotes = block == QUOTE
        backslashes = block == BACKSLASH
        if escaping or backslashes.any():
            escaped, escaping = _escaped(backslashes, first=escaping)
            quotes &= ~escaped
        inside = np.logical_xor.accumulate(quotes) ^ in_string
        in_string = bool(inside[-1])
        commas += int(np.count_nonzero((block == COMMA) & ~inside))
        keys += int(np.count_nonzero((block == COLON) & ~inside))
        openings = (block == OPENING_BRACKET) | (block == OPENING_BRACE)
        containers += int(np.count_nonzero(openings & ~inside))
    return Structure(commas, containers, keys)


def _escaped(backslashes: Flags, *, first: bool) -> tuple[Flags, bool]:
    """Which bytes are escaped: those after an odd number of backslashes. `first` says it of the
    first, by what came before; the second result says it of the byte that comes next."""
    places = np.arange(1, len(backslashes) + 1)
    # Of each place the number of backslashes that end there; the first counts not if it is escaped.
    starts = np.where(backslashes, 0, places)
    starts[0] = 1 if first or not backslashes[0] else 0
    runs = places - np.maximum.accumulate(starts)
    odd = runs % 2 == 1
    return np.concatenate(([first], odd[:-1])), bool(odd[-1])
