"""Check text: encodes the text of --check with the source's token ids.

If the model's format determines its computation, the model's loss on the text is measured, too.
`by_role/objective.py` computes the losses. With a vocabulary of words, unknown words become the
token for unknown words, and the text is converted to lower case if the vocabulary has no upper
case.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import regex

from logitd.model.convert.by_role.build import Built
from logitd.model.convert.by_role.by_text import compared_with_chance
from logitd.model.convert.by_role.objective import (
    FEWEST_LINES,
    SAMPLE_TOKENS,
    CheckText,
    text_objectives,
)
from logitd.model.convert.foreign import ConvertError, ForeignModel, ForeignTokenizer
from logitd.model.data.errors import DataError
from logitd.model.data.sources.document import beginning
from logitd.model.data.sources.files import documents_of_all, named_files
from logitd.model.text.tokenizer import Tokenizer, TokenizerError

CHECKED_CHARACTERS = 2_000_000
"""Maximum number of characters of the text that are used."""
_UNKNOWN = ("<unk>", "<UNK>", "[UNK]", "[unk]", "UNK", "<|unk|>")


def check_files(path: Path) -> list[Path]:
    """The text files at a path. Raises ConvertError."""
    try:
        return named_files(str(path))
    except DataError as error:
        raise ConvertError(f"--check {path}: {error}") from error


def read_check_text(path: Path, files: Sequence[Path], vocabulary: ForeignTokenizer) -> CheckText:
    """Encode a text, and also its lines if each may be a training sample. Raises ConvertError."""
    tokenizer = vocabulary.tokenizer
    try:
        text = beginning(documents_of_all(files, None), CHECKED_CHARACTERS).replace("\r\n", "\n")
        text = _lowered(tokenizer, text)
        lines = list(_encoded_lines(tokenizer, text))
        try:
            ids = _encoded(tokenizer, text)
        except TokenizerError:  # line breaks may have no id
            if not lines:
                raise
            ids = []
    except (DataError, TokenizerError) as error:
        raise ConvertError(f"--check {path}: {error}") from error
    order = vocabulary.source_ids
    return CheckText(
        path.name,
        [order[token_id] for token_id in ids],
        [[order[token_id] for token_id in line] for line in lines],
        [order[token_id] for token_id in _starts(tokenizer)],
    )


def _lowered(tokenizer: Tokenizer, text: str) -> str:
    words = tokenizer.kind == "words" and b"".join(tokenizer.tokens).decode(errors="replace")
    return text.lower() if words and words == words.lower() else text


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    unknown = next(
        (i for n in _UNKNOWN if (i := tokenizer.special_tokens.get(n)) is not None), None
    )
    if tokenizer.kind != "words" or unknown is None:
        return tokenizer.encode(text)
    ids: list[int] = []
    for piece in regex.findall(tokenizer.pattern, text):
        try:
            ids += tokenizer.encode(piece)
        except TokenizerError:
            ids.append(unknown)
    return ids


def _encoded_lines(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Yield the token ids of each line, if the text has many lines and all are short."""
    lines = [line for line in text.split("\n") if line]
    if len(lines) >= FEWEST_LINES and max(map(len, lines)) < SAMPLE_TOKENS:
        for line in lines:
            yield _encoded(tokenizer, line)


def _starts(tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the ids that may come before a line. They are the id of the line break, the id 0, and
    the id of the end-of-text token, in this order."""
    with contextlib.suppress(TokenizerError):
        yield from tokenizer.encode("\n")[:1]
    yield 0
    if tokenizer.end_of_text is not None:
        yield tokenizer.end_of_text


def compare_with_text(
    model: ForeignModel, text: CheckText, log: Callable[[str], None]
) -> ForeignModel:
    """Add a model's loss on a text to the model's facts. Raises ConvertError if that loss is higher
    than the loss of a unigram model with the text's own token frequencies."""
    rows = replace(model.config, padded_vocab_size=model.config.vocab_size)
    built = Built(rows, model.weights, ())
    losses = {
        float(objective(built, causal=True, effort="full").mean()): objective
        for objective in text_objectives(text, model.config.context_length)
    }
    loss = min(losses)
    objective = losses[loss]
    sentence = compared_with_chance(loss, objective)
    if loss > objective.unigram_nats():
        raise ConvertError(
            f"the model does not predict {text.name}: {sentence}. The text or the vocabulary does "
            "not belong to the model"
        )
    verified = sentence if loss < objective.triples else f"not verified: {sentence}"
    log(verified if verified is not sentence else f"verified: {sentence}")
    return replace(model, facts={**model.facts, "verified": verified})
