"""A vocabulary held against the rows of the model's embedding.

More ids than rows do not belong together. Fewer are right where the rest is padding: the next
multiple of a power of two up to 128, or 2 % of the rows; or where the model's own settings say that
very number of ids. Anything else is another model's vocabulary, or a damaged one.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer

PADDED_TO = (8, 16, 32, 64, 128)
WIDELY_PADDED_TO = (*PADDED_TO, 256, 512)
"""What programs pad to whose settings say the number of ids besides."""
SLACK = 0.02
"""Share of the rows that may have no id."""


def size_of(vocabulary: ForeignTokenizer) -> int:
    """Ids of the source: the largest and one."""
    if vocabulary.order is not None:
        return max(vocabulary.order) + 1
    return vocabulary.tokenizer.vocab_size


def misfit(
    vocabulary: ForeignTokenizer, where: str, rows: int, stated: Collection[int]
) -> str | None:
    """What is wrong, as a sentence; None where the vocabulary fits. `stated` are the sizes that
    the model's settings say."""
    size = size_of(vocabulary)
    if size > rows:
        return (
            f"the model has {rows:,} rows of the embedding and the vocabulary ({where}) ids up to "
            f"{size - 1:,}: they do not belong together. Name the right one with --tokenizer, or "
            "'none' to import the model for token ids alone"
        )
    if _is_padding(size, rows, PADDED_TO) or size in stated:
        return None
    return (
        f"the model has {rows:,} rows of the embedding and the vocabulary ({where}) {size:,} ids: "
        f"{rows - size:,} rows without a token are more than padding would be. It is damaged, or "
        "another model's. Name the right one with --tokenizer; if the difference is meant, say "
        "--unused-rows"
    )


def hold_against_rows(
    vocabulary: ForeignTokenizer,
    where: str,
    *,
    rows: int,
    stated: Collection[int],
    unused_rows: bool,
) -> None:
    """Raise ConvertError unless the vocabulary fits; with `unused_rows` there may be fewer ids."""
    if unused_rows and size_of(vocabulary) <= rows:
        return
    if (sentence := misfit(vocabulary, where, rows, stated)) is not None:
        raise ConvertError(sentence)


def ids_of(rows: int, stated: Collection[int]) -> int:
    """How many ids a model without a vocabulary has: what its settings say, where the rest of its
    rows is padding."""
    sizes = (size for size in stated if _is_padding(size, rows, WIDELY_PADDED_TO))
    return max(sizes, default=rows)


def _is_padding(size: int, rows: int, multiples: Collection[int]) -> bool:
    padded = any(-(-size // multiple) * multiple == rows for multiple in multiples)
    return size <= rows and (padded or rows - size <= SLACK * rows)


def stated_sizes(contents: Mapping[str, Any]) -> frozenset[int]:
    """Sizes of the vocabulary that a model's own settings say."""
    return frozenset(_sizes(contents, depth=2))


def _sizes(values: Mapping[str, Any], depth: int) -> Iterator[int]:
    for key, value in values.items():
        if type(value) is int and key in ("vocab_size", "n_vocab", "vocabulary_size", "num_tokens"):
            yield value
        elif depth > 1 and isinstance(value, Mapping):
            yield from _sizes(value, depth - 1)
