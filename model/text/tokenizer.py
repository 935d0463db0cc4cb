"""Tokenizer: text to token ids and back.

There are three kinds: byte pair encoding with tiktoken, vocabularies of whole words and punctuation
marks (`pieces.py`), and tokenizers without a vocabulary, for models that have only token ids. This
module also reads and writes the ranks file (`tokenizer.tiktoken`: each line has a token in base64,
a space and the token's rank) and the tokenizer's section of `config.json`, and finds the place of
each token in a text. `added_tokens.py` finds added tokens.

`model/data/vocabulary.py` learns vocabularies, `published.py` has the published vocabularies, and
`model/convert/` reads other formats.
"""

import base64
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import regex
import tiktoken
from pydantic import BaseModel, ConfigDict, ValidationError

from logitd.model.files import write_whole
from logitd.model.first_error import first_error
from logitd.model.text.added_tokens import AddedTokens, Flag, end_of_space
from logitd.model.text.pieces import PieceEncoder, SplitTime, UnknownPiece, word_spans

END_OF_TEXT = "<|endoftext|>"

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
"""GPT2_PATTERN and CL100K_PATTERN are the split patterns of published encodings."""
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}[\p{L}\p{M}]*+|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]{1,64}+[\r\n]{0,64}+|\s{0,64}[\r\n]|\s{1,64}(?!\S)|\s"
)
"""Split pattern of the vocabularies that logitd learns. Every checkpoint stores its own pattern.

It is similar to GPT-4's pattern. Combining marks stay with their letters, as Hindi and other
scripts need. A piece has at most two digits. The length of a run of white space is limited, because
with the published patterns about a million spaces overflow tiktoken's stack.
"""
CHARACTERS = r"[\s\S]"
"""Split pattern that matches single characters, including line breaks."""
KNOWN_PATTERNS = frozenset(
    (
        *(SPLIT_PATTERN, GPT2_PATTERN, CL100K_PATTERN, CHARACTERS),
        SPLIT_PATTERN.replace(r"\p{L}[\p{L}\p{M}]*+", r"\p{L}++"),  # used by older checkpoints
    )
)
"""Patterns that run in linear time and whose pieces cover every text completely."""

TokenizerKind = Literal["bpe", "pieces", "words", "none"]
"""How a text becomes ids.

bpe     the pattern splits the text into pieces; a piece that is not a token is merged from bytes
pieces  the pattern splits the text into pieces; every piece has to be a token
words   like pieces, but tokens begin with a space that need not be in the text, because white space
        only separates words
none    there is no vocabulary: the ids have no text
"""

NO_VOCABULARY = (
    "this model has no vocabulary and cannot encode text: give token ids, or, if its vocabulary is "
    "known, import the model again with --tokenizer"
)

MOST_IDS = 2**24
"""Maximum size of a vocabulary in ids: sixty times the size of the largest published vocabulary."""

TRIED_LENGTH = 4096
"""An unknown pattern is tried on a text before encoding only if the text has more characters than
this. For shorter texts, a quadratic pattern takes at most a second."""

PROBE = "A word, 2 numbers (1.5)\n\tand\u00e9\u4e16."
"""A text that each new tokenizer of the kind `bpe` encodes once, to test its pattern."""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes that continue a character in UTF-8; every other byte begins one."""


class TokenizerError(ValueError):
    """Raised if a vocabulary, text or token id is unusable; the message names it and the reason."""


class NoVocabularyError(TokenizerError):
    """Raised if a text is given to a model without a vocabulary."""

    def __init__(self) -> None:
        super().__init__(NO_VOCABULARY)


class TooManyTokens(TokenizerError):
    """Raised if a text has more tokens than its limit. At least `least` were found."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has at least {least} tokens")
        self.least = least


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The characters [start, end) of a text that belong to one token. A character belongs to every
    token that has at least one of its bytes."""

    start: int
    end: int


class _Description(BaseModel):
    model_config = ConfigDict(strict=True)

    pattern: str = ""
    special_tokens: dict[str, int] = {}
    vocab_size: int | None = None
    kind: TokenizerKind = "bpe"
    added_tokens: dict[str, int] = {}
    added_flags: dict[str, list[Flag]] = {}
    end_of_text: str | None = END_OF_TEXT
    end_ids: list[int] = []


class Tokenizer:
    """A vocabulary with its split pattern and special tokens.

    ranks             bytes and id of each ordinary token
    special_tokens    names and ids. Special tokens may have any ids; the ordinary tokens have the
                      remaining ids from 0 on
    added_tokens      texts that are one token wherever they occur, and their ids. An added token
                      may share the id of the ordinary token with the same bytes
    added_flags       flags of special and added tokens, by name (`added_tokens.py`)
    end_of_text_name  name of the special token that ends a document
    end_ids           further ids that end a generated text

    The name of a special token in a text is plain text unless `encode` gets `special_ids`.

    tiktoken needs a rank for each of the 256 bytes, but an imported vocabulary may lack some. The
    missing bytes get ranks from `vocab_size` on, which are not ids. A text that needs one of these
    bytes is refused.
    """

    def __init__(
        self,
        *,
        ranks: Mapping[bytes, int],
        pattern: str,
        special_tokens: Mapping[str, int],
        vocab_size: int | None = None,
        added_tokens: Mapping[str, int] | None = None,
        added_flags: Mapping[str, Collection[str]] | None = None,
        end_of_text_name: str = END_OF_TEXT,
        end_ids: Sequence[int] = (),
        kind: TokenizerKind = "bpe",
    ) -> None:
        beyond = math.inf if vocab_size is None else vocab_size
        self.special_tokens = dict(special_tokens)
        self.added_tokens = dict(added_tokens or {})
        self.added_flags = {name: sorted(flags) for name, flags in (added_flags or {}).items()}
        named = self.special_tokens | self.added_tokens
        try:
            self.added = AddedTokens(self.special_tokens, self.added_tokens, self.added_flags)
        except ValueError as error:
            raise TokenizerError(str(error)) from error
        largest = max([vocab_size or 0, *named.values()])
        if largest > MOST_IDS:
            raise TokenizerError(
                f"the ids of the vocabulary go up to {largest:,}, but the limit is {MOST_IDS:,} ids"
            )
        self.kind: TokenizerKind = kind
        self.ranks = dict(ranks)
        self.pattern = pattern
        self.end_of_text_name = end_of_text_name
        self.tokens = {token: rank for token, rank in self.ranks.items() if rank < beyond}
        """Ordinary tokens and their ids: all `ranks` except those that were added for bytes that
        the vocabulary lacks."""
        if kind == "none":
            if ranks or named or vocab_size is None or vocab_size < 1:
                raise TokenizerError(
                    "a tokenizer of kind 'none' needs only a vocab_size above 0, but got "
                    f"{len(ranks)} ranks, {len(named)} special tokens and vocab_size {vocab_size}"
                )
            self.vocab_size = vocab_size
        else:
            space = " " if kind == "words" else ""
            named = {
                name: token_id
                for name, token_id in named.items()
                if name in special_tokens or self.tokens.get((space + name).encode()) != token_id
            }
            _check_ranks(self.ranks, named, beyond, every_byte=kind == "bpe")
            self.vocab_size = max([*self.tokens.values(), *named.values()]) + 1
            if not pattern:
                raise TokenizerError(
                    "the split pattern is empty: give a pattern that matches every piece of a "
                    "text; '[\\s\\S]+' makes the whole text one piece"
                )
        ends = (self.end_of_text, *end_ids)
        self.ends = tuple(dict.fromkeys(end for end in ends if end is not None))
        """Ids that end a generated text. The first is the end of a document, if the vocabulary has
        such an id."""
        if wrong := [end for end in self.ends if not 0 <= end < self.vocab_size]:
            raise TokenizerError(
                f"end_ids has {wrong[0]}, outside the vocabulary of {self.vocab_size} ids"
            )
        self._split_time: SplitTime | None = None
        self._encoding = self._byte_pairs() if kind == "bpe" else None
        self._pieces = self._whole_pieces() if kind in ("pieces", "words") else None
        # Unused ids of a published encoding have no bytes, nor has any id of kind "none".
        self._bytes = [b""] * self.vocab_size
        for token, rank in self.tokens.items():
            self._bytes[rank] = token
        for text, token_id in named.items():
            self._bytes[token_id] = text.encode()
        self._special_ids = frozenset(self.special_tokens.values())
        self._complete = len(self.tokens) == len(self.ranks)
        self._longest_token = max(map(len, [*self.ranks, *map(str.encode, named)]), default=1)
        self._stripping = {
            token_id: name
            for name, token_id in named.items()
            if {"lstrip", "rstrip"} & {*self.added_flags.get(name, ())}
        }

    def _byte_pairs(self) -> tiktoken.Encoding:
        try:
            if self.pattern not in KNOWN_PATTERNS:
                regex.compile(self.pattern)  # splits long texts, see _byte_pair_ids
            encoding = tiktoken.Encoding(
                "logitd",
                pat_str=self.pattern,
                mergeable_ranks=self.ranks,
                special_tokens={},
            )
        except (ValueError, regex.error) as error:
            raise self._bad_pattern(error) from error
        with self._translated_panics():
            encoding.encode_ordinary(PROBE)  # fails if the pattern can match an empty text
        return encoding

    def _whole_pieces(self) -> PieceEncoder:
        try:
            return PieceEncoder(self.tokens, self.pattern, spaced=self.kind == "words")
        except (re.error, regex.error) as error:
            raise self._bad_pattern(error) from error
        except UnicodeDecodeError as error:
            raise TokenizerError(f"the token {error.object!r} is not UTF-8 text") from error

    def _bad_pattern(self, error: Exception) -> TokenizerError:
        return TokenizerError(
            f"the split pattern {self.pattern[:60]!r} is not a regular expression: {error}"
        )

    @classmethod
    def without_text(cls, vocab_size: int) -> Self:
        return cls(ranks={}, pattern="", special_tokens={}, vocab_size=vocab_size, kind="none")

    @property
    def has_text(self) -> bool:
        return self.kind != "none"

    @property
    def cuts_in_time(self) -> bool:
        """True if the pattern is known to run in linear time."""
        if self._pieces is not None:
            return self._pieces.is_known
        return self.pattern in KNOWN_PATTERNS or not self.has_text

    def for_one_request(self) -> Self:
        """This tokenizer, with one limit on the time to split all texts. Otherwise each text has a
        limit, which grows with its length."""
        if self.cuts_in_time:
            return self
        limited = copy(self)
        limited._split_time = SplitTime()
        return limited

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document; None if the vocabulary has no such id."""
        return self.special_tokens.get(self.end_of_text_name)

    def encode(self, text: str, *, special_ids: bool = False, limit: float = math.inf) -> list[int]:
        """The token ids of a text. With `special_ids`, the name of a special token becomes its id;
        otherwise the name is plain text. Raises TokenizerError for a character or word that the
        vocabulary lacks, TooManyTokens when more than `limit` ids are found before the text ends,
        and NoVocabularyError if there is no vocabulary."""
        if self.kind == "none":
            raise NoVocabularyError
        split_time = self._split_time or SplitTime(len(text))
        if not special_ids and not self.added_tokens:
            return self._encode_ordinary(text, 0, split_time)
        ids = list[int]()
        for cut in self.added.split(text, text if special_ids else ""):
            if len(ids) > limit:
                raise TooManyTokens(len(ids))
            if cut.token_id is None:
                ids += self._encode_ordinary(text[cut.start : cut.end], cut.start, split_time)
            else:
                ids.append(cut.token_id)
        return ids

    def _encode_ordinary(self, text: str, at: int, split_time: SplitTime) -> list[int]:
        """The ids of a part of a text. The part contains no added tokens and begins at character
        `at`."""
        try:
            if self._pieces is not None:
                return self._pieces.encode(text, at, split_time)
            ids = self._byte_pair_ids(text, split_time)
        except UnknownPiece as error:
            raise TokenizerError(str(error)) from error
        self._check_complete(ids, at)
        if self.pattern not in KNOWN_PATTERNS:
            assert self._encoding is not None
            kept, whole = len(self._encoding.decode_bytes(ids)), len(text.encode(errors="replace"))
            if kept < whole:
                raise TokenizerError(
                    f"the split pattern {self.pattern[:60]!r} drops {whole - kept} of the text's "
                    f"{whole} bytes"
                )
        return ids

    def _byte_pair_ids(self, text: str, split_time: SplitTime) -> list[int]:
        """The ids of a text. Raises UnknownPiece if an unknown pattern takes too long. tiktoken
        cannot be stopped, so a long text is first split with `regex`, which has a time limit."""
        assert self._encoding is not None
        is_known = self.pattern in KNOWN_PATTERNS
        if not is_known and len(text) > TRIED_LENGTH:
            for _ in split_time.cut(regex.compile(self.pattern), text):
                pass
        with nullcontext() if is_known else split_time.used(), self._translated_panics():
            return self._encoding.encode_ordinary(text)

    @contextmanager
    def _translated_panics(self) -> Iterator[None]:
        """Turn a panic of tiktoken into a TokenizerError. It panics if the pattern matches an empty
        piece or does not finish."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(
                f"the split pattern {self.pattern[:60]!r} cannot split this text into pieces: "
                f"{str(error)[:100]}"
            ) from error

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, found without encoding it."""
        if self.kind == "none":
            return 0
        if self.kind == "words" or self._stripping:
            text = "".join(text.split())  # white space may have no token
        return -(-len(text.encode()) // self._longest_token)

    def _check_complete(self, ids: Sequence[int], at: int) -> None:
        """Raise TokenizerError if the part that begins at character `at` of the text needs a byte
        without an id. The message names the character."""
        if self._complete or not ids or max(ids) < self.vocab_size:
            return
        assert self._encoding is not None
        tokens = list(map(self._encoding.decode_single_token_bytes, ids))
        lacking = next(place for place, token_id in enumerate(ids) if token_id >= self.vocab_size)
        whole, start = b"".join(tokens), sum(map(len, tokens[:lacking]))
        character = len(whole[:start].decode(errors="ignore"))
        raise TokenizerError(
            f"the vocabulary has no token for {whole.decode(errors='replace')[character]!r}, at "
            f"index {at + character} of the text: the model was trained without "
            f"{len(self.ranks) - len(self.tokens)} of the 256 bytes"
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(map(self.token_bytes, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token with this id. The bytes of a special token are its name in
        UTF-8."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} ids "
                f"(0 to {self.vocab_size - 1})"
            )
        return self._bytes[token_id]

    def text_bytes(self, token_ids: Iterable[int]) -> int:
        """The number of bytes of text of token ids, in which a loss per byte is measured. Special
        tokens have none."""
        return sum(
            len(self.token_bytes(token_id))
            for token_id in token_ids
            if not self.is_special(token_id)
        )

    def token_text(self, token_id: int) -> str:
        """The text of the token with this id, for display. Bytes that are not UTF-8 become
        U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def spans(self, token_ids: Iterable[int], text: str | None = None) -> list[TokenSpan]:
        """For each id of an encoded text, the characters from which it comes. Two tokens may share
        a character of several bytes.

        The characters are counted from the bytes of the tokens, because tiktoken's own function for
        offsets raises an error for incomplete text. Kind "words" needs `text`, because its ids
        contain no white space. If `text` is given, white space that an added token strips is part
        of that token.
        """
        if self.kind == "words":
            if text is None:
                raise ValueError("spans of words need the text")
            names = map(self.token_text, token_ids)
            return list(itertools.starmap(TokenSpan, word_spans(names, text)))
        spans, begun = [], 0  # number of characters whose first byte has been counted
        stripping = self._stripping if text is not None else {}
        for token_id in token_ids:
            token = self.token_bytes(token_id)
            start = begun - 1 if token and token[0] in _CONTINUATION else begun
            name = stripping.get(token_id)
            if text is not None and name is not None:
                begun = max(begun, text.find(name, begun))
            begun += len(token.translate(None, _CONTINUATION))
            if text is not None and name is not None and "rstrip" in self.added_flags[name]:
                begun = end_of_space(text, begun)
            spans.append(TokenSpan(start, begun))
        return spans

    def description(self) -> dict[str, Any]:
        """Everything except the ranks, as JSON for `described`. Default values are omitted."""
        members = {
            "kind": self.kind,
            "added_tokens": self.added_tokens,
            "added_flags": self.added_flags,
            "end_of_text": self.end_of_text_name,
            "end_ids": [end for end in self.ends if end != self.end_of_text],
        }
        optional = _Description.model_validate(members).model_dump(exclude_defaults=True)
        if self.kind == "none":
            return {"kind": "none", "vocab_size": self.vocab_size} | optional
        return {
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "vocab_size": self.vocab_size,
            **optional,
        }

    def write_ranks(self, path: Path) -> None:
        lines = (
            base64.b64encode(token) + b" %d\n" % rank
            for token, rank in sorted(self.ranks.items(), key=lambda item: item[1])
        )
        write_whole(path, b"".join(lines))

    @classmethod
    def described(cls, description: Mapping[str, Any], ranks: Mapping[bytes, int]) -> "Tokenizer":
        """The tokenizer with this `description` and these ranks. Unknown members are ignored."""
        try:
            members = _Description.model_validate(dict(description)).model_dump()
        except ValidationError as error:
            raise TokenizerError(first_error(error, " of the tokenizer")) from error
        name = members.pop("end_of_text") or END_OF_TEXT
        return cls(ranks=ranks, end_of_text_name=name, **members)


def parse_ranks(raw: bytes, name: str) -> dict[bytes, int]:
    """Tokens and ranks of a ranks file; `name` is its name in messages. Raises TokenizerError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerError(
                f"line {number} of {name} is {line[:60]!r}; expected a base64 token, "
                "a space and its rank"
            ) from error
    return ranks


def _check_ranks(
    ranks: Mapping[bytes, int],
    special_tokens: Mapping[str, int],
    vocab_size: float,
    *,
    every_byte: bool,
) -> None:
    """Raise TokenizerError for ranks with which tiktoken would panic or encode wrongly. With
    `every_byte`, also raise it unless each of the 256 bytes has a rank."""
    if every_byte and (missing := [byte for byte in range(256) if bytes([byte]) not in ranks]):
        raise TokenizerError(
            f"{len(missing)} of the 256 single bytes have no rank (first: {missing[0]}); "
            "a byte-level vocabulary needs all of them"
        )
    without_id = [token for token, rank in ranks.items() if rank >= vocab_size]
    ordinary = len(ranks) - len(without_id)
    special = set(special_tokens.values())
    shared = special & set(ranks.values())
    if len(special) != len(special_tokens) or shared or any(token_id < 0 for token_id in special):
        raise TokenizerError(
            f"special tokens {dict(special_tokens)} share an id with each other or with one of "
            f"the {ordinary} ordinary tokens"
        )
    if any(token_id >= vocab_size for token_id in special):
        raise TokenizerError(
            f"special tokens {dict(special_tokens)} have ids beyond vocab_size {vocab_size}"
        )
    ids = (token_id for token_id in itertools.count() if token_id not in special)
    expected = list(itertools.islice(ids, ordinary))
    expected += [int(vocab_size) + index for index in range(len(without_id))]
    longer = any(len(token) > 1 for token in without_id)
    if not ranks or sorted(ranks.values()) != expected or (every_byte and longer):
        bytes_alone = f", and then only single bytes from vocab_size {vocab_size} on"
        less = ", without the ids of special tokens" if special & set(range(len(ranks))) else ""
        raise TokenizerError(
            f"the {len(ranks)} ranks are not the numbers 0 to {len(ranks) - 1}{less}"
            f"{bytes_alone if without_id else ''}"
        )
