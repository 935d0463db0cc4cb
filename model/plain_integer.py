"""Plain integers: parses integers that are written as in JSON."""

import re

PLAIN = re.compile(r"-?(0|[1-9][0-9]{0,17})", re.ASCII)


def plain_integer(text: str) -> int:
    """Parse an integer. Raises ValueError for 10^18 or more, and for spellings that only `int`
    accepts: a plus sign, spaces, leading zeros, underscores and digits of other scripts."""
    if not PLAIN.fullmatch(text):
        raise ValueError(f"{text[:20]!r} is not an integer in plain digits")
    return int(text)
