"""Tokenizer: text to token ids and back, read from files alone.

Covers byte pair encoding by tiktoken, vocabularies whose tokens are whole pieces of text
(`pieces.py`), and models without a vocabulary, which know token ids alone; the ranks file
(`tokenizer.tiktoken`: one base64 token, a space and its rank per line), and what stands beside it
in `config.json`; tokens that are split off before a text is cut (`added_tokens.py`); where each
token lies in its text, and incremental decoding that never shows half a character. Does not cover
learning a vocabulary (`model/data/vocabulary.py`) or reading other people's (`model/convert/`), and
never opens a network connection by itself: only `Tokenizer.named` asks tiktoken for a published
encoding, which tiktoken may download.
"""

import base64
import binascii
import codecs
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import regex
import tiktoken
from pydantic import BaseModel, ConfigDict, ValidationError

from logitd.model.files import VOCABULARY_BYTES, read_regular
from logitd.model.text.added_tokens import AddedTokens, Cut, Flag, end_of_space
from logitd.model.text.pieces import PieceEncoder, UnknownPiece, word_spans

END_OF_TEXT = "<|endoftext|>"
PUBLISHED = ("gpt2", "cl100k_base", "o200k_base")

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
"""Split patterns of published encodings."""
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}[\p{L}\p{M}]*+|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]{1,64}+[\r\n]{0,64}+|\s{0,64}[\r\n]|\s{1,64}(?!\S)|\s"
)
"""Split pattern of vocabularies that are learned here. A checkpoint stores its own.

The shape of GPT-4's pattern. Combining marks stay with their letters, as Hindi and other scripts
need it; at most two digits are together; every open-ended run of white space is bounded, because
the published patterns overflow tiktoken's stack on about a million spaces.
"""
KNOWN_PATTERNS = frozenset(
    (
        *(SPLIT_PATTERN, GPT2_PATTERN, CL100K_PATTERN),
        SPLIT_PATTERN.replace(r"\p{L}[\p{L}\p{M}]*+", r"\p{L}++"),  # of older checkpoints
    )
)
"""Patterns that take time in proportion to a text and leave nothing of it out."""

TokenizerKind = Literal["bpe", "pieces", "words", "none"]
"""How a text becomes ids.

bpe     cut by the pattern; a piece that is a token is that token, the others are merged from bytes
pieces  cut by the pattern; every piece is a token as a whole
words   the same; tokens begin with a space that a text may leave out, white space only separates
none    not at all: there is no vocabulary, and the ids have no text
"""

NO_VOCABULARY = (
    "this model has no vocabulary: its token ids have no text, so a text has no token ids. Give "
    "token ids; or, if its vocabulary is known, import the model once more with --tokenizer"
)
"""Why a text is rejected where there are ids alone."""

MOST_IDS = 2**24
"""Of a vocabulary: sixty times the largest that is published."""

TRIED = "A word, 2 numbers (1.5)\n\tand\u00e9\u4e16."
"""A text that every pattern of a tokenizer is tried on."""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that go on with a character; every other one begins one."""


class TokenizerError(ValueError):
    """A vocabulary or a token id that cannot be used; the message says which and why."""


class NoVocabularyError(TokenizerError):
    """A text for a model that knows token ids alone."""

    def __init__(self) -> None:
        super().__init__(NO_VOCABULARY)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Where one token of a text lies: characters [start, end) that it touches."""

    start: int
    end: int


class _Description(BaseModel):
    """The members of a tokenizer in JSON."""

    model_config = ConfigDict(strict=True)

    pattern: str = ""
    special_tokens: dict[str, int] = {}
    vocab_size: int | None = None
    kind: TokenizerKind = "bpe"
    added_tokens: dict[str, int] = {}
    added_flags: dict[str, list[Flag]] = {}
    end_of_text: str | None = None
    end_ids: list[int] = []


class Tokenizer:
    """A vocabulary with its split pattern and special tokens, of one of the kinds.

    ranks             bytes of each ordinary token and its id
    special_tokens    names and ids. The ordinary ids are those from 0 on that are not special, so
                      special tokens may stand before, between and after them
    added_tokens    texts that are one token wherever they occur, and their ids. An id may be that
                    of the ordinary token with the same bytes
    added_flags     of special and added tokens, by name (`added_tokens.py`)
    end_of_text_name  the special token that ends a document
    end_ids         other ids that end a generated text

    Text that looks like a special token is encoded as plain text, unless its id is asked for.

    tiktoken needs a rank for each of the 256 bytes, and other people's vocabularies may lack some:
    such bytes have the ranks from `vocab_size` on, which are not ids. A text that needs one of them
    is rejected, so that no caller gets a token that the model does not have.
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
            self._added = AddedTokens(self.special_tokens, self.added_tokens, self.added_flags)
        except ValueError as error:
            raise TokenizerError(str(error)) from error
        largest = max([vocab_size or 0, *named.values()])
        if largest > MOST_IDS:
            raise TokenizerError(
                f"the vocabulary goes up to {largest:,}; {MOST_IDS:,} ids are the most it may have"
            )
        self.kind: TokenizerKind = kind
        self.ranks = dict(ranks)
        self.pattern = pattern
        self.end_of_text_name = end_of_text_name
        self.tokens = {token: rank for token, rank in self.ranks.items() if rank < beyond}
        """Ordinary tokens and their ids: the ranks without the bytes that the vocabulary lacks."""
        if kind == "none":
            if ranks or named or vocab_size is None or vocab_size < 1:
                raise TokenizerError(
                    f"a tokenizer of kind 'none' has ids alone: {len(ranks)} ranks, "
                    f"{len(named)} special tokens and vocab_size {vocab_size} were given"
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
        if kind != "none" and not pattern:
            raise TokenizerError(
                "the split pattern is empty, so it cuts no text: a pattern says what the pieces of "
                "a text are; the whole text is one piece with '[\\s\\S]+'"
            )
        ends = (self.end_of_text, *end_ids)
        self.ends = tuple(dict.fromkeys(end for end in ends if end is not None))
        """Ids that end a generated text; the first is the end of a document, if there is one."""
        if wrong := [end for end in self.ends if not 0 <= end < self.vocab_size]:
            raise TokenizerError(
                f"end_ids has {wrong[0]}, outside the vocabulary of {self.vocab_size} ids"
            )
        self._encoding = self._byte_pairs() if kind == "bpe" else None
        self._pieces = self._whole_pieces() if kind in ("pieces", "words") else None
        # Ids of a published encoding may have gaps, and of kind "none" all are: without bytes.
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
            encoding = tiktoken.Encoding(
                "logitd",
                pat_str=self.pattern,
                mergeable_ranks=self.ranks,
                special_tokens={},
            )
        except ValueError as error:
            raise self._bad_pattern(error) from error
        with self._teaching():
            encoding.encode_ordinary(TRIED)  # a pattern that matches nothing at all shows here
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
        """The tokenizer of a model whose ids have no text: it knows how many there are."""
        return cls(ranks={}, pattern="", special_tokens={}, vocab_size=vocab_size, kind="none")

    @property
    def has_text(self) -> bool:
        """Whether there is a vocabulary; without one, texts are rejected and ids have none."""
        return self.kind != "none"

    @property
    def cuts_in_time(self) -> bool:
        """Whether its pattern takes time in proportion to a text; one from a file may not."""
        if self._pieces is not None:
            return self._pieces.is_known
        return self.pattern in KNOWN_PATTERNS or not self.has_text

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document, if the vocabulary has one."""
        return self.special_tokens.get(self.end_of_text_name)

    def encode(self, text: str, *, special_ids: bool = False) -> list[int]:
        """Token ids of a text. The name of a special token is plain text, or, with `special_ids`,
        becomes its id. Raises TokenizerError for a character or a word that the vocabulary lacks,
        and NoVocabularyError where there is none."""
        if self.kind == "none":
            raise NoVocabularyError
        if not special_ids and not self.added_tokens:
            return self._encode_ordinary(text, 0)
        ids = list[int]()
        for cut in self.split(text, text if special_ids else ""):
            if cut.token_id is None:
                ids += self._encode_ordinary(text[cut.start : cut.end], cut.start)
            else:
                ids.append(cut.token_id)
        return ids

    def split(self, text: str, written: str) -> Iterator[Cut]:
        """A text cut at its added tokens; special ones count where they are in `written` as well
        (`AddedTokens.split`)."""
        return self._added.split(text, written)

    def _encode_ordinary(self, text: str, at: int) -> list[int]:
        """The ids of a text without added tokens, which begins at the character `at` of a whole."""
        if self._pieces is not None:
            try:
                return self._pieces.encode(text, at)
            except UnknownPiece as error:
                raise TokenizerError(str(error)) from error
        assert self._encoding is not None
        with self._teaching():
            ids = self._encoding.encode_ordinary(text)
        self._check_complete(ids, at)
        self._check_whole(ids, text)
        return ids

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """`encode` of many texts, on several threads."""
        if self._encoding is None or self.added_tokens:
            return list(map(self.encode, texts))
        with self._teaching():
            batch = self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)
        for ids, text in zip(batch, texts, strict=True):
            self._check_complete(ids, 0)
            self._check_whole(ids, text)
        return batch

    def _check_whole(self, ids: Sequence[int], text: str) -> None:
        """Raise TokenizerError if the pattern, which is not a known one, leaves out characters."""
        assert self._encoding is not None
        if self.pattern in KNOWN_PATTERNS:
            return
        whole = text.encode(errors="replace")
        if len(kept := self._encoding.decode_bytes(list(ids))) < len(whole):
            raise TokenizerError(
                f"the split pattern {self.pattern[:60]!r} keeps {len(kept)} of the text's "
                f"{len(whole)} bytes"
            )

    @contextmanager
    def _teaching(self) -> Iterator[None]:
        """Turns what tiktoken raises where a pattern cuts a text into nothing at all, or does not
        come to an end, into a TokenizerError."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(
                f"the split pattern {self.pattern[:60]!r} does not cut this text into pieces: "
                f"{str(error)[:100]}"
            ) from error

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, known without encoding it."""
        if self.kind in ("words", "none") or self._stripping:
            return 0  # white space may have none; nothing has one
        return -(-len(text.encode()) // self._longest_token)

    def _check_complete(self, ids: Sequence[int], at: int) -> None:
        """Raise TokenizerError, naming the character, where an encoded text, which begins at the
        character `at` of a whole, needs a byte without an id."""
        if self._complete or not ids or max(ids) < self.vocab_size:
            return
        assert self._encoding is not None
        tokens = list(map(self._encoding.decode_single_token_bytes, ids))
        known = next(place for place, token_id in enumerate(ids) if token_id >= self.vocab_size)
        whole, start = b"".join(tokens), sum(map(len, tokens[:known]))
        character = len(whole[:start].decode(errors="ignore"))
        raise TokenizerError(
            f"{whole.decode(errors='replace')[character]!r}, the character at {at + character} of "
            f"the text, is not in the vocabulary, which lacks {len(self.ranks) - len(self.tokens)} "
            "of the 256 bytes; the model never saw them"
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(map(self.token_bytes, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for (of a special token: its name)."""
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} ids "
                f"(0 to {self.vocab_size - 1})"
            )
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One id as text, for people; `token_bytes` is the truth."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def spans(self, token_ids: Iterable[int], text: str | None = None) -> list[TokenSpan]:
        """Where each id of an encoded text lies in it. A token that holds some bytes of a character
        touches that character, so two tokens may share one.

        Found from the bytes alone: tiktoken's own offsets raise on incomplete text. Of kind "words"
        the `text` is needed as well, whose white space the ids do not know; so it is where added
        tokens strip white space, which then belongs to them.
        """
        if self.kind == "words":
            if text is None:
                raise ValueError("where words lie is found in their text; none was given")
            names = map(self.token_text, token_ids)
            return list(itertools.starmap(TokenSpan, word_spans(names, text)))
        spans, begun = [], 0  # characters whose first byte has come
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

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)

    def description(self) -> dict[str, Any]:
        """All but the ranks, as JSON: what `described` takes with a file of them. Usual values are
        left out."""
        usual = {
            "kind": "bpe",
            "added_tokens": {},
            "added_flags": {},
            "end_of_text": END_OF_TEXT,
            "end_ids": [],
        }
        said = {
            "kind": self.kind,
            "added_tokens": self.added_tokens,
            "added_flags": self.added_flags,
            "end_of_text": self.end_of_text_name,
            "end_ids": [end for end in self.ends if end != self.end_of_text],
        }
        unusual = {name: value for name, value in said.items() if value != usual[name]}
        if self.kind == "none":
            return {"kind": "none", "vocab_size": self.vocab_size} | unusual
        return {
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "vocab_size": self.vocab_size,
            **unusual,
        }

    def write_ranks(self, path: Path) -> None:
        """Write the ranks in tiktoken's file form."""
        lines = (
            base64.b64encode(token) + b" %d\n" % rank
            for token, rank in sorted(self.ranks.items(), key=lambda item: item[1])
        )
        path.write_bytes(b"".join(lines))

    @classmethod
    def read_ranks(
        cls,
        path: Path,
        *,
        pattern: str = SPLIT_PATTERN,
        special_tokens: Mapping[str, int] | None = None,
    ) -> "Tokenizer":
        """Read a ranks file. Without special tokens, END_OF_TEXT takes the id after the last."""
        return cls.parse_ranks(
            read_regular(path, VOCABULARY_BYTES),
            name=path.name,
            pattern=pattern,
            special_tokens=special_tokens,
        )

    @classmethod
    def parse_ranks(
        cls,
        raw: bytes,
        *,
        name: str,
        pattern: str = SPLIT_PATTERN,
        special_tokens: Mapping[str, int] | None = None,
    ) -> "Tokenizer":
        """`read_ranks` of bytes already read; `name` is the file's, for messages."""
        ranks = parse_ranks(raw, name)
        if special_tokens is None:
            special_tokens = {END_OF_TEXT: len(ranks)}
        return cls(ranks=ranks, pattern=pattern, special_tokens=special_tokens)

    @classmethod
    def described(cls, description: Mapping[str, Any], ranks: Mapping[bytes, int]) -> "Tokenizer":
        """The tokenizer of a `description`, which may have other members besides, and its ranks."""
        try:
            said = _Description.model_validate(dict(description))
        except ValidationError as error:
            first = error.errors()[0]
            raise TokenizerError(
                f"{'.'.join(map(str, first['loc']))[:60]} of the tokenizer is "
                f"{str(first['input'])[:60]!r}: {first['msg']}"
            ) from error
        members = said.model_dump()
        name = members.pop("end_of_text") or END_OF_TEXT
        return cls(ranks=ranks, end_of_text_name=name, **members)

    @classmethod
    def named(cls, name: str) -> "Tokenizer":
        """A published tiktoken encoding. tiktoken reads it from its cache or downloads it."""
        if name not in PUBLISHED:
            raise TokenizerError(f"unknown encoding {name!r}; known are {', '.join(PUBLISHED)}")
        try:
            encoding = tiktoken.get_encoding(name)
        except OSError as error:  # requests' errors are OSErrors
            raise TokenizerError(
                f"the ranks of {name} are not in tiktoken's cache and could not be downloaded "
                f"({type(error).__name__}); put them into the folder that TIKTOKEN_CACHE_DIR "
                "names, or give a ranks file"
            ) from error
        return cls(
            ranks=encoding._mergeable_ranks,
            pattern=encoding._pat_str,
            special_tokens=encoding._special_tokens,
        )


class Detokenizer:
    """Turns a growing list of ids into text, piece by piece.

    The pieces joined equal `Tokenizer.decode` of all the ids, and no piece ends inside a
    character: its bytes are held until it is whole, or until `finish`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that one more id completes, "" while a character is open."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left of an open character: "" or U+FFFD."""
        return self._decoder.decode(b"", final=True)


def parse_ranks(raw: bytes, name: str) -> dict[bytes, int]:
    """The tokens and ranks of a file's bytes; `name` is the file's, for messages. Raises
    TokenizerError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
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
    """tiktoken panics or answers wrongly on these, so they are refused here. `every_byte`: it
    needs a rank for each of them."""
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
            f"special tokens {dict(special_tokens)} go beyond vocab_size {vocab_size}"
        )
    ids = (token_id for token_id in itertools.count() if token_id not in special)
    expected = list(itertools.islice(ids, ordinary))
    expected += [int(vocab_size) + index for index in range(len(without_id))]
    longer = any(len(token) > 1 for token in without_id)
    if not ranks or sorted(ranks.values()) != expected or (every_byte and longer):
        bytes_alone = f", with single bytes alone from vocab_size {vocab_size} on"
        less = ", without those of special tokens" if special & set(range(len(ranks))) else ""
        raise TokenizerError(
            f"the {len(ranks)} ranks are not the numbers 0 to {len(ranks) - 1}{less}"
            f"{bytes_alone if without_id else ''}"
        )
