"""Terminal: prints text of models and files without control characters."""

import sys
import unicodedata
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"
"""Return to the beginning of the line and clear it."""


def visible(text: str) -> str:
    """The text with control characters escaped, such as \\x1b, except line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) == "Cc" and character not in "\n\t"
        else character
        for character in text
    )


def say(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a text to `file`, by default standard output. On a terminal, control characters are
    escaped."""
    file = file or sys.stdout
    print(visible(text) if file.isatty() else text, end=end, file=file, flush=True)


def redraw(text: str, file: TextIO) -> None:
    """Replace the last line of a terminal."""
    print(CLEAR_LINE + visible(text), end="", file=file, flush=True)
