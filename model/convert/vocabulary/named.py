"""The values of `--tokenizer`:

gpt2, cl100k_base, ...            a published encoding
FILE                              any file that `files.py` reads
characters:TEXT[,first=N,last=N]  the sorted characters of a text, as in `sorted(set(text))`, with N
                                  additional ids before or after them
words:FILE[,first=N,last=N]       one word per line, or a JSON list, sorted by id
bytes[,first=N,last=N]            the 256 bytes in order
printable[,first=N,last=N]        the 100 characters of Python's `string.printable`, in that order
ascii[,first=N,last=N]            the 95 characters from space to ~, in order
none                              only token ids, no vocabulary
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.source_file import source_bytes, source_json, source_text
from logitd.model.convert.vocabulary.build import build_tokenizer
from logitd.model.convert.vocabulary.files import vocabulary_in
from logitd.model.convert.vocabulary.lines import table_of_lines
from logitd.model.convert.vocabulary.table import Table, table_of
from logitd.model.text.published import PUBLISHED, published_tokenizer
from logitd.model.text.tokenizer import Tokenizer, TokenizerError

NONE = "none"
_RULE = re.compile(
    r"(?:(characters|words):(.+?)|(bytes|printable|ascii))((?:,(?:first|last)=\d+)*)", re.DOTALL
)
_FIXED: Mapping[str, Sequence[str | bytes]] = {
    "bytes": [bytes([byte]) for byte in range(256)],
    "printable": string.printable,
    "ascii": [chr(code) for code in range(32, 127)],
}
FORMS = (
    f"{', '.join(PUBLISHED)}, a file (ranks, tokenizer.json, meta.pkl, a vocabulary as JSON or "
    "pickle), characters:TEXT, words:FILE, bytes, printable, ascii or none"
)


def named_vocabulary(name: str, *, ids: int, skip_normalizer: bool) -> ForeignTokenizer:
    """Read the vocabulary that `name` describes, for a model with `ids` ids. Raises
    ConvertError."""
    if name == NONE:
        note = "there is no vocabulary: prompts and generated texts are token ids"
        tokenizer = Tokenizer.without_text(ids)
        return ForeignTokenizer(tokenizer=tokenizer, notes=(note,))
    if name in PUBLISHED:
        try:
            return ForeignTokenizer(tokenizer=published_tokenizer(name), where=name)
        except (TokenizerError, OSError) as error:
            raise ConvertError(str(error)) from error
    if (rule := _RULE.fullmatch(name)) is not None:
        first, last = (_count(rule[4], key) for key in ("first", "last"))
        if rule[3] is not None:
            return _fixed(rule[3], first, last)
        make = _characters if rule[1] == "characters" else _words
        return make(Path(rule[2]), first, last, ids)
    path = Path(name)
    if not path.is_file():
        raise ConvertError(f"the tokenizer {name!r} is not a file; --tokenizer takes {FORMS}")
    vocabulary = vocabulary_in(path, skip_normalizer=skip_normalizer)
    if vocabulary is None:
        raise ConvertError(
            f"{path} does not hold a vocabulary in a known form: expected a dictionary that maps "
            "tokens to ids, a list of tokens, merges of pairs of ids, or a tokenizer.json"
        )
    return replace(vocabulary, where=str(path))


def named_file(name: str) -> Path | None:
    """The file that a description names; None for a vocabulary without a file."""
    if name == NONE or name in PUBLISHED:
        return None
    rule = _RULE.fullmatch(name)
    return Path(name) if rule is None else Path(rule[2]) if rule[2] is not None else None


def _characters(path: Path, first: int, last: int, ids: int) -> ForeignTokenizer:
    """The characters of a text, as a vocabulary. Raises ConvertError unless the number of
    characters matches the number of the model's ids. If a character were missing, all characters
    after it would have wrong ids."""
    where, extra = f"the characters of {path}", first + last
    for lines in (False, True):  # unchanged, and with line ends as Python's open() converts them
        characters = sorted(set(source_text(path, lines=lines)))
        if len(characters) + extra == ids:
            table = Table(texts=dict(enumerate(characters, start=first)), where=where)
            return build_tokenizer(_with_extra(table, first, last))
    more = ids - len(characters) - extra
    advice = (
        f"It is not the training text, or was changed after training: it has {-more:,} too many"
    )
    if more > 0:
        advice = (
            f"If the model has {more:,} additional ids, give their place: first={first + more} "
            f"before the characters, or last={last + more} after them"
        )
    beside = f" and {extra} extra ids" if extra else ""
    raise ConvertError(
        f"{path} has {len(characters):,} different characters{beside}, but the model has {ids:,} "
        f"ids: sorted characters have the right ids only if none is missing. {advice}"
    )


def _words(path: Path, first: int, last: int, ids: int) -> ForeignTokenizer:
    table: Table | None
    if path.suffix.lower() == ".json":
        table = table_of(source_json(path), str(path))
    else:
        table = table_of_lines(source_bytes(path), path)
    if table is None:
        raise ConvertError(
            f"{path} is neither a JSON list of tokens nor a JSON object that maps tokens to ids"
        )
    shifted = {first + token_id: text for token_id, text in table.texts.items()}
    table = Table(texts=shifted, where=f"the words of {path}", pattern=table.pattern)
    return build_tokenizer(_with_extra(table, first, last))


def _fixed(name: str, first: int, last: int) -> ForeignTokenizer:
    table = Table(texts=dict(enumerate(_FIXED[name], start=first)), where=name)
    extended = replace(_with_extra(table, first, last), ranked=name == "bytes")
    return build_tokenizer(extended)


def fixed_with(ids: int) -> str | None:
    """The name of the fixed alphabet with this number of ids; None if there is none."""
    return next((name for name, texts in _FIXED.items() if len(texts) == ids), None)


def _with_extra(table: Table, first: int, last: int) -> Table:
    size = max(table.texts) + 1
    extra = {i: f"<|extra_{i}|>" for i in (*range(first), *range(size, size + last))}
    special = frozenset(extra.values())
    return replace(table, texts=extra | dict(table.texts), special=special)


def _count(options: str, key: str) -> int:
    values = re.findall(rf",{key}=(\d+)", options)
    return int(values[-1]) if values else 0
