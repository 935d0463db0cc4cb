"""Added tokens: strings that always become a single token. They are found in a text before the rest
of the text is split and merged.

Special tokens are added tokens, and a vocabulary may have others (GPT-NeoX has 23 for runs of
spaces). The rules are the same as for `AddedVocabulary` in Hugging Face's `tokenizers`: the
leftmost match wins, and of several matches there, the longest. The caller decides in which texts
special tokens are recognized. A token may have flags:

  lstrip, rstrip  the token includes the white space before or after it
  single_word     the token does not match next to a letter, digit, mark or underscore
  normalized      the token is searched for in the second pass, in the texts that are left after the
                  first pass
  unnormalized    the token is searched for in the first pass. Without either flag, special tokens
                  belong to the first pass and other tokens to the second
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import regex

Flag = Literal["lstrip", "rstrip", "single_word", "normalized", "unnormalized"]
FLAGS: tuple[Flag, ...] = get_args(Flag)

MOST_CHARACTERS = 1024
"""Maximum length of an added token in characters. The limit bounds the time of the search: at each
place in a text, it tries the lengths of all tokens that begin with the character at that place."""

HEAD_CHARACTERS = 8
"""The search compares a text with whole tokens only at places where up to this many characters are
the first characters of a token. With only one character, a row of `<` takes a hundred times as
long."""
MOST_BRANCHES = 64
"""The search does not distinguish the characters that follow the same characters in more than this
many ways, because it tries one after another."""

_WORD = regex.compile(r"\w")  # unlike in Python's `re`, \w includes marks


@dataclass(frozen=True, slots=True)
class Cut:
    """Characters [start, end) of a text. They are an added token, or, if `token_id` is None, text
    without added tokens."""

    start: int
    end: int
    token_id: int | None


class AddedTokens:
    """Splits texts at added tokens.

    special, ordinary  texts of special and of other added tokens, and their ids
    flags              flags of both kinds, by text

    Raises ValueError for a token that is empty or too long, and for unknown flags.
    """

    def __init__(
        self,
        special: Mapping[str, int],
        ordinary: Mapping[str, int],
        flags: Mapping[str, Collection[str]],
    ) -> None:
        tokens = {**special, **ordinary}
        for text in tokens:
            text.encode()  # raises for an unpaired surrogate
            if not 0 < len(text) <= MOST_CHARACTERS:
                raise ValueError(
                    f"the added token {text[:40]!r} has {len(text):,} characters, but must have 1 "
                    f"to {MOST_CHARACTERS:,}"
                )
        for text, given in flags.items():
            if text not in tokens or not set(given) <= set(FLAGS):
                raise ValueError(
                    f"{text[:40]!r} has the flags {sorted(given)}; only added tokens may have "
                    f"flags, and the possible flags are {', '.join(FLAGS)}"
                )
        late = {
            text
            for text in tokens
            if "normalized" in (has := flags.get(text, ()))
            or (text not in special and "unnormalized" not in has)
        }
        self._passes = [
            _Pass({text: tokens[text] for text in chosen}, special, flags)
            for chosen in (tokens.keys() - late, late)
            if chosen
        ]

    def split(self, text: str, written: str = "") -> Iterator[Cut]:
        """The added tokens of a text and the texts between them, in order; the search goes on with
        the iteration. White space that a token strips belongs to that token's `Cut`.

        A special token is recognized only where `written` has the same characters at the same place
        as `text`. So all special tokens are recognized if `written` is `text` itself, and none if
        it is "".
        """
        cuts = iter([Cut(0, len(text), None)] if text else [])
        for each in self._passes:
            cuts = each.split_all(text, written, cuts)
        return cuts


class _Pass:
    """The tokens that are searched for in one pass."""

    def __init__(
        self,
        tokens: Mapping[str, int],
        special: Collection[str],
        flags: Mapping[str, Collection[str]],
    ) -> None:
        self._tokens, self._special, self._flags = tokens, special, flags
        lengths = defaultdict[str, set[int]](set)
        for text in tokens:
            lengths[text[0]].add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._all_special = tokens.keys() <= set(special)
        self._head = re.compile(_heads(tokens, HEAD_CHARACTERS))

    def split_all(self, text: str, written: str, cuts: Iterator[Cut]) -> Iterator[Cut]:
        for cut in cuts:
            if cut.token_id is None:
                yield from self.split(text, written, cut)
            else:
                yield cut

    def split(self, text: str, written: str, within: Cut) -> Iterator[Cut]:
        at = done = within.start  # search from `at`; text before `done` is cut
        searched = written if self._all_special else text  # special tokens are only in `written`
        while (match := self._head.search(searched, at, within.end)) is not None:
            left = match.start()
            found = self._longest(text, written, left, within.end)
            at = left + max(1, len(found))
            flags = self._flags.get(found, ())
            if not found or ("single_word" in flags and _in_word(text, left, at, within)):
                continue
            right = max(at, done) if "rstrip" in flags else at
            if "lstrip" in flags:
                while left > done and _is_space(text[left - 1]):
                    left -= 1
                left = max(left, done)
            if "rstrip" in flags:
                right = end_of_space(text, right, within.end)
            if left == right:
                continue  # the previous token's white space includes this token
            if done < left:
                yield Cut(done, left, None)
            yield Cut(left, right, self._tokens[found])
            done = right
        if done < within.end:
            yield Cut(done, within.end, None)

    def _longest(self, text: str, written: str, start: int, end: int) -> str:
        """The longest token that begins at `start`, or ""."""
        for length in self._lengths.get(text[start], ()):
            found = text[start : start + length]
            if found not in self._tokens or start + length > end:
                continue
            if found not in self._special or written[start : start + length] == found:
                return found
        return ""


def _heads(tokens: Iterable[str], length: int) -> str:
    """A pattern that matches wherever the first `length` characters of a token are. It may match
    elsewhere too."""
    rests = defaultdict[str, set[str]](set)
    for text in tokens:
        if not text or not length:
            return ""
        rests[text[0]].add(text[1:])
    if len(rests) > MOST_BRANCHES:
        return f"[{''.join(map(re.escape, rests))}]"
    branches = (re.escape(first) + _heads(rest, length - 1) for first, rest in rests.items())
    return f"(?:{'|'.join(branches)})"


def _in_word(text: str, start: int, end: int, within: Cut) -> bool:
    before = start > within.start and _WORD.match(text[start - 1])
    after = end < within.end and _WORD.match(text[end])
    return bool(before or after)


def end_of_space(text: str, start: int, end: int | None = None) -> int:
    """The index after the white space that begins at `start`; never more than `end`."""
    end = len(text) if end is None else end
    while start < end and _is_space(text[start]):
        start += 1
    return start


def _is_space(character: str) -> bool:
    """True for white space as Unicode defines it. Python's `isspace` also accepts four
    separators."""
    return character.isspace() and not "\x1c" <= character <= "\x1f"
