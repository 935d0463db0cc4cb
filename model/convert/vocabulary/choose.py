"""Choose: chooses the vocabulary of a model that was trained elsewhere.

The option --tokenizer may name the vocabulary. Otherwise it is taken from the checkpoint, or else
from a file near the checkpoint. If one place has several vocabularies that fit the model but
disagree, the user must choose. The first note names the source of the chosen vocabulary.

A vocabulary may not have more ids than the embedding has rows. It may have fewer ids in two cases:
the other rows may be padding (to a multiple of 8, 16, 32, 64 or 128, or at most 2 % of the rows),
or the model's settings state this number of ids. Any other vocabulary is refused, because it is
probably damaged or belongs to another model. Padding is not assumed for a list of tokens, because
its first id may be 1, unless its name is `itos` or similar. The user can allow a vocabulary with
fewer ids than rows (--unused-rows).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from logitd.model.convert.by_role.names import SETTINGS
from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.hf.added import with_ends
from logitd.model.convert.vocabulary.build import build_tokenizer
from logitd.model.convert.vocabulary.files import (
    count_characters,
    text_of_characters,
    vocabularies_beside,
)
from logitd.model.convert.vocabulary.named import FORMS, fixed_with, named_vocabulary
from logitd.model.convert.vocabulary.table import table_in
from logitd.model.text.published import PUBLISHED

PADDED_TO = (8, 16, 32, 64, 128)
"""Programs usually pad the number of ids to a multiple of one of these."""
WIDELY_PADDED_TO = (*PADDED_TO, 256, 512)
"""If the settings state the number of ids, the rows may be padded to a multiple of one of these."""
DEEPEST = 4
"""Sections of a checkpoint that are nested more deeply are not searched for a vocabulary."""
SLACK = 0.02
"""Rows without an id always count as padding if they are at most this fraction of all rows."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a model's embedding, which its vocabulary must fit.

    rows         number of rows, including padding
    stated       numbers of ids in the model's settings
    unused_rows  allow a vocabulary with fewer ids than rows
    """

    rows: int
    stated: frozenset[int]
    unused_rows: bool

    @property
    def ids(self) -> int:
        """The number of ids if there is no vocabulary. This is the stated number if the other rows
        may be padding; otherwise it is the number of rows."""
        sizes = (size for size in self.stated if _is_padding(size, self.rows, WIDELY_PADDED_TO))
        return max(sizes, default=self.rows)


def choose_vocabulary(
    named: str | None,
    *,
    contents: Mapping[str, Any],
    folder: Path,
    facts: Mapping[str, Any],
    rows: int,
    skip_normalizer: bool = False,
    unused_rows: bool = False,
    text: Path | None = None,
) -> ForeignTokenizer:
    """Choose the vocabulary of a model.

    named            value of --tokenizer
    contents         contents of the checkpoint, including settings, without tensors
    folder           folder of the checkpoint
    facts            facts about the source; "dataset" names nanoGPT's data folder
    rows             number of rows of the embedding, including padding
    skip_normalizer  ignore the normalizer of a tokenizer.json
    unused_rows      allow a vocabulary with fewer ids than rows
    text             value of --check: if there is no vocabulary, and the text has exactly as many
                     different characters as the model has ids, the characters become the
                     vocabulary

    Raises ConvertError if no vocabulary is found, if several vocabularies disagree, or if the
    number of ids does not fit the rows.
    """
    sizes = {
        value
        for key, value in _settings(contents)
        if key in SETTINGS["vocab_size"] and type(value) is int
    }
    model = _Rows(rows, frozenset(sizes), unused_rows)
    if named is not None:
        chosen = named_vocabulary(named, ids=model.ids, skip_normalizer=skip_normalizer)
    else:
        candidates, in_vain = list(_in_checkpoint(contents)), list[str]()
        if not candidates:
            candidates, in_vain = vocabularies_beside(
                folder, _dataset(facts), skip_normalizer=skip_normalizer
            )
        if candidates:
            chosen = _one_of(candidates, model)
        elif text is not None and count_characters(text) == model.ids:
            chosen = named_vocabulary(f"characters:{text}", ids=model.ids, skip_normalizer=False)
        elif text is not None and (fixed := fixed_with(model.ids)) is not None:
            chosen = named_vocabulary(fixed, ids=model.ids, skip_normalizer=False)
        else:
            raise _none_found(folder, rows, contents, in_vain)
    has_text = chosen.tokenizer.has_text
    if has_text and (sentence := _misfit(chosen, model)) is not None:
        raise ConvertError(sentence)
    vocabulary = with_ends(chosen, folder)
    if not has_text:
        return vocabulary
    note = f"the vocabulary of {_size_of(vocabulary):,} ids is from {chosen.where}"
    return replace(vocabulary, notes=(note, *vocabulary.notes))


def _in_checkpoint(contents: Mapping[str, Any]) -> Iterator[ForeignTokenizer]:
    sections = [("the checkpoint", contents, 0)]
    for where, section, depth in sections:  # grows
        if (table := table_in(section, where)) is not None:
            yield build_tokenizer(table)
        if depth < DEEPEST:
            inner = ((key, value) for key, value in section.items() if isinstance(value, Mapping))
            sections += [(f"{key!r} of {where}", value, depth + 1) for key, value in inner]


def _one_of(candidates: Sequence[ForeignTokenizer], model: _Rows) -> ForeignTokenizer:
    """The candidate that fits the model. If none fits, returns the first candidate, so that a later
    error reports its number of ids. Raises ConvertError if several fit but differ."""
    fitting = [candidate for candidate in candidates if _misfit(candidate, model) is None]
    if not fitting:
        return candidates[0]
    first = fitting[0]
    different = [each for each in fitting if _mapping(each) != _mapping(first)]
    if different:
        places = ", ".join(each.where for each in (first, *different))
        raise ConvertError(
            f"several vocabularies fit the model's {model.rows:,} rows and disagree: {places}. "
            "Choose one with --tokenizer"
        )
    return first


def _mapping(each: ForeignTokenizer) -> tuple[Any, ...]:
    tokenizer = each.tokenizer
    return tokenizer.kind, tokenizer.pattern, tokenizer.tokens, tokenizer.special_tokens, each.order


def _dataset(facts: Mapping[str, Any]) -> str | None:
    dataset = facts.get("dataset")
    known = isinstance(dataset, str) and dataset and Path(dataset).name == dataset
    return str(dataset) if known else None


def _none_found(
    folder: Path, rows: int, contents: Mapping[str, Any], in_vain: Sequence[str]
) -> ConvertError:
    looked = "".join(f"; {sentence}" for sentence in in_vain)
    words = {value for _, value in _settings(contents) if isinstance(value, str)}
    published = sorted(name for name in words & set(PUBLISHED) if PUBLISHED[name] <= rows)
    hint = (
        f" Its settings name {published[0]}: try --tokenizer {published[0]}." if published else ""
    )
    if (text := text_of_characters(folder, rows)) is not None:
        hint += (
            f" {text} has exactly {rows:,} different characters: --tokenizer characters:{text} is "
            "right if it was trained on that text."
        )
    if (fixed := fixed_with(rows)) is not None:
        hint += f" {rows} ids may be --tokenizer {fixed}."
    place = folder.resolve() if folder == Path() else folder
    return ConvertError(
        f"{place} has no vocabulary for the model's {rows:,} ids, nor has the checkpoint{looked}."
        f"{hint} Name one with --tokenizer: {FORMS}"
    )


def _size_of(vocabulary: ForeignTokenizer) -> int:
    return max(vocabulary.source_ids) + 1


def _misfit(candidate: ForeignTokenizer, model: _Rows) -> str | None:
    """A sentence that says why a vocabulary does not fit the rows; None if it fits."""
    size, rows, where = _size_of(candidate), model.rows, candidate.where
    if size > rows:
        return (
            f"the model has {rows:,} rows of the embedding, but the vocabulary ({where}) has ids "
            f"up to {size - 1:,}: they do not belong together. Name the right one with "
            "--tokenizer, or 'none' to import the model without a vocabulary"
        )
    if model.unused_rows or size in {rows, *model.stated}:
        return None
    padded = _is_padding(size, rows, PADDED_TO)
    if padded and candidate.listed:
        return (
            f"the model has {rows:,} rows of the embedding, but the vocabulary ({where}) is a list "
            f"of {size:,} tokens, so its first id may not be 0. Name a file that states the ids "
            "with --tokenizer, or allow the difference with --unused-rows if the first id is 0"
        )
    if padded:
        return None
    return (
        f"the model has {rows:,} rows of the embedding, but the vocabulary ({where}) {size:,} ids: "
        f"{rows - size:,} rows without a token are too many for padding. It is damaged, or belongs "
        "to another model. Name the right one with --tokenizer, or allow the difference with "
        "--unused-rows"
    )


def _is_padding(size: int, rows: int, multiples: Collection[int]) -> bool:
    padded = any(-(-size // multiple) * multiple == rows for multiple in multiples)
    return size <= rows and (padded or rows - size <= SLACK * rows)


def _settings(contents: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a checkpoint. In place of a key whose value is a dictionary, the
    keys and values of that dictionary are yielded."""
    for key, value in contents.items():
        yield from value.items() if isinstance(value, Mapping) else [(key, value)]
