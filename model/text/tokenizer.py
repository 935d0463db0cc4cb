"""Tokenizer: text to token ids and back, by tiktoken, read from files alone.

Covers the ranks file (`tokenizer.tiktoken`: one base64 token, a space and its rank per line), the
split pattern and special tokens that stand beside it in `config.json`, where each token lies in
its text, and incremental decoding that never shows half a character. Does not cover learning a
vocabulary (`model/data/vocabulary.py`) or reading other people's (`model/convert/`), and never
opens a network connection by itself: only `Tokenizer.named` asks tiktoken for a published encoding,
which tiktoken may download.
"""

import base64
import binascii
import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tiktoken

END_OF_TEXT = "<|endoftext|>"
PUBLISHED = ("gpt2", "cl100k_base", "o200k_base")

SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]{1,64}+[\r\n]{0,64}+|\s{0,64}[\r\n]|\s{1,64}(?!\S)|\s"
)
"""How text is cut before merging, for vocabularies of our own.

The shape of GPT-4's pattern with at most two digits together, and with every open-ended run of
white space bounded: the published patterns overflow tiktoken's stack on about a million spaces.
"""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that go on with a character; every other one begins one."""


class TokenizerError(ValueError):
    """A vocabulary or a token id that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Where one token of a text lies: characters [start, end) that it touches."""

    start: int
    end: int


class Tokenizer:
    """A byte-level BPE vocabulary with its split pattern and special tokens.

    Ordinary ids are the ranks 0 .. n - 1; special tokens follow. Text that looks like a special
    token is encoded as plain text, unless its id is asked for.

    tiktoken needs a rank for each of the 256 bytes, and other people's vocabularies may lack some:
    such bytes have the ranks from `vocab_size` on, which are not ids. A text that needs one of them
    is rejected, so that no caller gets a token that the model does not have. `end_of_text_name` is
    the special token that ends a document.
    """

    def __init__(
        self,
        *,
        ranks: Mapping[bytes, int],
        pattern: str,
        special_tokens: Mapping[str, int],
        vocab_size: int | None = None,
        end_of_text_name: str = END_OF_TEXT,
    ) -> None:
        beyond = math.inf if vocab_size is None else vocab_size
        _check_ranks(ranks, special_tokens, beyond)
        self.ranks = dict(ranks)
        self.pattern = pattern
        self.special_tokens = dict(special_tokens)
        self.ordinary = sum(rank < beyond for rank in ranks.values())
        """Ids 0 to ordinary - 1 are text."""
        self.vocab_size = max([self.ordinary - 1, *special_tokens.values()]) + 1
        self.end_of_text_name = end_of_text_name
        try:
            self._encoding = tiktoken.Encoding(
                "logitd",
                pat_str=pattern,
                mergeable_ranks=self.ranks,
                special_tokens=self.special_tokens,
            )
        except ValueError as error:
            raise TokenizerError(
                f"the split pattern {pattern[:60]!r} is not a regular expression: {error}"
            ) from error
        # Ids of a published encoding may have gaps; a gap has no bytes.
        self._bytes = [b""] * self.vocab_size
        for token, rank in self.ranks.items():
            if rank < self.ordinary:
                self._bytes[rank] = token
        for text, token_id in self.special_tokens.items():
            self._bytes[token_id] = text.encode()
        self._special_ids = frozenset(self.special_tokens.values())
        self._complete = self.ordinary == len(self.ranks)
        self.longest_token = max(map(len, self.ranks))
        """Bytes of the longest ordinary token: a text has at least bytes / this many tokens."""

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document, if the vocabulary has one."""
        return self.special_tokens.get(self.end_of_text_name)

    def encode(self, text: str, *, special_ids: bool = False) -> list[int]:
        """Token ids of a text. The name of a special token is plain text, or, with `special_ids`,
        becomes its id. Raises TokenizerError for a character that the vocabulary lacks."""
        ids = self._encoding.encode(
            text, allowed_special="all" if special_ids else set(), disallowed_special=()
        )
        self._check_complete(ids)
        return ids

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """`encode` of many texts, on several threads."""
        batch = self._encoding.encode_batch(list(texts), num_threads=threads, disallowed_special=())
        for ids in batch:
            self._check_complete(ids)
        return batch

    def _check_complete(self, ids: Sequence[int]) -> None:
        """Raise TokenizerError, naming the character, where an encoded text needs a byte without
        an id."""
        if self._complete or not ids or max(ids) < self.vocab_size:
            return
        whole = b"".join(map(self._encoding.decode_single_token_bytes, ids))
        start = 0
        for token_id in ids:
            if token_id >= self.vocab_size:
                break
            start += len(self._encoding.decode_single_token_bytes(token_id))
        character = len(whole[:start].decode(errors="ignore"))
        raise TokenizerError(
            f"{whole.decode(errors='replace')[character]!r}, the character at {character} of the "
            f"text, is not in the vocabulary, which lacks {len(self.ranks) - self.ordinary} of "
            "the 256 bytes; the model never saw them"
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

    def spans(self, token_ids: Iterable[int]) -> list[TokenSpan]:
        """Where each id of an encoded text lies in it. A token that holds some bytes of a character
        touches that character, so two tokens may share one.

        Found from the bytes alone: tiktoken's own offsets raise on incomplete text.
        """
        spans, begun = [], 0  # characters whose first byte has come
        for token in map(self.token_bytes, token_ids):
            start = begun - 1 if token and token[0] in _CONTINUATION else begun
            begun += len(token.translate(None, _CONTINUATION))
            spans.append(TokenSpan(start, begun))
        return spans

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)

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
            path.read_bytes(), name=path.name, pattern=pattern, special_tokens=special_tokens
        )

    @classmethod
    def parse_ranks(
        cls,
        raw: bytes,
        *,
        name: str,
        pattern: str = SPLIT_PATTERN,
        special_tokens: Mapping[str, int] | None = None,
        vocab_size: int | None = None,
        end_of_text_name: str = END_OF_TEXT,
    ) -> "Tokenizer":
        """`read_ranks` of bytes already read; `name` is the file's, for messages."""
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
        if special_tokens is None:
            special_tokens = {END_OF_TEXT: len(ranks)}
        return cls(
            ranks=ranks,
            pattern=pattern,
            special_tokens=special_tokens,
            vocab_size=vocab_size,
            end_of_text_name=end_of_text_name,
        )

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


def _check_ranks(
    ranks: Mapping[bytes, int], special_tokens: Mapping[str, int], vocab_size: float
) -> None:
    """tiktoken panics or answers wrongly on these, so they are refused here."""
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(
            f"{len(missing)} of the 256 single bytes have no rank (first: {missing[0]}); "
            "a byte-level vocabulary needs all of them"
        )
    without_id = [token for token, rank in ranks.items() if rank >= vocab_size]
    ordinary = len(ranks) - len(without_id)
    expected = [*range(ordinary), *(vocab_size + index for index in range(len(without_id)))]
    if sorted(ranks.values()) != expected or any(len(token) > 1 for token in without_id):
        bytes_alone = f", with single bytes alone from vocab_size {vocab_size} on"
        raise TokenizerError(
            f"the {len(ranks)} ranks are not the numbers 0 to {len(ranks) - 1}"
            f"{bytes_alone if without_id else ''}"
        )
    ids = list(special_tokens.values())
    if len(set(ids)) != len(ids) or any(token_id < ordinary for token_id in ids):
        raise TokenizerError(
            f"special tokens {dict(special_tokens)} share an id with each other or with one of "
            f"the {ordinary} ordinary tokens"
        )
    if any(token_id >= vocab_size for token_id in ids):
        raise TokenizerError(
            f"special tokens {dict(special_tokens)} go beyond vocab_size {vocab_size}"
        )
