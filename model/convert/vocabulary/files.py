"""Files that hold a vocabulary: JSON, plain pickles, lists of lines, ranks, tokenizer.json.

`vocabulary_in` reads one file, `vocabularies_beside` looks where people put them: in the model's
folder and its usual subfolders, else in those of the folder above. A file counts where it parses
into one of the known forms. No code of a file is run.
"""

import base64
import binascii
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer
from logitd.model.convert.hf.added import TOKENIZER_CONFIG
from logitd.model.convert.hf.chat_template import read_template
from logitd.model.convert.hf.tokenizer import TOKENIZER, read_tokenizer
from logitd.model.convert.pt_file import read_plain_pickle
from logitd.model.convert.source_file import source_bytes, source_json, source_text
from logitd.model.convert.vocabulary.build import build_tokenizer
from logitd.model.convert.vocabulary.table import Table, id_merges, string_merges, table_of
from logitd.model.files import VOCABULARY_BYTES
from logitd.model.text.published import published_tokenizer
from logitd.model.text.tokenizer import TokenizerError

META = "meta.pkl"

NAMES = (
    *("meta.pkl", "meta.json", "*vocab*", "*tokenizer*", "*mapping*", "*stoi*", "*itos*"),
    *("*char*to*", "*char*2*", "*token*to*", "*token*2*", "*word*to*", "*word*2*", "chars.*"),
    *("characters.*", "alphabet.*", "encoder.json", "*id*to*", "*id*2*", "*int*to*", "*i*2*c*"),
)
"""What vocabularies are called, whatever the case."""
PICKLES = (".pkl", ".pickle", ".p")
SUFFIXES = (*PICKLES, ".json", ".txt", ".model", ".tiktoken")
FOLDERS = (
    *("vocab", "vocabs", "vocabulary", "tokenizer", "tokenizers", "data", "dataset", "datasets"),
    *("meta", "assets", "artifacts"),
)
"""Where they lie beside a model; in each folder of data, too."""
MERGES = ("merges.txt", "merges.json", "bpe_merges.txt", "bpe_merges.json")
MOST_FOLDERS = 200


@dataclass(frozen=True)
class Candidate:
    """A vocabulary and where it comes from, for people."""

    where: str
    vocabulary: ForeignTokenizer


def vocabulary_in(path: Path, *, skip_normalizer: bool) -> ForeignTokenizer | None:
    """The vocabulary of one file; None where the file holds something else. Raises ConvertError
    for one that is damaged, or that cannot be had here."""
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        return _built(table_of(read_plain_pickle(path), str(path)), path, skip_normalizer)
    if suffix == ".json":
        document = source_json(path)
        if isinstance(document, dict) and isinstance(document.get("model"), dict):
            vocabulary = read_tokenizer(path, skip_normalizer=skip_normalizer)
            return read_template(vocabulary, path.parent)
        return _built(table_of(document, str(path)), path, skip_normalizer)
    raw = source_bytes(path)
    if suffix == ".model":
        return _lecture_model(raw, path)
    if _are_ranks(raw):
        try:
            return ForeignTokenizer(tokenizer=published_tokenizer(str(path)))
        except TokenizerError as error:
            raise ConvertError(str(error)) from error
    return _built(table_of_lines(raw, path), path, skip_normalizer)


def table_of_lines(raw: bytes, path: Path) -> Table:
    """A token a line in the order of ids, or `token id` on every line. Raises ConvertError."""
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path} is not a text in UTF-8: {error}") from error
    lines = text.removesuffix("\n").split("\n")
    numbered = [line.rsplit(None, 1) if "\t" in line or " " in line else [line] for line in lines]
    if all(len(parts) == 2 and parts[1].isdecimal() for parts in numbered):
        texts = {int(number): token for token, number in numbered}
        if len(texts) == len(lines):
            return Table(texts=texts, where=str(path))
    empty = [place for place, line in enumerate(lines) if not line]
    if len(empty) == 2 and empty[1] == empty[0] + 1:  # a line break among the characters
        lines[empty[0] : empty[1] + 1] = ["\n"]
    elif empty:
        raise ConvertError(
            f"{path}: line {empty[0] + 1} is empty, and each line is a token; remove empty lines, "
            "or write the tokens as a JSON list"
        )
    return Table(texts=dict(enumerate(lines)), where=str(path))


def vocabularies_beside(
    folder: Path, dataset: str | None, *, skip_normalizer: bool
) -> tuple[list[Candidate], list[str]]:
    """The vocabularies of the nearest place that has some, and what was looked at in vain.

    `dataset` is the name of nanoGPT's data folder, where it is known. Raises ConvertError for a
    `tokenizer.json`, or a vocabulary with merges, that cannot be had; other files may be anything,
    and what is wrong with them is among what was looked at in vain.
    """
    in_vain: list[str] = []
    for places in _places(folder, dataset):
        candidates = []
        for place in places:
            for path in _files(place):
                try:
                    vocabulary = vocabulary_in(path, skip_normalizer=skip_normalizer)
                except ConvertError as error:
                    if path.name == TOKENIZER or _merges_beside(path) is not None:
                        raise  # this is the vocabulary, whatever else lies there
                    in_vain.append(str(error))
                    continue
                if vocabulary is not None:
                    candidates.append(Candidate(str(path), vocabulary))
                    candidates += _sorted_characters(path)
                elif path.name != TOKENIZER_CONFIG:
                    in_vain.append(f"{path} is not a vocabulary in a known form")
        if candidates:
            return candidates, in_vain
    return [], in_vain


def _sorted_characters(path: Path) -> Iterator[Candidate]:
    """The other reading of a list of characters, a line each: some programs take the characters of
    the whole file, sorted, for their vocabulary."""
    if path.suffix.lower() != ".txt":
        return
    text = source_text(path).removeprefix("\ufeff")
    if all(len(line) <= 1 for line in text.split("\n")):
        where = f"characters:{path}"
        table = Table(texts=dict(enumerate(sorted(set(text)))), where=where)
        yield Candidate(where, build_tokenizer(table))


def text_of_characters(folder: Path, count: int) -> Path | None:
    """A text beside a model that has exactly so many different characters; None where there is
    none, or several."""
    above, texts = folder.resolve().parent, list[Path]()
    for place in (folder, *_subfolders(folder), above, *_subfolders(above)):
        for path in _listed(place):
            if path.suffix.lower() == ".txt" and _is_small(path):
                with contextlib.suppress(ConvertError):
                    if len(set(source_text(path))) == count:
                        texts.append(path)
    return texts[0] if len(texts) == 1 else None


def _places(folder: Path, dataset: str | None) -> Iterator[list[Path]]:
    """Folders to look into, nearest first; those of one list are equally near."""
    above = folder.resolve().parent
    named = above / "data" / dataset if dataset else None
    yield [folder]
    if named is not None and named.is_dir():
        yield [named]
    yield list(_subfolders(folder))
    yield [above, *_subfolders(above)]


def _subfolders(folder: Path) -> Iterator[Path]:
    for inner in _listed(folder):
        if inner.name.lower() in FOLDERS and inner.is_dir():
            yield inner
            if inner.name.lower().startswith("data"):
                yield from [deeper for deeper in _listed(inner) if deeper.is_dir()][:MOST_FOLDERS]


def _files(folder: Path) -> Iterator[Path]:
    """Files that may be vocabularies by their names."""
    files = [path for path in _listed(folder) if path.suffix.lower() in SUFFIXES]
    whole = any(path.name == TOKENIZER and _is_library_document(path) for path in files)
    for path in files:
        if not any(fnmatch(path.name.lower(), name) for name in NAMES) or not path.is_file():
            continue
        if whole and path.name != TOKENIZER and _merges_beside(path) is not None:
            continue  # the older form of the same vocabulary
        if _is_small(path):
            yield path


def _is_small(path: Path) -> bool:
    """Whether a path is a file that may be a vocabulary, or a text of one."""
    return path.is_file() and path.stat().st_size <= VOCABULARY_BYTES


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # a folder above may be closed to us
        return []


def _is_library_document(path: Path) -> bool:
    try:
        document = source_json(path)
    except ConvertError:
        return False
    return isinstance(document, dict) and isinstance(document.get("model"), dict)


def _built(table: Table | None, path: Path, skip_normalizer: bool) -> ForeignTokenizer | None:
    if table is None:
        return None
    beside = _merges_beside(path)
    if beside is not None and table.merges is None and table.strings is None:
        merges = _merges(beside)
        pairs = id_merges(merges)
        strings = None if pairs is not None else string_merges(merges)
        table = replace(table, merges=pairs, strings=strings)
    return build_tokenizer(table, skip_normalizer=skip_normalizer)


def _merges_beside(path: Path) -> Path | None:
    """The file of merges that belongs to a vocabulary, by its name."""
    if "vocab" not in path.name.lower() and path.name.lower() != "encoder.json":
        return None
    return next((path.with_name(name) for name in MERGES if path.with_name(name).is_file()), None)


def _merges(path: Path) -> Any:
    if path.suffix == ".json":
        return source_json(path)
    lines = source_bytes(path).decode("utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#version")]


def _lecture_model(raw: bytes, path: Path) -> ForeignTokenizer:
    """The file that minbpe saves: its version, the pattern, special tokens, merges."""
    if not raw.startswith(b"minbpe v1\n"):
        raise ConvertError(
            f"{path} is SentencePiece's or another library's own format, which is not read here"
        )
    try:
        lines = raw.decode("utf-8").split("\n")
        count = int(lines[2])
        special = [line.rsplit(" ", 1) for line in lines[3 : 3 + count]]
        names = {int(number): name for name, number in special}
        pairs = [tuple(map(int, line.split())) for line in lines[3 + count :] if line.strip()]
        merges = {(left, right): 256 + place for place, (left, right) in enumerate(pairs)}
    except (ValueError, IndexError) as error:
        raise ConvertError(f"{path} is damaged: {error}") from error
    return build_tokenizer(
        Table(
            texts=names,
            where=str(path),
            merges=merges,
            pattern=lines[1] or r"[\s\S]+",
            special=frozenset(names.values()),
        )
    )


def _are_ranks(raw: bytes) -> bool:
    """Whether every line is a base64 token and its rank, and all bytes are among them."""
    tokens = set()
    for line in raw.splitlines():
        parts = line.split()
        if not parts:
            continue
        if len(parts) != 2 or not parts[1].isdigit():
            return False
        try:
            tokens.add(base64.b64decode(parts[0], validate=True))
        except binascii.Error:
            return False
    return all(bytes([byte]) in tokens for byte in range(256))
