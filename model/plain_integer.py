"""Plain integers: read an index in the one spelling that JSON has for it."""

import re

PLAIN = re.compile(r"-?(0|[1-9][0-9]{0,17})", re.ASCII)


def plain_integer(text: str) -> int:
    """The integer that a text spells. Raises ValueError for what `int` would also take: a plus
    sign, spaces, leading zeros, underscores and digits of other scripts; and from 10^18 on."""
    if not PLAIN.fullmatch(text):
        raise ValueError(f"{text[:20]!r} is not an integer in plain digits")
    return int(text)
