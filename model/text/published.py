"""Published vocabularies, given by the name of a tiktoken encoding or by the path of a ranks file.

A ranks file lacks the split pattern and the special tokens. For published files, both are looked up
by the file's hash; a new model gets logitd's pattern and an end of text after the ranks with any
other file. `model/convert/vocabulary/files.py` reads the files of models that exist.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import tiktoken

from logitd.model.files import VOCABULARY_BYTES, read_regular
from logitd.model.text.tokenizer import (
    CL100K_PATTERN,
    END_OF_TEXT,
    GPT2_PATTERN,
    SPLIT_PATTERN,
    Tokenizer,
    TokenizerError,
    parse_ranks,
)

O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PUBLISHED: Mapping[str, int] = {
    "gpt2": 50_257,
    "r50k_base": 50_257,
    "p50k_base": 50_281,
    "p50k_edit": 50_284,
    "cl100k_base": 100_277,
    "o200k_base": 200_019,
    "o200k_harmony": 201_088,
}
"""The number of ids of each published vocabulary."""

_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}

KNOWN_FILES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": (  # gpt2, r50k_base
        GPT2_PATTERN,
        {END_OF_TEXT: 50256},
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": (  # cl100k_base
        CL100K_PATTERN,
        {END_OF_TEXT: 100257, **_FIM, "<|endofprompt|>": 100276},
    ),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": (  # p50k_base, p50k_edit
        GPT2_PATTERN,
        {END_OF_TEXT: 50256},
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": (  # o200k_base and _harmony
        O200K_PATTERN,
        {END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
    ),
}
"""Split pattern and special tokens of published ranks files, by the file's sha256."""
WITH_MORE: Mapping[int, str] = {50_281: "p50k_edit", 200_019: "o200k_harmony"}
"""Encodings with the ranks of another published one and more special tokens, by the other's
number of ids."""


def published_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a published encoding, which tiktoken reads from its cache or downloads, or
    of the ranks file at a path. Raises TokenizerError."""
    return _named(name) if name in PUBLISHED else _from_file(Path(name))


def _named(name: str) -> Tokenizer:
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:  # tiktoken downloads with `requests`, whose errors are OSErrors
        raise TokenizerError(
            f"the ranks of {name} are not in tiktoken's cache and could not be downloaded "
            f"({type(error).__name__}): put them into the folder that TIKTOKEN_CACHE_DIR names, or "
            "give a ranks file"
        ) from error
    return Tokenizer(
        ranks=encoding._mergeable_ranks,
        pattern=encoding._pat_str,
        special_tokens=encoding._special_tokens,
    )


def _from_file(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"the tokenizer is {str(path)!r}; it must be 'own', one of {', '.join(PUBLISHED)}, or "
            "the path of a ranks file or a tokenizer.json"
        )
    try:
        raw = read_regular(path, VOCABULARY_BYTES)
    except OSError as error:
        raise TokenizerError(str(error)) from error
    ranks = parse_ranks(raw, path.name)
    # A model that is not yet trained may cut texts by any pattern.
    unknown = SPLIT_PATTERN, {END_OF_TEXT: len(ranks)}
    pattern, special_tokens = KNOWN_FILES.get(hashlib.sha256(raw).hexdigest(), unknown)
    return Tokenizer(ranks=ranks, pattern=pattern, special_tokens=special_tokens)
