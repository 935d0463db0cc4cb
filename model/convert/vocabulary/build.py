"""Build: builds a tokenizer from a table of ids and texts.

A table with merges of ids, or with byte tokens and ranks, becomes a byte pair encoding. A table of
single characters and names of special tokens becomes a vocabulary of characters. Every other table
becomes a vocabulary of words. If more than a few ids have no text, the table is refused as damaged.
`choose.py` checks whether the result fits a model.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import regex

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.hf.tokenizer import (
    GPT2_PATTERN,
    PATTERNS,
    tokenizer_class,
    tokenizer_of_document,
)
from logitd.model.convert.vocabulary.byte_pairs import (
    byte_pair_tokenizer,
    is_byte_level,
    ranks_tokenizer,
    string_pair_tokenizer,
)
from logitd.model.convert.vocabulary.table import Table, checked
from logitd.model.convert.vocabulary.words import (
    MOST_NAMELESS,
    character_tokenizer,
    is_bare_name,
    looks_special,
    nameless,
    word_tokenizer,
)


def build_tokenizer(table: Table, *, skip_normalizer: bool = False) -> ForeignTokenizer:
    """Build a tokenizer from a table, with notes about assumptions. Raises ConvertError."""
    table = replace(table, texts=checked(table.texts, table.where))
    listed = table.listed and table.strings is None
    return replace(_built(table, skip_normalizer), where=table.where, listed=listed)


def _built(table: Table, skip_normalizer: bool) -> ForeignTokenizer:
    if table.merges is not None:
        return byte_pair_tokenizer(table)
    if table.strings is not None and is_byte_level(table):
        return _as_document(table, skip_normalizer)
    _refuse_gaps(table)
    if table.strings is not None:
        tokenizer, notes = string_pair_tokenizer(table)
        return ForeignTokenizer(tokenizer=tokenizer, notes=notes)
    if table.ranked or any(isinstance(text, bytes) for text in table.texts.values()):
        return ranks_tokenizer(table)
    texts = {i: text for i, text in table.texts.items() if isinstance(text, str)}
    extra = _named_notes(texts)
    if are_characters(texts, table.special):
        return ForeignTokenizer(tokenizer=character_tokenizer(texts), notes=extra)
    tokenizer, notes = word_tokenizer(texts, table.where, table.special, stored=table.pattern)
    return ForeignTokenizer(tokenizer=tokenizer, notes=(*extra, *notes))


def are_characters(texts: Mapping[int, str], special: frozenset[str] = frozenset()) -> bool:
    """True if each text is a character or the name of a special token, and at least one text is a
    single code point. A character may have several code points."""
    single = [text for text in texts.values() if len(text) == 1]
    longer = [
        text
        for text in texts.values()
        if len(text) > 1
        and not (looks_special(text) or is_bare_name(text) or text in special)
        and regex.fullmatch(r"\X", text) is None
    ]
    return bool(single) and not longer


def _named_notes(texts: Mapping[int, str]) -> tuple[str, ...]:
    if not (gaps := ", ".join(map(str, nameless(texts)))):
        return ()
    return (f"the source has no text for the ids {gaps}: they become special tokens <|extra_N|>",)


def _refuse_gaps(table: Table) -> None:
    largest = max(table.texts)
    # Count ids instead of listing them, because an id may be any number.
    gaps = largest + 1 - sum(0 <= token_id <= largest for token_id in table.texts)
    if gaps > MOST_NAMELESS:
        first = next(token_id for token_id in itertools.count() if token_id not in table.texts)
        raise ConvertError(
            f"{table.where} has {len(table.texts):,} texts, but ids up to {largest:,}: {gaps:,} "
            f"ids have no text (the first is {first}), so it is damaged or not a vocabulary"
        )


def _as_document(table: Table, skip_normalizer: bool) -> ForeignTokenizer:
    """Convert a table from GPT-2's `vocab.json` and `merges.txt` to the contents of a
    `tokenizer.json`, and read the tokenizer from them."""
    assert table.strings is not None
    vocabulary = {str(text): token_id for token_id, text in table.texts.items()}
    formed = set(map("".join, table.strings))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "added_tokens": [
            {"content": text, "id": token_id, "special": True, **plain}
            for text, token_id in vocabulary.items()
            if looks_special(text) and text not in formed
        ],
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [list(pair) for pair in table.strings],
        },
    }
    place = Path(table.where)
    stated = tokenizer_class(place.parent) if place.is_file() else None
    note = "no file states the split pattern: GPT-2's is assumed, as in Hugging Face's library"
    if stated in PATTERNS:
        note = f"the split pattern is that of {stated}, the class of the tokenizer"
    if stated == "Qwen2Tokenizer":
        document["normalizer"] = {"type": "NFC"}
    foreign = tokenizer_of_document(
        document,
        place,
        pattern=PATTERNS.get(stated or "", GPT2_PATTERN),
        skip_normalizer=skip_normalizer,
        folder=place.parent if place.is_file() else None,
    )
    return replace(foreign, notes=(*foreign.notes, note))
