"""Vocabularies whose tokens are whole pieces of text: words and marks, never merged.

A pattern cuts the text, and every piece has to be a token. Two ways of writing tokens:

as they are     every character of a text is in a piece, so decoding gives the text back
with a space    each token begins with a space, which a text may leave out; white space only
                separates. Encoding gives the ids of `re.findall` or `str.split` and a dictionary,
                decoding the words with one space before each, which encodes to the same ids

What the vocabulary lacks is an error: there is no token for the unknown. A pattern from a file may
take for ever on a short text, so one that is none of `CUTS` is stopped after `MOST_SECONDS`. Does
not choose the pattern (`model/convert/vocabulary/words.py`).
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

import regex

MOST_SECONDS = 2.0
"""Time that an unknown pattern may take to cut a text."""

JOINED_CUTS = (
    r"\w+|[^\w\s]|\s",
    r" ?\w+| ?[^\w\s]|\s",
    r" ?\w+| ?[^\w\s]+|\s+",
    r"\S+|\s",
    r"\S+|\s+",
    r" ?\S+|\s",
    r"\S+\s?|\s",
)
"""Of vocabularies that have white space, the finest first; each covers every text."""

SPACED_CUTS = (
    r"\w+|[^\w\s]",
    r"""--|[,.:;?_!"()']|(?:(?!--)[^\s,.:;?_!"()'])+""",
    r"\S+",
)
"""Of vocabularies that have none: words and marks apart, a usual list of marks, white space."""

WORDS_AND_MARKS = r"\w+|[^\w\s]+"
CUTS = frozenset((*JOINED_CUTS, *SPACED_CUTS, WORDS_AND_MARKS))
"""Patterns that take time in proportion to a text."""


def whole_first(several: Collection[str]) -> str:
    """The part of a pattern that finds tokens of several words, the longest first, before a cut."""
    if not several:
        return ""
    longest_first = sorted(several, key=lambda word: (-len(word), word))
    return rf"(?<!\S)(?:{'|'.join(map(re.escape, longest_first))})(?!\S)|"


class UnknownPiece(ValueError):
    """A piece of a text that is not a token; the message names it and where it stands."""


class PieceEncoder:
    """From texts to ids. Raises `re.error` for a pattern that is none.

    tokens   bytes of UTF-8 and ids; where they are `spaced`, each begins with a space
    """

    def __init__(self, tokens: Mapping[bytes, int], pattern: str, *, spaced: bool) -> None:
        self._ids = {token.decode(): token_id for token, token_id in tokens.items()}
        self._spaced = spaced
        several = [word[1:] for word in self._ids if spaced and len(word.split()) > 1]
        self.is_known = pattern.removeprefix(whole_first(several)) in CUTS
        """Whether the pattern is one whose time is in proportion to a text."""
        self._cut = re.compile(pattern)
        self._bounded = None if self.is_known else regex.compile(pattern)

    def encode(self, text: str, at: int = 0) -> list[int]:
        """The ids of a text, which begins at the character `at` of a whole. Raises
        UnknownPiece."""
        return list(self._ids_of(text, at))

    def _ids_of(self, text: str, at: int) -> Iterator[int]:
        start = 0
        for piece in self._pieces(text):
            self._check_left_out(text[start : piece.start()], at + piece.start())
            bare = piece[0].removeprefix(" ") if self._spaced else piece[0]
            spelled = f" {bare}" if self._spaced else bare
            if spelled not in self._ids:
                raise self._unknown(bare, at + piece.end() - len(bare))
            yield self._ids[spelled]
            start = piece.end()
        self._check_left_out(text[start:], at + len(text))

    def _pieces(self, text: str) -> Iterator[re.Match[str]]:
        """What the pattern finds. Raises UnknownPiece if that takes too long."""
        if self._bounded is None:
            yield from self._cut.finditer(text)
            return
        deadline, at = time.monotonic() + MOST_SECONDS, 0
        try:
            while True:
                left = max(1e-3, deadline - time.monotonic())
                piece = self._bounded.search(text, at, concurrent=True, timeout=left)
                if piece is None:
                    return
                yield piece
                at = max(piece.end(), at + 1)
        except TimeoutError as error:
            raise UnknownPiece(
                f"the split pattern takes more than {MOST_SECONDS:g} seconds for this text; it "
                "comes with the checkpoint and is not one whose time is known"
            ) from error

    def _check_left_out(self, between: str, end: int) -> None:
        """Raise UnknownPiece if no piece has this text, which ends at a character of the whole, and
        it is not white space that separates words."""
        left = between.lstrip() if self._spaced else between
        if left:
            raise self._unknown(left[:1], end - len(left))

    def _unknown(self, piece: str, place: int) -> UnknownPiece:
        return UnknownPiece(
            f"{piece[:60]!r}, at character {place} of the text, is not one of the "
            f"{len(self._ids):,} words and marks of the vocabulary; the model never saw it"
        )


def word_spans(words: Iterable[str], text: str) -> Iterator[tuple[int, int]]:
    """Where the words of an encoded text lie in it: characters [start, end), white space left
    out."""
    end = 0
    for word in words:
        bare = word.removeprefix(" ")
        start = text.index(bare, end)
        end = start + len(bare)
        yield start, end
