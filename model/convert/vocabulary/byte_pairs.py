"""Byte pairs: converts hand-written byte pair encodings, as in lectures about tokenizers, to ranks.

Ids 0 to 255 are the bytes, and each merge of two ids creates the next id. Merges are applied in the
order of the ids that they create, to a text or to each of its pieces. tiktoken, which uses ranks,
gives the same ids if it forms each token by the same merge (`hf/merges.py`). This is checked for
every token. If no split pattern is stored, a pattern is assumed that splits no token, and a note
says so.

Merges of texts are supported in two cases: GPT-2's `vocab.json` with `merges.txt` is read as a
`tokenizer.json`, and merges of characters are accepted if each token is a whole word that ends in
`</w>`. All other merges of texts are refused, because their tokens consist of characters instead of
bytes.
"""

import base64
import binascii
import contextlib
from collections.abc import Iterable, Mapping

import regex

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer, naming
from logitd.model.convert.hf.merges import BYTE_CHARACTERS, last_pair, merge_piece
from logitd.model.convert.hf.tokenizer import GPT2_PATTERN
from logitd.model.convert.vocabulary.table import Table, Text
from logitd.model.convert.vocabulary.words import (
    WHOLE_TEXT,
    WITHOUT_TEXT,
    end_name,
    looks_special,
    special_names,
    word_tokenizer,
)
from logitd.model.text.published import O200K_PATTERN
from logitd.model.text.tokenizer import Tokenizer

GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
CUTS = {
    "GPT-4's pattern": GPT4_PATTERN,
    "GPT-2's pattern": GPT2_PATTERN,
    "GPT-4o's pattern": O200K_PATTERN,
    "a word, a number or punctuation with the white space before it": (
        r"\s?\p{L}+|\s?\p{N}+|\s?[^\s\p{L}\p{N}]+|\s+"
    ),
    "text without white space, with the white space before it": r"\s*\S+|\s+",
}
"""Split patterns by their descriptions. If a vocabulary has no stored pattern, the first of these
that splits no token is assumed."""

WORD_END = "</w>"


def byte_pair_tokenizer(table: Table) -> ForeignTokenizer:
    """Build a tokenizer from merges of ids. Raises ConvertError."""
    assert table.merges is not None
    tokens = _formed(table.merges, table.where)
    _compare(tokens, table)
    names = {i: _name(text) for i, text in table.texts.items() if i not in tokens}
    ranks = {token: token_id for token_id, token in tokens.items()}
    if len(ranks) < len(tokens):
        twice = next(token for i, token in tokens.items() if ranks[token] != i)
        raise ConvertError(
            f"{table.where}: two merges create {twice!r} with different ids, but ranks have only "
            f"one id for the same bytes. {WITHOUT_TEXT}"
        )
    for (left, right), token_id in table.merges.items():
        formed = last_pair(tokens[token_id], ranks)
        if formed != (tokens[left], tokens[right]):
            by = "no merges" if formed is None else f"{formed[0]!r} and {formed[1]!r}"
            raise ConvertError(
                f"{table.where}: {tokens[token_id]!r} is merged from {tokens[left]!r} and "
                f"{tokens[right]!r}, but with ranks it would be merged from {by}, so some texts "
                f"would get different ids. {WITHOUT_TEXT}"
            )
    return _ranked(ranks, names, table)


def ranks_tokenizer(table: Table) -> ForeignTokenizer:
    """Build a tokenizer from byte tokens and their ranks, as in tiktoken. Raises ConvertError."""
    names = {i: _name(text) for i, text in table.texts.items() if text in table.special}
    ranks = {
        text.encode() if isinstance(text, str) else text: i
        for i, text in table.texts.items()
        if i not in names
    }
    return _ranked(ranks, names, table)


def _ranked(ranks: Mapping[bytes, int], names: Mapping[int, str], table: Table) -> ForeignTokenizer:
    pattern, notes = table.pattern, tuple[str, ...]()
    if pattern is None:
        pattern, note = _assumed(ranks)
        notes = (note,)
    special = special_names(names, list(ranks.values()))
    with naming(table.where):
        tokenizer = Tokenizer(
            ranks=ranks,
            pattern=pattern,
            special_tokens=special,
            end_of_text_name=end_name(special),
        )
    return ForeignTokenizer(tokenizer=tokenizer, notes=notes)


def _formed(merges: Mapping[tuple[int, int], int], where: str) -> dict[int, bytes]:
    tokens = {byte: bytes([byte]) for byte in range(256)}
    for pair, token_id in sorted(merges.items(), key=lambda item: item[1]):
        if token_id in tokens or not all(part in tokens for part in pair):
            wrong = "is created twice" if token_id in tokens else "is merged from later ids"
            raise ConvertError(f"{where}: the id {token_id} {wrong} (a merge of {pair})")
        tokens[token_id] = tokens[pair[0]] + tokens[pair[1]]
    return tokens


def _compare(tokens: Mapping[int, bytes], table: Table) -> None:
    """Raise ConvertError if the table states a text for an id that differs from the token that the
    merges form."""
    for token_id, text in table.texts.items():
        token = tokens.get(token_id)
        if token is not None and token not in _readings(text):
            if token.decode(errors="replace") == text:
                continue  # an incomplete character, as decode() shows it
            raise ConvertError(
                f"{table.where}: id {token_id} has the text {text!r}, but its merges form {token!r}"
            )


def _readings(text: Text) -> set[bytes]:
    """The bytes that a text may stand for: its UTF-8 encoding, its decoded base64, or one byte per
    character."""
    if isinstance(text, bytes):
        return {text}
    readings = {text.encode()}
    with contextlib.suppress(binascii.Error, ValueError):
        readings.add(base64.b64decode(text, validate=True))
    if all(ord(character) < 256 for character in text):
        readings.add(text.encode("latin-1"))
    return readings


def _name(text: Text) -> str:
    """The name of a special token, which may be written in base64."""
    if isinstance(text, bytes):
        return text.decode(errors="replace")
    if looks_special(text):
        return text
    for reading in _readings(text):
        spelled = reading.decode(errors="replace")
        if looks_special(spelled):
            return spelled
    return text


def _assumed(tokens: Iterable[bytes]) -> tuple[str, str]:
    texts = [token.decode(errors="ignore") for token in tokens if len(token) > 1]
    for name, pattern in CUTS.items():
        cut = regex.compile(pattern)
        torn = [text for text in texts if len(cut.findall(text)) > 1]
        whole = "\0".join(set(texts).difference(torn))
        # A part of a whole token may be torn by itself: `'r` of `'re`.
        if texts and all(text in whole for text in torn):
            return pattern, (
                "the split pattern before merging is not stored: no token crosses a split by "
                f"{name}, so that is assumed; if another was used, some ids differ"
            )
    return WHOLE_TEXT, (
        "the split pattern before merging is not stored: tokens extend over several words, so it "
        "is assumed that texts are not split before merging"
    )


def string_pair_tokenizer(table: Table) -> tuple[Tokenizer, tuple[str, ...]]:
    """Build a tokenizer from merges of texts, if all tokens are whole words. Raises
    ConvertError."""
    assert table.strings is not None
    places = {pair: place for place, pair in reversed(list(enumerate(table.strings)))}
    texts = {i: t if isinstance(t, str) else t.decode() for i, t in table.texts.items()}
    words: dict[int, str] = {}
    for token_id, text in texts.items():
        if looks_special(text) and not text.endswith(WORD_END):
            continue
        word = text.removesuffix(WORD_END)
        if word == text or not word:
            raise ConvertError(
                f"{table.where}: its merges join characters, and the token {text!r} is part of a "
                "word, but ranks need bytes. A byte-level tokenizer.json of the tokenizers "
                f"library can be imported; {WITHOUT_TEXT}"
            )
        if merge_piece([*word, WORD_END], places) != [text]:
            raise ConvertError(
                f"{table.where}: its merges do not form its token {text!r} from {word!r}"
            )
        words[token_id] = word
    others = {i: text for i, text in texts.items() if i not in words}
    return word_tokenizer(words | others, table.where, set(others.values()))


def is_byte_level(table: Table) -> bool:
    """True if the table's texts include GPT-2's spelling of every byte (`hf/merges.py`)."""
    return set(BYTE_CHARACTERS.values()) <= set(table.texts.values())
