"""Terminal: prints text from models and files without control characters."""

import math
import sys
import time
import unicodedata
from collections.abc import Mapping
from typing import Any, TextIO

CLEAR_LINE = "\r\x1b[K"
"""Characters that move the cursor to the beginning of the line and clear it."""
SECONDS_BETWEEN_LINES = 10.0
"""Minimum number of seconds between two progress lines if the output is not a terminal."""


def visible(text: str) -> str:
    """Escape a text's control characters (as in \\x1b), except line breaks and tabs."""
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


def tell(command: str, line: str) -> None:
    """Print a line of a command to standard error."""
    say(f"logitd {command}: {line}", file=sys.stderr)


class ProgressLine:
    """Prints lines to `file`, each with `prefix`. On a terminal, the progress line is redrawn in
    place, without the prefix."""

    def __init__(self, file: TextIO, prefix: str = "") -> None:
        self.in_place = file.isatty()
        self._file = file
        self._prefix = prefix
        self._open = False  # the last line is a progress line
        self._next = 0.0

    def show(self, text: str) -> None:
        """Redraw the progress line on a terminal; elsewhere, print a line every few seconds."""
        if self.in_place:
            self.redraw(text)
        elif (now := time.monotonic()) >= self._next:
            self._next = now + SECONDS_BETWEEN_LINES
            self.say(text)

    def redraw(self, text: str) -> None:
        """Replace the progress line. Call this only if the output is a terminal."""
        print(CLEAR_LINE + visible(text), end="", file=self._file, flush=True)
        self._open = True

    def say(self, text: str) -> None:
        """Print a line. If there is a progress line, it stays above the new line."""
        self.end()
        say(self._prefix + text, file=self._file)

    def end(self) -> None:
        if self._open:
            print(file=self._file)
            self._open = False


def finite(members: Mapping[str, Any]) -> dict[str, Any]:
    """Replace non-finite numbers with None, which JSON writes as null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in members.items()
    }
