"""SpecialNames: finds names of special tokens in texts that are read in pieces, and keeps each name
in one piece."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from logitd.model.data.sources.document import Document


class SpecialNames:
    """The names of special tokens. Of two names at the same place, the longer one counts."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = len(longest_first[0]) if longest_first else 1

    def find(self, text: str) -> list[str]:
        return self._pattern.findall(text)

    def before(self, text: str, at: int) -> int:
        """`at`, or the start of the name that a cut at `at` would divide."""
        start, end = max(0, at - self._longest), at + self._longest
        matches = self._pattern.finditer(text, start, end)
        return next((m.start() for m in matches if m.start() < at < m.end()), at)

    def whole(self, document: Document) -> Document:
        """The same document, with pieces that divide no name."""
        return replace(document, pieces=lambda: self.pieces(document.pieces()))

    def pieces(self, pieces: Iterable[str]) -> Iterator[str]:
        """The same text, with borders moved to the start of the names that they would divide."""
        held = ""
        for piece in pieces:
            end = held[-self._longest :]
            moved = len(end) - self.before(end + piece[: self._longest], len(end))
            ready = len(held) - moved
            if ready:
                yield held[:ready]
            held = held[ready:] + piece
        if held:
            yield held
