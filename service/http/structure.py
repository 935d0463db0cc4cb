"""Structure: counts the values of a JSON text without parsing it.

A parser creates an object for each value, which takes 50 to 1,000 ns, and holds Python's
interpreter lock all the while: a few MB of `[],[],[],` would stop every stream of a server for
seconds. The brackets, commas and colons outside strings give an upper bound for the number of
objects. Counting them takes a few ns per byte and lets other threads run.

The text need not be valid JSON. A parser stops at the first invalid byte, and the counts are exact
up to there, so they always limit the parser's work.
"""

import json
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUOTE, BACKSLASH, COMMA, COLON, OPENING_BRACKET, OPENING_BRACE = b'"\\,:[{'
BLOCK = 1 << 16
"""Number of bytes scanned at a time. They fit into the processor's cache."""

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(\s*+:)?|[{}]')
"""A string, together with its colon if it is a key; or a brace. The quantifiers are possessive:
backtracking would take ten times as long for a string of two million escapes, and memory for each
escape."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Structure:
    """Numbers of commas, of opening brackets and braces, and of colons, all outside strings."""

    commas: int
    containers: int
    keys: int

    @property
    def values(self) -> int:
        """An upper bound for the number of values. It is exact if no list and no object is
        empty."""
        return self.commas + self.containers + 1


def count_structure(text: bytes) -> Structure:
    commas = containers = keys = 0
    in_string = escaping = False  # flags of the next byte
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
    """Return which bytes of the block are escaped, that is, follow an odd number of backslashes,
    and whether the first byte after the block is escaped. `first` tells whether the block's first
    byte is escaped."""
    places = np.arange(1, len(backslashes) + 1)
    # For each place, the number of backslashes that end there, not counting an escaped first one.
    starts = np.where(backslashes, 0, places)
    starts[0] = 1 if first or not backslashes[0] else 0
    runs = places - np.maximum.accumulate(starts)
    odd = runs % 2 == 1
    return np.concatenate(([first], odd[:-1])), bool(odd[-1])


def repeated_key(text: bytes) -> str | None:
    """The first key that occurs twice in an object of a valid JSON text; None if no key does."""
    objects: list[set[str]] = []
    for token in _TOKEN.finditer(text):
        if token[0] == b"{":
            objects.append(set())
        elif token[0] == b"}":
            objects.pop()
        elif token[1] is not None:
            written = token[0][: -len(token[1])]
            key: str = json.loads(written) if b"\\" in written else written[1:-1].decode()
            if key in objects[-1]:
                return key
            objects[-1].add(key)
    return None
