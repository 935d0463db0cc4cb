"""Vocabularies whose tokens are whole pieces of text: words and marks, never merged.

A pattern cuts the text, and every piece has to be a token; there is no token for unknown pieces.
Tokens are written in one of two ways:

as they are     every character is in a piece, so decoding returns the text
with a space    each token begins with a space, which a text may leave out; white space only
                separates. Encoding returns the ids of `re.findall` or `str.split` and a dictionary,
                decoding the words with a space before each, which encode to the same ids

A pattern from a file may need exponential time, so a pattern that is not in `CUTS` is stopped after
`MOST_SECONDS`. `model/convert/vocabulary/words.py` chooses the pattern.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

import regex

MOST_SECONDS = 2.0
"""Time limit of an unknown pattern on one text."""

JOINED_CUTS = (
    r"\w+|[^\w\s]|\s",
    r" ?\w+| ?[^\w\s]|\s",
    r" ?\w+| ?[^\w\s]+|\s+",
    r"\S+|\s",
    r"\S+|\s+",
    r" ?\S+|\s",
    r"\S+\s?|\s",
)
"""Patterns of vocabularies with white space, the finest first; each covers every text."""

SPACED_CUTS = (
    r"\w+|[^\w\s]",
    r"""--|[,.:;?_!"()']|(?:(?!--)[^\s,.:;?_!"()'])+""",
    r"\S+",
)
"""Patterns of vocabularies without white space: words and marks apart, a usual list of marks,
white space."""

WORDS_AND_MARKS = r"\w+|[^\w\s]+"
CUTS = frozenset((*JOINED_CUTS, *SPACED_CUTS, WORDS_AND_MARKS))
"""Patterns that run in linear time."""


def whole_first(several: Collection[str]) -> str:
    """The beginning of a pattern that matches tokens of several words, the longest first."""
    if not several:
        return ""
    longest_first = sorted(several, key=lambda word: (-len(word), word))
    return rf"(?<!\S)(?:{'|'.join(map(re.escape, longest_first))})(?!\S)|"


class UnknownPiece(ValueError):
    """A piece of a text that is not a token; the message names it and its place."""


class PieceEncoder:
    """Encodes texts. Raises `re.error` for an invalid pattern.

    tokens   UTF-8 bytes and ids; if `spaced`, each begins with a space
    """

    def __init__(self, tokens: Mapping[bytes, int], pattern: str, *, spaced: bool) -> None:
        self._ids = {token.decode(): token_id for token, token_id in tokens.items()}
        self._spaced = spaced
        several = [word[1:] for word in self._ids if spaced and len(word.split()) > 1]
        self.is_known = pattern.removeprefix(whole_first(several)) in CUTS
        """True if the pattern is known to run in linear time."""
        self._cut = re.compile(pattern)
        self._bounded = None if self.is_known else regex.compile(pattern)

    def encode(self, text: str, at: int = 0) -> list[int]:
        """Ids of a part that begins at character `at` of the text. Raises UnknownPiece."""
        ids, start = [], 0
        for piece in self._pieces(text):
            self._check_left_out(text[start : piece.start()], at + piece.start())
            bare = piece[0].removeprefix(" ") if self._spaced else piece[0]
            spelled = f" {bare}" if self._spaced else bare
            if spelled not in self._ids:
                raise self._unknown(bare, at + piece.end() - len(bare))
            ids.append(self._ids[spelled])
            start = piece.end()
        self._check_left_out(text[start:], at + len(text))
        return ids

    def _pieces(self, text: str) -> Iterator[re.Match[str]]:
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
                f"the checkpoint's split pattern takes more than {MOST_SECONDS:g} seconds for this "
                "text: send a shorter one, or token ids"
            ) from error

    def _check_left_out(self, between: str, end: int) -> None:
        """Raise UnknownPiece if the text between two pieces, which ends at character `end`, is more
        than white space that separates words."""
        left = between.lstrip() if self._spaced else between
        if left:
            raise self._unknown(left[:1], end - len(left))

    def _unknown(self, piece: str, place: int) -> UnknownPiece:
        return UnknownPiece(
            f"{piece[:60]!r}, at character {place} of the text, is not one of the "
            f"{len(self._ids):,} words and marks of the vocabulary; the model never saw it"
        )


def word_spans(words: Iterable[str], text: str) -> Iterator[tuple[int, int]]:
    """The characters [start, end) of each word of an encoded text, without white space."""
    end = 0
    for word in words:
        bare = word.removeprefix(" ")
        start = text.index(bare, end)
        end = start + len(bare)
        yield start, end
