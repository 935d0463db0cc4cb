"""Vocabularies whose tokens are words and punctuation marks, without merges.

A pattern splits the text into pieces, and every piece has to be a token of the vocabulary; there is
no token for unknown pieces. Tokens are stored in one of two ways:

unchanged       every character of a text is in a piece, so decoding returns the exact text
with a space    each stored token begins with a space, which need not be in the text, because white
                space only separates words. Encoding returns the same ids as a dictionary that is
                applied to the result of `re.findall` or `str.split`. Decoding writes a space
                before each word; encoding this text again returns the same ids

A pattern from a file may need exponential time, so a pattern that is not in `CUTS` is stopped when
a `SplitTime` is used up. `model/convert/vocabulary/words.py` chooses the pattern.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import regex

TIMED_CHARACTERS = 100_000
"""Outside requests, the time limit holds for this many characters, and grows for longer texts."""
MOST_SECONDS = 2.0
"""Time limit for splitting texts by an unknown pattern, in seconds. It counts the processor time of
the thread, so other programs do not decide whether a text is accepted."""

JOINED_CUTS = (
    r"\w+|[^\w\s]|\s",
    r" ?\w+| ?[^\w\s]|\s",
    r" ?\w+| ?[^\w\s]+|\s+",
    r"\S+|\s",
    r"\S+|\s+",
    r" ?\S+|\s",
    r"\S+\s?|\s",
)
"""Patterns for vocabularies in which white space is a token or part of a token. The pattern with
the shortest pieces is first. The pieces of each pattern cover every text completely."""

SPACED_CUTS = (
    r"\w+|[^\w\s]",
    r"""--|[,.:;?_!"()']|(?:(?!--)[^\s,.:;?_!"()'])+""",
    r"\S+",
)
"""Patterns for vocabularies without white space: the first separates words and punctuation marks;
the second splits at white space and separates only some common marks; the third splits only at
white space."""

WORDS_AND_MARKS = r"\w+|[^\w\s]+"
"""Pattern of the pre-tokenizer Whitespace of Hugging Face's tokenizers. Its `\\w` includes accents
and vowel signs, but no digits such as ², as in `regex`; the other patterns are Python's."""
CUTS = frozenset((*JOINED_CUTS, *SPACED_CUTS, WORDS_AND_MARKS))
"""Patterns that run in linear time."""


def whole_first(several: Collection[str]) -> str:
    """The beginning of a pattern. It matches the tokens in `several`, each of which consists of
    more than one word. Longer tokens are tried first."""
    if not several:
        return ""
    longest_first = sorted(several, key=lambda word: (-len(word), word))
    return rf"(?<!\S)(?:{'|'.join(map(re.escape, longest_first))})(?!\S)|"


class UnknownPiece(ValueError):
    """Raised if a piece of a text is not a token; the message names the piece and its place."""


class SplitTime:
    """The time that is left to split texts by a pattern that may need exponential time."""

    def __init__(self, characters: int = 0) -> None:
        """MOST_SECONDS, or MOST_SECONDS for each TIMED_CHARACTERS of that many characters if this
        is longer."""
        self._limit = self._left = MOST_SECONDS * max(1.0, characters / TIMED_CHARACTERS)

    def cut(self, pattern: "regex.Pattern[str]", text: str) -> Iterator[re.Match[str]]:
        """The matches of a pattern. Raises UnknownPiece when the time is used up."""
        at = 0
        while True:
            with self.used() as left:
                piece = pattern.search(text, at, concurrent=True, timeout=left)
            if piece is None:
                return
            yield piece
            at = max(piece.end(), at + 1)

    @contextmanager
    def used(self) -> Iterator[float]:
        """Use the time of a block, which gets the seconds that are left. Raises UnknownPiece if
        none are left, or if the block raises TimeoutError."""
        try:
            if self._left <= 0:
                raise TimeoutError
            began = time.thread_time()
            try:
                yield self._left
            finally:
                self._left -= time.thread_time() - began
        except TimeoutError as error:
            raise UnknownPiece(
                f"the vocabulary's split pattern takes more than {self._limit:g} seconds, the "
                "limit for all texts of a request together: use less text, or token ids"
            ) from error


class PieceEncoder:
    """Encodes texts. Raises `re.error` or `regex.error` for an invalid pattern.

    tokens   UTF-8 bytes of the tokens and their ids; if `spaced`, each begins with a space
    """

    def __init__(self, tokens: Mapping[bytes, int], pattern: str, *, spaced: bool) -> None:
        self._ids = {token.decode(): token_id for token, token_id in tokens.items()}
        self._spaced = spaced
        several = [word[1:] for word in self._ids if spaced and len(word.split()) > 1]
        self.is_known = pattern.removeprefix(whole_first(several)) in CUTS
        """True if the pattern is known to run in linear time."""
        engine = re if self.is_known and pattern != WORDS_AND_MARKS else regex
        self._cut = engine.compile(pattern)

    def encode(self, text: str, at: int, split_time: SplitTime) -> list[int]:
        """The ids of a part of a text; the part begins at character `at` of the text. Raises
        UnknownPiece."""
        ids, start = [], 0
        for piece in self._pieces(text, split_time):
            self._check_left_out(text[start : piece.start()], at + piece.start())
            bare = piece[0].removeprefix(" ") if self._spaced else piece[0]
            spelled = f" {bare}" if self._spaced else bare
            if spelled not in self._ids:
                raise self._unknown(bare, at + piece.end() - len(bare))
            ids.append(self._ids[spelled])
            start = piece.end()
        self._check_left_out(text[start:], at + len(text))
        return ids

    def _pieces(self, text: str, split_time: SplitTime) -> Iterator[re.Match[str]]:
        return self._cut.finditer(text) if self.is_known else split_time.cut(self._cut, text)

    def _check_left_out(self, between: str, end: int) -> None:
        """Raise UnknownPiece unless the text between two pieces is empty or, with spaced words,
        white space. `end` is the index in the whole text at which this text ends."""
        left = between.lstrip() if self._spaced else between
        if left:
            raise self._unknown(left[:1], end - len(left))

    def _unknown(self, piece: str, place: int) -> UnknownPiece:
        return UnknownPiece(
            f"{piece[:60]!r}, at character {place} of the text, is not one of the "
            f"{len(self._ids):,} words and marks of the vocabulary; the model was not trained on it"
        )


def word_spans(words: Iterable[str], text: str) -> Iterator[tuple[int, int]]:
    """The characters [start, end) of each word of an encoded text, without white space."""
    end = 0
    for word in words:
        bare = word.removeprefix(" ")
        start = text.index(bare, end)
        end = start + len(bare)
        yield start, end
