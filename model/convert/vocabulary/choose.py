"""Which vocabulary a model trained elsewhere has: the one that is named, else the one in its
checkpoint, else the one beside it.

Where a place has several that fit the model and disagree, none is taken: the user says which. What
was taken, and from where, is the first of its notes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.hf.added import with_ends
from logitd.model.convert.source_file import source_text
from logitd.model.convert.vocabulary.build import build_tokenizer
from logitd.model.convert.vocabulary.files import Candidate, text_of_characters, vocabularies_beside
from logitd.model.convert.vocabulary.named import FORMS, named_vocabulary
from logitd.model.convert.vocabulary.rows import (
    hold_against_rows,
    ids_of,
    misfit,
    size_of,
    stated_sizes,
)
from logitd.model.convert.vocabulary.table import table_in
from logitd.model.text.tokenizer import PUBLISHED


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
    """The vocabulary of a model with `rows` rows of the embedding, padding included.

    named            what --tokenizer says
    contents         what the checkpoint holds beside its tensors, settings among it
    folder           where it lies
    facts            of the source; "dataset" names nanoGPT's data folder
    skip_normalizer  leave out the normalizer of a tokenizer.json
    unused_rows      there may be fewer ids than rows
    text             one that the model will be tried on: where there is no vocabulary, and the text
                     has exactly as many different characters as the model ids, these are it

    Raises ConvertError where there is none, where several disagree, and where the number of ids
    does not fit the rows.
    """
    stated = stated_sizes(contents)
    if named is not None:
        chosen = named_vocabulary(named, ids=ids_of(rows, stated), skip_normalizer=skip_normalizer)
        unused_rows |= not chosen.vocabulary.tokenizer.has_text
    else:
        candidates, in_vain = list(_in_checkpoint(contents)), list[str]()
        if not candidates:
            candidates, in_vain = vocabularies_beside(
                folder, _dataset(facts), skip_normalizer=skip_normalizer
            )
        if candidates:
            chosen = _one_of(candidates, rows, stated, unused_rows)
        elif text is not None and _count_characters(text) == ids_of(rows, stated):
            chosen = named_vocabulary(
                f"characters:{text}", ids=ids_of(rows, stated), skip_normalizer=False
            )
        else:
            raise _none_found(folder, rows, contents, in_vain)
    hold_against_rows(
        chosen.vocabulary, chosen.where, rows=rows, stated=stated, unused_rows=unused_rows
    )
    vocabulary = with_ends(chosen.vocabulary, folder)
    if not vocabulary.tokenizer.has_text:
        return vocabulary
    note = f"the vocabulary of {size_of(vocabulary):,} ids is from {chosen.where}"
    return replace(vocabulary, notes=(note, *vocabulary.notes))


def _in_checkpoint(contents: Mapping[str, Any]) -> Iterator[Candidate]:
    """Vocabularies among a checkpoint's own entries, and one level down."""
    inner = [(f"{key!r} of the checkpoint", value) for key, value in contents.items()]
    for where, container in [("the checkpoint", contents), *inner]:
        if isinstance(container, Mapping) and (table := table_in(container, where)) is not None:
            yield Candidate(table.where, build_tokenizer(table))


def _one_of(
    candidates: Sequence[Candidate], rows: int, stated: frozenset[int], unused_rows: bool
) -> Candidate:
    """The one that fits; where none does, the first, so that its numbers are told."""
    fitting = [
        candidate
        for candidate in candidates
        if misfit(candidate.vocabulary, candidate.where, rows, stated) is None
        or (unused_rows and size_of(candidate.vocabulary) <= rows)
    ]
    if not fitting:
        return candidates[0]
    different = [
        candidate for candidate in fitting if not _same(candidate.vocabulary, fitting[0].vocabulary)
    ]
    if different:
        places = ", ".join(candidate.where for candidate in (fitting[0], *different))
        raise ConvertError(
            f"there are several vocabularies that fit the model's {rows:,} rows and disagree: "
            f"{places}. Say which is right with "
            "--tokenizer"
        )
    return fitting[0]


def _same(vocabulary: ForeignTokenizer, other: ForeignTokenizer) -> bool:
    """Whether two give every text the same ids, as far as it can be seen."""
    first, second = vocabulary.tokenizer, other.tokenizer
    return (first.kind, first.pattern, first.tokens, first.special_tokens, vocabulary.order) == (
        second.kind,
        second.pattern,
        second.tokens,
        second.special_tokens,
        other.order,
    )


def _count_characters(text: Path) -> int | None:
    """How many different characters a text has; None where it cannot be read."""
    try:
        return len(set(source_text(text)))
    except ConvertError:
        return None


def _dataset(facts: Mapping[str, Any]) -> str | None:
    dataset = facts.get("dataset")
    known = isinstance(dataset, str) and dataset and Path(dataset).name == dataset
    return str(dataset) if known else None


def _none_found(
    folder: Path, rows: int, contents: Mapping[str, Any], in_vain: Sequence[str]
) -> ConvertError:
    looked = "".join(f"; {sentence}" for sentence in in_vain)
    published = sorted(set(_strings(contents, depth=2)) & set(PUBLISHED))
    hint = (
        f" Its settings name {published[0]}: try --tokenizer {published[0]}." if published else ""
    )
    if (text := text_of_characters(folder, rows)) is not None:
        hint += (
            f" {text} has exactly {rows:,} different characters: if that is the text that it was "
            f"trained on, --tokenizer characters:{text} gives them ids in their order."
        )
    return ConvertError(
        f"{folder} has no vocabulary for the model's {rows:,} ids, nor has the checkpoint{looked}."
        f"{hint} Name one with --tokenizer: {FORMS}"
    )


def _strings(values: Mapping[str, Any], depth: int) -> Iterator[str]:
    for value in values.values():
        if isinstance(value, str):
            yield value
        elif depth > 1 and isinstance(value, Mapping):
            yield from _strings(value, depth - 1)
