"""Special tokens of foreign vocabularies: entries that are names, not text.

A name is recognised by its markup (`<unk>`, `[PAD]`, `__eos__`) or, without markup, by a short
list. Ids without a text get a name, so that every id below the last has one.
"""

import re
from collections.abc import Collection, Mapping

from logitd.model.convert.foreign import ConvertError
from logitd.model.text.tokenizer import END_OF_TEXT

_LOOK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]|\{[^\s{}]+\}|__[^\W_]\w*__")
_BARE = frozenset(
    (
        *("PAD", "UNK", "BOS", "EOS", "SOS", "EOT", "EOF", "EOD"),
        *("CLS", "SEP", "MASK", "START", "END", "STOP"),
    )
)
_END_NAMES = (
    *(END_OF_TEXT, "<eos>", "<EOS>", "</s>", "[EOS]", "<|eos|>", "<|eot|>", "<eot>", "<EOT>"),
    *("[EOD]", "<eod>", "<END>", "<end>", "[END]", "EOS", "EOT", "EOD"),
)
"""Names of tokens that end a document, by precedence."""

MOST_NAMELESS = 8
"""Most ids without a text that get a name; more of them mean a damaged file."""
MOST_LISTED = 10**6
"""Most ids without a text that are listed."""


def looks_special(text: str) -> bool:
    """True for markup around one word."""
    return len(text) > 2 and _LOOK.fullmatch(text) is not None


def is_bare_name(text: str) -> bool:
    """True for a name that special tokens have without markup."""
    return text in _BARE


def nameless(texts: Collection[int]) -> list[int]:
    """Ids below the largest that have no text. Raises ConvertError for more than MOST_LISTED."""
    if (largest := max(texts)) > len(texts) + MOST_LISTED:
        raise ConvertError(
            f"a vocabulary of {len(texts):,} texts has ids up to {largest:,}: it is damaged, or "
            "not a vocabulary"
        )
    return sorted(set(range(largest + 1)).difference(texts))


def special_names(names: Mapping[int, str], ordinary: Collection[int]) -> dict[str, int]:
    """Names and ids of special tokens: those of `names`, and made-up ones for ids that are in
    neither."""
    special = {name: token_id for token_id, name in names.items()}
    for token_id in nameless({*names, *ordinary}):
        name = f"<|extra_{token_id}|>"
        while name in special:
            name = f"<{name}>"
        special[name] = token_id
    return special


def end_name(special: Collection[str]) -> str:
    """The name of the special token that ends a document; END_OF_TEXT if there is none."""
    return next((name for name in _END_NAMES if name in special), END_OF_TEXT)
