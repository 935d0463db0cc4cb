"""Tests of what is made once: equal vocabularies are one, and different ones stay different."""

import numpy as np
import tiktoken

from logitd.model.inference.constraints.compiler import Compiler, Source
from logitd.model.text.tokenizer import SPLIT_PATTERN, Tokenizer
from tests.model.factories import byte_tokenizer

BYTES = {bytes([byte]): byte for byte in range(256)}


def encoding(
    ranks: dict[bytes, int] = BYTES,
    pattern: str = SPLIT_PATTERN,
    special: dict[str, int] | None = None,
) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "any", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special or {}
    )


def test_equal_vocabulary_is_not_compiled_again() -> None:
    assert encoding()._core_bpe is encoding(dict(reversed(BYTES.items())))._core_bpe


def test_whatever_differs_is_another_vocabulary() -> None:
    plain = encoding()
    merged = encoding({**BYTES, b"ab": 256})
    letters = encoding({**BYTES, b"ab": 256}, pattern=".")
    special = encoding(special={"<|end|>": 256})
    named = encoding(special={"<|end|>": 257})

    assert plain.encode_ordinary("ab") == [97, 98]
    assert merged.encode_ordinary("ab") == [256]
    assert letters.encode_ordinary("ab") == [97, 98]
    assert special.encode("<|end|>", allowed_special="all") == [256]
    assert named.encode("<|end|>", allowed_special="all") == [257]


def test_constraints_of_one_vocabulary_are_not_those_of_another() -> None:
    plain = byte_tokenizer()
    merged = Tokenizer(
        ranks={**plain.ranks, b"ab": 257},
        pattern=plain.pattern,
        special_tokens=plain.special_tokens,
    )
    choice = Source("choice", '["ab"]')

    assert Compiler(plain)._vocabulary is Compiler(byte_tokenizer())._vocabulary
    for tokenizer, first in ((plain, {97}), (merged, {257})):
        matcher = Compiler(tokenizer).compile(choice).matcher()
        assert set(np.flatnonzero(matcher.allowed())) == first
