"""Special tokens of other people's vocabularies: which entries are names and not text.

A name is known by its look (`<unk>`, `[PAD]`, `__eos__`) or, bare, by being one of a few. Ids
without any text get a name here, so that every id below the last has one.
"""

import re
from collections.abc import Collection, Mapping

from logitd.model.convert.foreign import ConvertError
from logitd.model.text.tokenizer import END_OF_TEXT

_LOOK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]|\{[^\s{}]+\}|__[^\W_]\w*__")
_BARE = frozenset(
    [
        "PAD",
        "UNK",
        "BOS",
        "EOS",
        "SOS",
        "EOT",
        "EOF",
        "EOD",
        "CLS",
        "SEP",
        "MASK",
        "START",
        "END",
        "STOP",
    ]
)

_END_NAMES = (
    *(END_OF_TEXT, "<eos>", "<EOS>", "</s>", "[EOS]", "<|eos|>", "<|eot|>", "<eot>", "<EOT>"),
    *("[EOD]", "<eod>", "<END>", "<end>", "[END]", "EOS", "EOT", "EOD"),
)
"""What ends a document, the first that is there."""

MOST_NAMELESS = 8
MOST_LISTED = 10**6
"""Ids without a text that are given a name; more of them are a damaged file."""


def looks_special(text: str) -> bool:
    """Whether a text is the name of a special token by its look: markup around one word."""
    return len(text) > 2 and _LOOK.fullmatch(text) is not None


def is_bare_name(text: str) -> bool:
    """Whether a text is a name that special tokens have without markup."""
    return text in _BARE


def nameless(texts: Collection[int]) -> list[int]:
    """Ids below the largest that have no text. Raises ConvertError where these are so many that it
    is not worth counting them."""
    if (largest := max(texts)) > len(texts) + MOST_LISTED:
        raise ConvertError(
            f"a vocabulary of {len(texts):,} texts has ids up to {largest:,}: it is damaged, or "
            "not a vocabulary"
        )
    return sorted(set(range(max(texts) + 1)).difference(texts))


def special_names(names: Mapping[int, str], ordinary: Collection[int]) -> dict[str, int]:
    """Names and ids of special tokens: those of `names`, and made-up ones for ids that are neither
    there nor among the ordinary ones."""
    special = {name: token_id for token_id, name in names.items()}
    for token_id in nameless({*names, *ordinary}):
        name = f"<|extra_{token_id}|>"
        while name in special:
            name = f"<{name}>"
        special[name] = token_id
    return special


def end_name(special: Collection[str]) -> str:
    """The name of the special token that ends a document; the usual one where none does."""
    return next((name for name in _END_NAMES if name in special), END_OF_TEXT)
